"""The losses against hand-computed values: a test fails when a sign or a bound flips."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_tasks.ppo.losses import (
    Coefficients,
    MicroBatch,
    Sums,
    policy_loss,
    policy_terms,
    ptx_loss,
    token_loss,
    value_loss,
    value_term,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # already likelier by more than the range: no further gain
        (0.5, 2.0, -1.0, False),  # a good token became unlikely: the full gradient
        (1.5, -2.0, 3.0, False),  # a bad token became likely: the full gradient
        (0.5, -2.0, 1.6, True),
        (0.9, -2.0, 1.8, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_policy_loss_equals_hand_computed_values(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    result = policy_loss(torch.tensor([[math.log(ratio)]]), torch.tensor([[advantage]]), cliprange=0.2)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() is clipped


@pytest.mark.parametrize(("advantage", "direction"), [(1.0, 1), (-1.0, -1)])
def test_descending_the_policy_loss_makes_good_tokens_likelier(advantage: float, direction: int) -> None:
    logratio = torch.zeros(1, 1, requires_grad=True)
    policy_loss(logratio, torch.tensor([[advantage]]), 0.2).loss.sum().backward()
    assert logratio.grad is not None
    assert -logratio.grad.item() == direction


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_a_clipped_token_has_no_gradient(ratio: float, advantage: float) -> None:
    logratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    policy_loss(logratio, torch.tensor([[advantage]]), 0.2).loss.sum().backward()
    assert logratio.grad is not None
    assert logratio.grad.item() == 0


@pytest.mark.parametrize(
    ("ratio", "loss", "clipped"), [(1.25, -2.5, False), (1.4, -2.6, True), (0.7, -1.4, False)]
)
def test_the_clip_range_can_be_wider_above_than_below(ratio: float, loss: float, clipped: bool) -> None:
    result = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([2.0]), 0.2, cliprange_high=0.3)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() is clipped
    below = policy_loss(torch.tensor([math.log(0.7)]), torch.tensor([-2.0]), 0.2, cliprange_high=0.3)
    assert below.loss.item() == pytest.approx(1.6, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (5.0, -2.0, 6.0, True),  # 10 without dual_clip
        (2.0, -2.0, 4.0, False),
        (0.5, -2.0, 1.6, True),  # the usual clip still applies
        (5.0, 2.0, -2.4, True),  # a good token is not affected
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    result = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, dual_clip=3.0)
    assert result.loss.item() == pytest.approx(loss, abs=1e-5)
    assert result.clipped.item() is clipped


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, False),  # ½·0.9²
        (1.5, 1.0, 2.0, 0.32, True),  # clipped to 1.2: ½·0.8²
        (0.2, 1.0, 2.0, 1.62, False),  # ½·max(1.8², 1.2²)
        (0.5, 1.0, 0.0, 0.32, True),  # clipped to 0.8
        (1.5, 1.0, 0.0, 1.125, False),
        (1.0, 1.0, 1.0, 0.0, False),
    ],
)
def test_value_loss_equals_hand_computed_values(
    new: float, old: float, target: float, loss: float, clipped: bool
) -> None:
    result = value_loss(torch.tensor([[new]]), torch.tensor([[old]]), torch.tensor([[target]]), 0.2)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() is clipped


def test_a_value_within_its_range_is_not_clipped_by_rounding() -> None:
    new, values, returns = 0.19 * torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert (values + (new - values) != new).any(), "there is rounding"
    assert not value_loss(new, values, returns, 0.2).clipped.any()


def test_descending_the_value_loss_moves_values_towards_returns() -> None:
    new = torch.tensor([[1.0, 1.0]], requires_grad=True)
    value_loss(new, torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, -3.0]]), 0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-2.0, 4.0]]


def test_without_a_clip_range_the_value_loss_is_half_the_square() -> None:
    result = value_loss(torch.tensor([5.0]), torch.tensor([1.0]), torch.tensor([2.0]), None)
    assert result.loss.item() == 4.5
    assert not result.clipped.item()


# ------------------------------------------------------------------------------------- the total loss

COEFFICIENTS = Coefficients(cliprange=0.2, cliprange_value=0.2, vf_coef=0.1)
MASK = torch.tensor([[True, True], [True, False]])


def rows(a: float, b: float, c: float) -> torch.Tensor:
    return torch.tensor([[a, b], [c, math.nan]])


LOGPROBS, ENTROPY_OF, VALUES = rows(-1.0, -2.0, -0.5), rows(0.7, 0.2, 0.4), rows(1.0, 0.2, 0.5)


def micro_batch() -> MicroBatch:
    """Three real tokens; what is on padding is not a number."""
    return MicroBatch(
        mask=MASK, logprobs=rows(-1.1, -2.0, -0.9), ref_logprobs=rows(-1.5, -1.0, -0.5),
        values=rows(1.0, 0.0, 0.5), advantages=rows(2.0, -1.0, 0.5), returns=rows(2.0, 0.0, 0.0),
    )  # fmt: skip


def total(coefficients: Coefficients) -> tuple[torch.Tensor, Sums]:
    of_policy, sums = policy_terms(LOGPROBS, ENTROPY_OF, micro_batch(), coefficients)
    of_critic, more = value_term(VALUES, micro_batch(), coefficients)
    return of_policy + of_critic, sums | more


POLICY = -2 * math.exp(0.1) + 1 - 0.5 * 1.2
"""The third ratio, exp(0.4), is clipped."""
VALUE = 0.5 * (1 + 0.04 + 0.25)
ENTROPY = 0.7 + 0.2 + 0.4
K2 = 0.5 * (0.5**2 + 1 + 0)
PENALTY = sum(math.exp(x) - 1 - x for x in (0.1, 0.0, 0.4))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, POLICY + 0.1 * VALUE),
        ({"entropy_coef": 0.3}, POLICY + 0.1 * VALUE - 0.3 * ENTROPY),
        ({"kl_coef": 0.4, "kl_estimator": "k2"}, POLICY + 0.1 * VALUE + 0.4 * K2),
        ({"beta": 0.6}, POLICY + 0.1 * VALUE + 0.6 * PENALTY),
        (
            {"entropy_coef": 0.3, "kl_coef": 0.4, "kl_estimator": "k2", "beta": 0.6},
            POLICY + 0.1 * VALUE - 0.3 * ENTROPY + 0.4 * K2 + 0.6 * PENALTY,
        ),
    ],
    ids=["policy-value", "entropy", "kl", "penalty", "all"],
)
def test_the_total_loss_is_the_weighted_sum_of_its_terms(changes: dict[str, Any], expected: float) -> None:
    loss, sums = total(replace(COEFFICIENTS, **changes))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sums["loss/policy_avg"].item() == pytest.approx(POLICY, rel=1e-5)
    assert sums["loss/value_avg"].item() == pytest.approx(VALUE, rel=1e-5)
    assert sums["policy/entropy_avg"].item() == pytest.approx(ENTROPY)
    assert sums["num_tokens"].item() == 3
    assert sums["policy/clipfrac_avg"].item() == 1
    assert ("loss/kl_avg" in sums, "policy/penalty_kl_avg" in sums) == (
        "kl_coef" in changes,
        "beta" in changes,
    )


def test_in_the_critics_warm_up_only_the_value_term_is_left() -> None:
    everything = replace(COEFFICIENTS, entropy_coef=0.3, kl_coef=0.4, kl_estimator="k2", beta=0.6)
    loss, _ = total(everything.for_critic_only())
    assert loss.item() == pytest.approx(0.1 * VALUE, rel=1e-5)


def test_the_ratio_can_be_to_the_reference() -> None:
    loss, _ = total(replace(COEFFICIENTS, ratio_from="reference", vf_coef=0.0))
    assert loss.item() == pytest.approx(-2 * 1.2 + 0.8 - 0.5, rel=1e-5)  # ratios exp(0.5), exp(−1), 1


def test_the_loss_of_groups_of_tokens_adds_up_to_that_of_the_rows() -> None:
    coefficients = replace(COEFFICIENTS, entropy_coef=0.3, kl_coef=0.4, kl_estimator="k2", beta=0.6)
    whole, _ = policy_terms(LOGPROBS, ENTROPY_OF, micro_batch(), coefficients)
    loss = token_loss(micro_batch(), coefficients)
    groups = [
        loss(LOGPROBS[MASK][tokens], ENTROPY_OF[MASK][tokens], tokens)
        for tokens in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(groups[0] + groups[1], whole)


def test_the_ptx_loss_is_the_weighted_mean_nll_of_a_token() -> None:
    assert ptx_loss(torch.tensor(6.0), 4.0, 0.1).item() == pytest.approx(0.15)

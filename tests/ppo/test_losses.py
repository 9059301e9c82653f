"""The losses against hand-computed values: a test fails when a sign or a bound flips."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlhf_tasks.models.logprobs import TokenStats
from rlhf_tasks.ppo.losses import MicroBatch, clipped_surrogate, importance_weights, ppo_clip, value_loss
from rlhf_tasks.ppo.state import PpoState, Setup
from rlhf_tasks.ppo.train import token_losses
from tests import small

WIDER, DUAL = {"cliprange_high": 0.3}, {"dual_clip": 3.0}


@pytest.mark.parametrize(
    ("clips", "ratio", "advantage", "loss", "clipped"),
    [
        ({}, 1.0, 2.0, -2.0, False),
        ({}, 1.1, 2.0, -2.2, False),
        ({}, 1.5, 2.0, -2.4, True),  # already likelier by more than the range: no further gain
        ({}, 0.5, 2.0, -1.0, False),  # a good token became unlikely: the full gradient
        ({}, 1.5, -2.0, 3.0, False),  # a bad token became likely: the full gradient
        ({}, 0.5, -2.0, 1.6, True),
        ({}, 0.9, -2.0, 1.8, False),
        ({}, 1.5, 0.0, 0.0, False),
        (WIDER, 1.25, 2.0, -2.5, False),
        (WIDER, 1.4, 2.0, -2.6, True),
        (WIDER, 0.7, 2.0, -1.4, False),
        (WIDER, 0.7, -2.0, 1.6, True),
        (DUAL, 5.0, -2.0, 6.0, True),  # 10 without dual_clip
        (DUAL, 2.0, -2.0, 4.0, False),
        (DUAL, 0.5, -2.0, 1.6, True),  # the usual clip still applies
        (DUAL, 5.0, 2.0, -2.4, True),  # a good token is not affected
    ],
)
def test_policy_loss_equals_hand_computed_values(
    clips: dict[str, float], ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    """A clipped token has no gradient; another one's is its loss, since d ratio / d log-prob = ratio."""
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found, is_clipped = clipped_surrogate(log_ratio, torch.tensor([[advantage]]), cliprange=0.2, **clips)
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert is_clipped.item() is clipped
    (gradient,) = torch.autograd.grad(found.sum(), log_ratio)
    assert gradient.item() == pytest.approx(0 if clipped else loss, abs=1e-5)


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
    value = torch.tensor([[new]], requires_grad=True)
    found, is_clipped = value_loss(value, torch.tensor([[old]]), torch.tensor([[target]]), 0.2)
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert is_clipped.item() is clipped
    (gradient,) = torch.autograd.grad(found.sum(), value)
    assert gradient.item() == pytest.approx(0 if clipped else new - target, abs=1e-6)


def test_without_a_clip_range_the_value_loss_is_half_the_square() -> None:
    loss, is_clipped = value_loss(torch.tensor([5.0]), torch.tensor([1.0]), torch.tensor([2.0]), None)
    assert loss.item() == 4.5
    assert not is_clipped.item()


def test_importance_weights_are_the_capped_ratio_of_policy_to_sampler() -> None:
    policy = torch.tensor([[0.6, 0.5, 0.1]]).log()
    sampler = torch.tensor([[0.3, 0.5, 0.01]]).log()
    assert importance_weights(policy, sampler, 4.0)[0].tolist() == pytest.approx([2.0, 1.0, 4.0])


# ------------------------------------------------------------------------------------- the total loss

MASK = torch.tensor([[True, True], [True, False]])


def rows(a: float, b: float, c: float) -> Tensor:
    """Three real tokens; what is on padding is not a number."""
    return torch.tensor([[a, b], [c, math.nan]])


LOGPROBS, ENTROPY_OF = rows(-1.0, -2.0, -0.5), rows(0.7, 0.2, 0.4)
POLICY = [-2 * math.exp(0.1), 1.0, -0.5 * 1.2]
"""The third ratio, exp(0.4), is clipped."""


def losses(*, importance: Tensor | None = None, **changes: Any) -> Any:
    config, ones = small.ppo(**changes), torch.ones(2, 2)
    batch = MicroBatch(
        mask=MASK,
        logprobs=rows(-1.1, -2.0, -0.9),
        ref_logprobs=rows(-1.5, -1.0, -0.5),
        values=rows(1.0, 0.0, 0.5),
        advantages=rows(2.0, -1.0, 0.5),
        returns=rows(2.0, 0.0, 0.0),
        importance=ones if importance is None else importance,
    )
    stats = TokenStats(LOGPROBS, ENTROPY_OF, ones, ones)
    setup = cast(Setup, SimpleNamespace(config=config, loss=ppo_clip))
    state = cast(PpoState, SimpleNamespace(kl_coef=0.4, penalty_beta=0.6))
    return token_losses(setup, state, stats, batch)


def test_the_ratio_can_be_to_the_reference() -> None:
    _, metrics = losses(ratio_from="reference")  # ratios exp(0.5), exp(−1) and 1
    assert metrics["loss/policy_avg"][MASK].tolist() == pytest.approx([-2 * 1.2, 0.8, -0.5], rel=1e-5)


def test_the_policy_loss_of_a_token_is_multiplied_by_its_importance() -> None:
    """No other term is."""
    total, metrics = losses(importance=torch.tensor([[2.0, 0.5], [3.0, 0.0]]))
    weighted = [2 * POLICY[0], 0.5 * POLICY[1], 3 * POLICY[2]]
    assert metrics["loss/policy_avg"][MASK].tolist() == pytest.approx(weighted, rel=1e-5)
    assert total[MASK].tolist() == pytest.approx(weighted, rel=1e-5)

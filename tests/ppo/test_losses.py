"""The clipped losses by hand, one token a case: each fails when a sign or a bound flips."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_tasks.ppo.losses import policy_loss, value_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # already likelier by more than the range: no more reward for it
        (0.5, 2.0, -1.0, False),  # made unlikely though good: pushed back in full
        (1.5, -2.0, 3.0, False),  # made likely though bad: pushed back in full
        (0.5, -2.0, 1.6, True),
        (0.9, -2.0, 1.8, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    found = policy_loss(torch.tensor([[math.log(ratio)]]), torch.tensor([[advantage]]), cliprange=0.2)
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert found.clipped.item() is clipped


@pytest.mark.parametrize(("advantage", "direction"), [(1.0, 1), (-1.0, -1)])
def test_a_step_down_the_policy_loss_makes_good_tokens_likelier(advantage: float, direction: int) -> None:
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
def test_the_clip_may_be_higher_above_than_below(ratio: float, loss: float, clipped: bool) -> None:
    found = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([2.0]), 0.2, cliprange_high=0.3)
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert found.clipped.item() is clipped
    below = policy_loss(torch.tensor([math.log(0.7)]), torch.tensor([-2.0]), 0.2, cliprange_high=0.3)
    assert below.loss.item() == pytest.approx(1.6, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (5.0, -2.0, 6.0, True),  # 10 without it
        (2.0, -2.0, 4.0, False),
        (0.5, -2.0, 1.6, True),  # the usual clip still holds
        (5.0, 2.0, -2.4, True),  # a good token is not its matter
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    found = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, dual_clip=3.0)
    assert found.loss.item() == pytest.approx(loss, abs=1e-5)
    assert found.clipped.item() is clipped


@pytest.mark.parametrize(
    ("new", "old", "goal", "loss", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, False),  # ½·0.9²
        (1.5, 1.0, 2.0, 0.32, True),  # only 1.2 is believed: ½·0.8²
        (0.2, 1.0, 2.0, 1.62, False),  # ½·max(1.8², 1.2²)
        (0.5, 1.0, 0.0, 0.32, True),  # believed down to 0.8
        (1.5, 1.0, 0.0, 1.125, False),
        (1.0, 1.0, 1.0, 0.0, False),
    ],
)
def test_value_loss_by_hand(new: float, old: float, goal: float, loss: float, clipped: bool) -> None:
    found = value_loss(torch.tensor([[new]]), torch.tensor([[old]]), torch.tensor([[goal]]), 0.2)
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert found.clipped.item() is clipped


def test_a_value_within_its_range_is_not_clipped_by_rounding() -> None:
    new, values, returns = 0.19 * torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert (values + (new - values) != new).any(), "there is rounding"
    assert not value_loss(new, values, returns, 0.2).clipped.any()


def test_a_step_down_the_value_loss_goes_towards_the_return() -> None:
    new = torch.tensor([[1.0, 1.0]], requires_grad=True)
    value_loss(new, torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, -3.0]]), 0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-2.0, 4.0]]


def test_without_a_range_the_value_loss_is_half_the_square() -> None:
    found = value_loss(torch.tensor([5.0]), torch.tensor([1.0]), torch.tensor([2.0]), None)
    assert found.loss.item() == 4.5
    assert not found.clipped.item()

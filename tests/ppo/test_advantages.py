"""Advantages against loops over single rows or groups, and what holds for all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.ppo.advantages import (
    estimate_gae,
    gae,
    group,
    group_deviations,
    response_returns,
    rloo,
)
from rlhf_tasks.ppo.metrics import prompt_share
from tests import small
from tests.ppo.toy import rollout_of

GENERATOR = torch.Generator().manual_seed(1)
REWARDS, VALUES = torch.randn(5, 6, generator=GENERATOR), torch.randn(5, 6, generator=GENERATOR)
LENGTHS = [6, 1, 3, 5, 2]
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def slow(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_k (γλ)^k δ_{t+k} written out, for one response, terminal after its last token."""
    next_values = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v_next, v in zip(rewards, next_values, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("junk", [0.0, torch.nan, 1e9])
def test_gae_equals_the_sum_written_out_row_by_row(gamma: float, lam: float, junk: float) -> None:
    rewards, values = REWARDS.where(MASK, junk), VALUES.where(MASK, junk)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    for row, length in enumerate(LENGTHS):
        expected = slow(REWARDS[row, :length].tolist(), VALUES[row, :length].tolist(), gamma, lam)
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-5)
        expected_returns = [a + v for a, v in zip(expected, VALUES[row, :length].tolist(), strict=True)]
        assert returns[row, :length].tolist() == pytest.approx(expected_returns, abs=1e-5)
        assert advantages[row, length:].tolist() == returns[row, length:].tolist() == [0] * (6 - length)


# -------------------- without a critic

RETURNS = torch.randn(12, generator=GENERATOR, dtype=torch.float64) * 3 + 1


@pytest.mark.parametrize("num_samples", [2, 3, 4, 6, 12])
def test_rloo_and_group_compare_a_return_with_those_of_its_own_prompt(num_samples: int) -> None:
    """With the mean of the others; or with the mean, in standard deviations."""
    by_rloo, by_group = rloo(RETURNS, num_samples).tolist(), group(RETURNS, num_samples).tolist()
    num_prompts = len(RETURNS) // num_samples
    for prompt in range(num_prompts):
        rows = range(prompt, len(RETURNS), num_prompts)
        own = [RETURNS[row].item() for row in rows]
        mean, deviation = statistics.fmean(own), statistics.stdev(own) + 1e-4 * max(map(abs, own))
        others = [(sum(own) - x) / (num_samples - 1) for x in own]
        expected = [x - other for x, other in zip(own, others, strict=True)]
        assert [by_rloo[row] for row in rows] == pytest.approx(expected, abs=1e-12)
        assert [by_group[row] for row in rows] == pytest.approx(
            [(x - mean) / deviation for x in own], abs=1e-12
        )


def test_four_responses_equal_hand_computed_values() -> None:
    """Two prompts of two responses: 1 and 4 for the first, 7 and 7 for the second."""
    returns = torch.tensor([1.0, 7.0, 4.0, 7.0]).double()
    assert rloo(returns, 2).tolist() == [-3.0, 0.0, 3.0, 0.0]
    half = 1.5 / (math.sqrt(4.5) + 4e-4)
    assert group(returns, 2).tolist() == pytest.approx([-half, 0, half, 0])
    assert group_deviations(returns, 2).tolist() == pytest.approx([math.sqrt(4.5), 0])


@pytest.mark.parametrize("scale", [0.25, 1024.0])
def test_the_scale_of_the_rewards_does_not_change_group(scale: float) -> None:
    assert torch.equal(group(scale * RETURNS, 4), group(RETURNS, 4))
    assert torch.equal(rloo(scale * RETURNS, 4), scale * rloo(RETURNS, 4))


@pytest.mark.parametrize("estimator", [rloo, group])
@pytest.mark.parametrize("level", [0.0, 3.0])
def test_equal_responses_have_no_advantage_even_if_rounding_differs(
    estimator: Callable[[Tensor, int], Tensor], level: float
) -> None:
    noise = 1e-6 * level * torch.randn(12, generator=torch.Generator().manual_seed(3)).double()
    assert estimator(level + noise, 4).abs().max() < 0.05


@pytest.mark.parametrize("junk", [0.0, torch.nan, 1e9])
def test_the_return_of_a_response_is_the_sum_of_its_real_tokens_rewards(junk: float) -> None:
    returns: Tensor = response_returns(REWARDS.where(MASK, junk), MASK)
    expected = [sum(REWARDS[row, :length].tolist()) for row, length in enumerate(LENGTHS)]
    assert returns.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_state_after_the_last_real_token_has_the_given_value() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    rewards, values = torch.tensor([[0.0, 8.0], [1.0, 9.0]]), torch.tensor([[0.5, 2.0], [1.0, 9.0]])
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8, torch.tensor([3.0, 2.0]))
    last, only = 8 + 0.9 * 3 - 2, 1 + 0.9 * 2 - 1
    first = 0 + 0.9 * 2 - 0.5 + 0.9 * 0.8 * last
    assert advantages.flatten().tolist() == pytest.approx([first, last, only, 0])
    assert returns.flatten().tolist() == pytest.approx([first + 0.5, last + 2, only + 1, 0])


# -------------------- a critic's own λ, and what stands in for a critic that knows nothing


def estimate(values: Tensor, **advantages: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns of REWARDS, in two groups of two and a row of zeros' worth left out."""
    rows = slice(0, 4)
    responses = [[7] * length for length in LENGTHS[rows]]
    rollout = rollout_of([[4]] * 4, responses, 6, torch.zeros(4), values=values[rows] * MASK[rows])
    config = small.ppo(advantages={"kind": "gae", "samples_per_prompt": 2, **advantages})
    return estimate_gae(REWARDS[rows] * MASK[rows], rollout, config)


def test_the_critic_learns_returns_by_its_own_lambda() -> None:
    advantages, _ = estimate(VALUES, lam=0.8)
    both = estimate(VALUES, lam=0.8, lam_value=1.0)
    assert torch.equal(both[0], advantages)
    by_outcome = (REWARDS * MASK)[:4].flip(1).cumsum(1).flip(1) * MASK[:4]
    torch.testing.assert_close(both[1], by_outcome)


def test_lambda_grows_with_the_length_of_the_response() -> None:
    """1 − 1/(α·l), and 0 where that is negative; the returns keep their λ."""
    advantages, returns = estimate(VALUES, lam=0.8, lam_length=0.5)
    assert torch.equal(returns, estimate(VALUES, lam=0.8)[1])
    for row, length in enumerate(LENGTHS[:4]):
        lam = max(0.0, 1 - 1 / (0.5 * length))
        expected = slow(REWARDS[row, :length].tolist(), VALUES[row, :length].tolist(), 1.0, lam)
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("fallback", ["batch", "group"])
def test_a_critic_that_explains_nothing_is_no_baseline(fallback: str) -> None:
    by_outcome = (REWARDS * MASK).flip(1).cumsum(1).flip(1)
    knowing, misled = by_outcome + 0.01 * VALUES, -by_outcome
    assert torch.equal(estimate(knowing, fallback=fallback)[0], estimate(knowing)[0])
    advantages, returns = estimate(misled, fallback=fallback)
    whole = response_returns(REWARDS[:4], MASK[:4])
    expected = whole - whole.mean() if fallback == "batch" else rloo(whole, 2)
    torch.testing.assert_close(advantages, expected.float()[:, None] * MASK[:4])
    assert torch.equal(returns, estimate(misled)[1]), "the critic goes on learning"


def test_the_share_of_variance_between_prompts_is_the_one_that_was_drawn() -> None:
    """Prompts' means of variance 1, responses around them of variance 3: a quarter."""
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(4000, generator=generator)
    returns = (means + 3**0.5 * torch.randn(4, 4000, generator=generator)).flatten()
    share, low, high = prompt_share(returns, 4)
    assert low < 0.25 < high
    assert high - low < 0.05
    assert share == pytest.approx(0.25, abs=0.02)
    assert prompt_share(torch.randn(16000, generator=generator), 4)[0] < 0.02
    assert prompt_share(torch.ones(8), 4)[0] == 0.0

"""GAE against a loop over single rows, and its closed forms for γ and λ of 0 and 1."""

from __future__ import annotations

import pytest
import torch

from rlhf_tasks.ppo.advantages import gae

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


def test_without_discount_returns_are_sums_of_the_remaining_rewards() -> None:
    _, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
    for row, length in enumerate(LENGTHS):
        remaining = [REWARDS[row, t:length].sum().item() for t in range(length)]
        assert returns[row, :length].tolist() == pytest.approx(remaining, abs=1e-5)


def test_two_tokens_equal_hand_computed_values() -> None:
    mask = torch.tensor([[True, True]])
    advantages, returns = gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 3.0]]), mask, 0.5, 0.5)
    # δ₁ = 2 + 0 − 3 = −1;  δ₀ = 1 + ½·3 − ½ = 2;  A₀ = 2 + ¼·(−1)
    assert advantages.tolist() == [[1.75, -1.0]]
    assert returns.tolist() == [[2.25, 2.0]]

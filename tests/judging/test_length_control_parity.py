"""The win rate at equal length against the length-controlled win rate that AlpacaEval publishes.

The model of Dubois et al. 2024 (arXiv 2404.04475, section 3) for the probability that contender m beats the
baseline on instruction i, with the lengths of their responses in characters:

    P(m wins on i) = σ(θ_m + φ_m · tanh((len_m(i) − len_b(i)) / s) + ψ_m · γ_i)

γ_i is the difficulty of the instruction, s the standard deviation of the length difference. The published
rate is the mean over the instructions of that probability at equal length. The data here has AlpacaEval's
shape: 805 instructions, several contenders, a judge that prefers length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from scipy.optimize import minimize

from rlhf_tasks.judging.statistics import Floats, length_controlled, rate

NUM_INSTRUCTIONS = 805


class Leaderboard(NamedTuple):
    """Preferences in 0 … 1 and lengths of (M, N), M contenders on N instructions; baseline and γ of (N,)."""

    preferences: Floats
    lengths: Floats
    baseline: Floats
    difficulty: Floats


def sigmoid(z: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-z)))


def features(length: Floats, baseline: Floats, ddof: int = 1) -> Floats:
    difference = length - baseline
    return np.asarray(np.tanh(difference / difference.std(ddof=ddof)))


def leaderboard(seed: int, *, psi: float, sharpness: float) -> Leaderboard:
    """Contenders from much worse to better than the baseline, from shorter to much longer.

    `psi` is how much their strength depends on the difficulty. The judge's probabilities are drawn around the
    model's; with a high `sharpness` they are near 0 and 1, as those of a judge that is asked for one letter.
    """
    random = np.random.default_rng(seed)
    theta = np.array([-2.0, -1.0, -0.3, 0.2, 0.8])
    phi = np.array([0.8, 1.2, 0.5, 1.0, 0.7])
    longer = np.array([-300.0, 700.0, 100.0, 1200.0, 0.0])
    difficulty = random.normal(size=NUM_INSTRUCTIONS)
    baseline = random.gamma(4, 400, NUM_INSTRUCTIONS)
    lengths = np.maximum(20, baseline + longer[:, None] + random.normal(0, 700, (5, NUM_INSTRUCTIONS)))
    slopes = psi * np.array([1.0, -0.5, 0.7, -1.0, 0.4])
    z = np.stack([t + p * features(row, baseline) for t, p, row in zip(theta, phi, lengths, strict=True)])
    p = sigmoid(z + slopes[:, None] * difficulty)
    won = random.random(p.shape) < p
    shift = sharpness * (2 * won - 1) + random.normal(size=p.shape)
    return Leaderboard(sigmoid(shift), lengths, baseline, difficulty)


def fitted(x: Floats, y: Floats, ridge: float = 0.0) -> Floats:
    """Weights of greatest likelihood for preferences y in 0 … 1, less ½·ridge·φ², φ being the second one."""

    def loss(w: Floats) -> tuple[float, Floats]:
        z, penalty = x @ w, ridge * w[1] * np.eye(len(w))[1]
        return float((np.logaddexp(0, z) - y * z).sum() + penalty @ w / 2), x.T @ (sigmoid(z) - y) + penalty

    return np.asarray(minimize(loss, np.zeros(x.shape[1]), jac=True, method="BFGS", tol=1e-10).x)


def published(length: Floats, baseline: Floats, y: Floats, difficulty: Floats | None = None) -> float:
    """The paper's rate of one contender: the mean of σ(θ + ψ·γ_i); without γ it is σ(θ)."""
    ones = np.ones_like(y)
    columns = [ones, features(length, baseline)] + ([] if difficulty is None else [difficulty])
    weights = fitted(np.stack(columns, axis=1), y)
    extra = 0.0 if difficulty is None else weights[2] * difficulty
    return float(sigmoid(weights[0] * ones + extra).mean())


def decided(preferences: Floats) -> Floats:
    return np.asarray((preferences > 0.5) * 1.0)


def contenders(board: Leaderboard) -> list[tuple[Floats, Floats]]:
    """Lengths and decided outcomes of each contender."""
    return [(n, decided(p)) for n, p in zip(board.lengths, board.preferences, strict=True)]


def mean_shift(length: Floats, baseline: Floats) -> float:
    """How much longer the contender is than the baseline on the whole, in standard deviations."""
    difference = length - baseline
    return float(abs(difference.mean() / difference.std()))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_published_minimal_formula_but_for_two_named_differences(seed: int) -> None:
    """The penalty ½φ², and a standard deviation with N in its denominator instead of N − 1."""
    board = leaderboard(seed, psi=0.0, sharpness=3.0)
    for length, y in contenders(board):
        x = np.stack([np.ones_like(y), features(length, board.baseline, ddof=0)], axis=1)
        expected = sigmoid(fitted(x, y, ridge=1.0)[:1])[0]
        assert length_controlled(y, length, board.baseline).value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_those_differences_are_a_tenth_of_a_point_unless_a_contender_is_much_longer(seed: int) -> None:
    """They are at most two points for one that is longer by 1.7 standard deviations on the whole."""
    board = leaderboard(seed, psi=0.0, sharpness=3.0)
    for length, y in contenders(board):
        ours = length_controlled(y, length, board.baseline).value
        most = 0.001 if mean_shift(length, board.baseline) < 0.5 else 0.02
        assert ours == pytest.approx(published(length, board.baseline, y), abs=most)
        if most == 0.02:
            assert abs(rate(y).value - published(length, board.baseline, y)) > 0.1, (
                "there was much to correct"
            )


@pytest.mark.parametrize("seed", range(3))
def test_the_term_for_the_difficulty_of_instructions_changes_the_rate_by_three_points_at_most(
    seed: int,
) -> None:
    """Without γ, σ(θ) estimates the same mean over instructions where γ does not go with the lengths."""
    board = leaderboard(seed, psi=1.0, sharpness=3.0)
    gaps = [
        length_controlled(y, length, board.baseline).value
        - published(length, board.baseline, y, board.difficulty)
        for length, y in contenders(board)
    ]
    assert np.abs(gaps).max() < 0.03
    assert np.median(np.abs(gaps)) < 0.005


def test_the_order_of_the_contenders_is_the_published_one() -> None:
    board = leaderboard(1, psi=1.0, sharpness=3.0)
    ours = [length_controlled(y, length, board.baseline).value for length, y in contenders(board)]
    theirs = [published(length, board.baseline, y, board.difficulty) for length, y in contenders(board)]
    assert np.argsort(ours).tolist() == np.argsort(theirs).tolist()
    raw = [rate(y).value for _, y in contenders(board)]
    assert np.argsort(raw).tolist() != np.argsort(theirs).tolist(), (
        "length changes the order of the raw rates"
    )

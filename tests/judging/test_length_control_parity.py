"""The win rate at equal length against the length-controlled win rate that AlpacaEval publishes.

The model of Dubois et al. 2024 (arXiv 2404.04475, section 3) for the probability that contender m beats the
baseline, with the lengths of their responses to instruction i in characters:

    P(m wins on i) = σ(θ_m + φ_m · tanh((len_m(i) − len_b(i)) / s))

s is the standard deviation of the length difference. Its term for the difficulty of each instruction needs
many contenders, and is left out. The published rate is that probability at equal length, σ(θ_m). The data
here has AlpacaEval's shape: 805 instructions, several contenders, a judge that prefers length.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from rlhf_tasks.judging.statistics import Floats, length_controlled, rate

NUM_INSTRUCTIONS = 805


def sigmoid(z: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-z)))


def features(length: Floats, baseline: Floats) -> Floats:
    difference = length - baseline
    return np.asarray(np.tanh(difference / difference.std(ddof=1)))


def contenders(seed: int) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """(N,) lengths of the baseline; (N,) lengths and outcomes of each contender.

    They are from much worse to better than the baseline, and from shorter to much longer.
    """
    random = np.random.default_rng(seed)
    theta, phi = np.array([-2.0, -1.0, -0.3, 0.2, 0.8]), np.array([0.8, 1.2, 0.5, 1.0, 0.7])
    longer = np.array([-300.0, 700.0, 100.0, 1200.0, 0.0])
    baseline = random.gamma(4, 400, NUM_INSTRUCTIONS)
    lengths = np.maximum(20, baseline + longer[:, None] + random.normal(0, 700, (5, NUM_INSTRUCTIONS)))
    made = []
    for t, p, length in zip(theta, phi, lengths, strict=True):
        won = random.random(NUM_INSTRUCTIONS) < sigmoid(t + p * features(length, baseline))
        made.append((length, won.astype(float)))
    return baseline, made


def published(length: Floats, baseline: Floats, y: Floats) -> float:
    """The paper's rate of one contender, σ(θ), of greatest likelihood."""
    x = np.stack([np.ones_like(y), features(length, baseline)], axis=1)

    def loss(w: Floats) -> tuple[float, Floats]:
        z = x @ w
        return float((np.logaddexp(0, z) - y * z).sum()), x.T @ (sigmoid(z) - y)

    theta = minimize(loss, np.zeros(2), jac=True, method="BFGS", tol=1e-10).x
    return float(sigmoid(theta[:1])[0])


def mean_shift(length: Floats, baseline: Floats) -> float:
    """How much longer the contender is than the baseline on the whole, in standard deviations."""
    difference = length - baseline
    return float(abs(difference.mean() / difference.std()))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_published_rate_but_for_a_tenth_of_a_point(seed: int) -> None:
    """For the penalty ½φ², and a standard deviation with N in its denominator instead of N − 1.

    It is two points at most for a contender that is longer by 1.7 standard deviations on the whole.
    """
    baseline, made = contenders(seed)
    for length, y in made:
        ours, theirs = length_controlled(y, length, baseline).value, published(length, baseline, y)
        most = 0.001 if mean_shift(length, baseline) < 0.5 else 0.02
        assert ours == pytest.approx(theirs, abs=most)
        if most == 0.02:
            assert abs(rate(y).value - theirs) > 0.05, "there was much to correct"

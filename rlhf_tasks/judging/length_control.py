"""How much of a difference mere length explains: arrays in, numbers with 95% intervals out. numpy only.

N prompts; outcomes are those of statistics.py. Swapping A and B mirrors every number. Sources:
    interval of a gain      heteroskedasticity-robust OLS, HC1 (White 1980; MacKinnon & White 1985)
    rate at equal length    logistic regression (Dubois et al. 2024, arXiv 2404.04475, eq. 2, shortened)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from rlhf_tasks.judging.statistics import Estimate, Floats, Z, counts, paired, wilson

_RIDGE = 1.0  # on the length's coefficient, see `length_controlled`
_NUM_NEWTON_STEPS = 50


def matched_length_gain(
    score_a: ArrayLike, score_b: ArrayLike, length_a: ArrayLike, length_b: ArrayLike
) -> Estimate:
    """How much higher A scores than B at equal length: the part that a change of length does not explain.

    With d = score_a − score_b and x = length_a − length_b, both (N,), ordinary least squares of
    d = α + β·x + e; the gain is α, the difference expected at x = 0. It is linear in d:

        α = Σ c_i d_i,  c_i = 1/N − x̄ (x_i − x̄) / Σ (x_j − x̄)²,  Var α = N/(N−k) · Σ c_i² e_i²

    (HC1, k = 2), and the interval α ± 1.96 √Var is meant for N of some dozens and more. Where all x are
    equal there is no slope: α is the plain mean of d (c_i = 1/N, k = 1), matched only if that x is 0.
    Rows with a NaN are left out.

    Raises:
        ValueError: if fewer than 3 whole rows remain, or the shapes differ.
    """
    a, b = paired(score_a, score_b)
    d, x = paired(a - b, np.subtract(*paired(length_a, length_b)))
    whole = ~(np.isnan(d) | np.isnan(x))
    d, x = d[whole], x[whole]
    if d.size < 3:
        raise ValueError(f"a gain at matched length needs 3 judged prompts or more, not {d.size}")
    centred = x - x.mean()
    sloped = bool(np.ptp(x) > 0)
    slope = float(centred @ d / (centred @ centred)) if sloped else 0.0
    weights = 1 / d.size - (x.mean() * centred / (centred @ centred) if sloped else np.zeros_like(x))
    gain = float(weights @ d)
    residuals = d - gain - slope * x
    variance = d.size / (d.size - 1 - sloped) * float((weights * residuals) @ (weights * residuals))
    reach = Z * math.sqrt(variance)
    return Estimate(gain, gain - reach, gain + reach, int(d.size))


def length_controlled(outcomes: ArrayLike, length_a: ArrayLike, length_b: ArrayLike) -> Estimate:
    """Win rate that A would have if its responses were as long as B's.

    With x = tanh(d / s), d = length_a − length_b and s the standard deviation of d, a logistic regression

        P(A wins) = σ(θ + φ·x)

    is fitted to the (N,) outcomes, ties as ½; the rate is σ(θ), the one at d = 0. This is AlpacaEval 2's
    model of one contender against one baseline, without its term for the difficulty of each instruction,
    which needs many other contenders. Its weak penalty on φ is ½φ² here, so that φ stays finite for a judge
    that only prefers length. The interval is σ(θ ± 1.96·√Var θ) with the heteroskedasticity-robust variance
    of θ (HC1), which the ½ of a tie does not invalidate (Papke & Wooldridge 1996). Rows with a NaN are left
    out.

    Where all d are equal, length explains nothing and σ(θ) is the plain win rate. Where A wins always or
    never, the same holds at equal length: the interval is Wilson's.

    Raises:
        ValueError: as `summarise`, or if the shapes differ.
    """
    d = np.subtract(*paired(length_a, length_b))
    y, d = paired(outcomes, d)
    counts(y)
    y, d = y[~(np.isnan(y) | np.isnan(d))], d[~(np.isnan(y) | np.isnan(d))]
    if y.min() == y.max() != 0.5:
        return wilson(int(y.sum()), y.size)
    spread = float(d.std())
    x = np.stack([np.ones_like(d), np.tanh(d / spread) if spread > 0 else np.zeros_like(d)], axis=1)
    weights = _logistic_regression(x, y)
    p = _sigmoid(x @ weights)
    curvature = np.linalg.inv((x * (p * (1 - p))[:, None]).T @ x + np.diag([0.0, _RIDGE]))
    scores = x * (y - p)[:, None]
    correction = y.size / max(1, y.size - 1 - (spread > 0))
    reach = Z * math.sqrt(correction * float((curvature @ (scores.T @ scores) @ curvature)[0, 0]))
    value, low, high = (float(_sigmoid(np.array(weights[0] + r))) for r in (0.0, -reach, reach))
    return Estimate(value, low, high, int(y.size))


def _logistic_regression(x: Floats, y: Floats) -> Floats:
    """(2,) weights that maximise Σ y·log σ(xw) + (1−y)·log(1−σ(xw)) − ½·ridge·w[1]², by Newton's steps."""
    ridge = np.diag([0.0, _RIDGE])

    def loss(w: Floats) -> float:
        z = x @ w
        return float((np.logaddexp(0, z) - y * z).sum() + w @ ridge @ w / 2)

    weights = np.zeros(2)
    for _ in range(_NUM_NEWTON_STEPS):
        p = _sigmoid(x @ weights)
        gradient = x.T @ (p - y) + ridge @ weights
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + ridge, gradient)
        while loss(weights - step) > loss(weights) and np.abs(step).max() > 1e-12:
            step = step / 2
        weights = weights - step
        if np.abs(step).max() <= 1e-12:
            break
    return weights


def _sigmoid(z: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0, -z)))

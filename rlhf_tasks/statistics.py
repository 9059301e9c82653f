"""Win rates and what surrounds them: arrays in, numbers with 95% intervals out. numpy only.

Notation: N prompts; the outcome of a prompt is 1 where A wins, ½ for a tie, 0 where B wins, and NaN
where the judge failed. A failure is counted, never taken for a loss.

Everything here is a closed form or an exact distribution, so that nothing needs a seed, and swapping
A and B mirrors every number. Sources:
    interval of a rate      percentile bootstrap (Efron & Tibshirani 1993, §13.3), see `rate`
    interval of a share     Wilson 1927
    sign test               exact two-sided binomial at ½ on the decisive prompts
    interval of a gain      heteroskedasticity-robust OLS, HC1 (White 1980; MacKinnon & White 1985)
    calibration error       Guo et al. 2017, arXiv 1706.04599, eq. 3, over equal-count bins
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_TAIL = 0.025  # probability left out on either side of a 95% interval
_Z = NormalDist().inv_cdf(1 - _TAIL)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval, `low <= high`, and the number of prompts or pairs behind it."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Verdict:
    """A against B over many prompts.

    `win_rate` counts a tie as half a win; `decisive` is A's share of the prompts that are no ties,
    with Wilson's interval; `p_value` is the sign test's, two-sided. Failures are in none of them.
    """

    win_rate: Estimate
    decisive: Estimate
    wins: int
    ties: int
    losses: int
    failures: int
    p_value: float


def outcomes(scores_a: ArrayLike, scores_b: ArrayLike) -> Floats:
    """1 where A scores higher, ½ where the scores are equal, 0 where B does, NaN where either is NaN.

    Both (N,); so is the result.
    """
    a, b = _paired(scores_a, scores_b)
    result = (1.0 * (a > b) + (a >= b)) / 2
    return np.asarray(np.where(np.isnan(a) | np.isnan(b), np.nan, result))


def verdict(outcomes: ArrayLike) -> Verdict:
    """Sum up (N,) outcomes of A against B.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if every one of them is NaN.
    """
    given = np.asarray(outcomes, dtype=np.float64)
    wins, ties, losses = _counts(given)
    return Verdict(
        win_rate=_rate(wins, ties, losses),
        decisive=wilson(wins, wins + losses),
        wins=wins,
        ties=ties,
        losses=losses,
        failures=int(np.isnan(given).sum()),
        p_value=sign_test(wins, losses),
    )


def rate(outcomes: ArrayLike) -> Estimate:
    """Mean of (N,) outcomes with its percentile-bootstrap interval; NaN is left out.

    A bootstrap over prompts draws N outcomes with replacement. Only three values occur, so twice the
    drawn sum has the probability-generating function (l + t·x + w·x²)^N with w, t, l the shares of
    wins, ties and losses. Its coefficients, found by one FFT, are the distribution that ever more
    random resamples tend to: no seed, no Monte Carlo error. Outcomes that all agree leave the
    bootstrap no spread (low = high): Wilson's interval is the one to read there.

    Raises:
        ValueError: as `verdict`.
    """
    return _rate(*_counts(np.asarray(outcomes, dtype=np.float64)))


def _rate(wins: int, ties: int, losses: int) -> Estimate:
    count = wins + ties + losses
    size = 2 * count + 1  # twice the drawn sum is 0 … 2N
    shares = np.array([losses, ties, wins]) / count
    masses = np.fft.irfft(np.fft.rfft(shares, size) ** count, size)
    low = int(np.argmax(np.cumsum(masses) >= _TAIL))
    high = 2 * count - int(np.argmax(np.cumsum(masses[::-1]) >= _TAIL))
    return Estimate((wins + ties / 2) / count, low / (2 * count), high / (2 * count), count)


def _counts(given: Floats) -> tuple[int, int, int]:
    """Wins, ties and losses among outcomes, NaN left out."""
    counted = given[~np.isnan(given)]
    wins, ties, losses = (int((counted == value).sum()) for value in (1.0, 0.5, 0.0))
    if wins + ties + losses != counted.size:
        raise ValueError("an outcome is 1 (A wins), 0.5 (tie), 0 (B wins) or NaN (the judge failed)")
    if counted.size == 0:
        raise ValueError(f"none of {given.size} prompts was judged: there is no rate to tell")
    return wins, ties, losses


def wilson(successes: int, count: int) -> Estimate:
    """Share of successes with Wilson's 95% interval; with a count of 0, ½ between 0 and 1."""
    if count == 0:
        return Estimate(0.5, 0.0, 1.0, 0)
    share = successes / count
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    reach = _Z / scale * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return Estimate(share, max(0.0, centre - reach), min(1.0, centre + reach), count)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of "wins and losses are equally likely": min(1, 2·P(X <= min(w, l))).

    X ~ Binomial(w + l, ½); ties say nothing and are left out. 1 without a decisive prompt.
    """
    count = wins + losses
    whole = math.lgamma(count + 1) - count * math.log(2)
    tail = math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(count - k + 1))
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * tail)


def matched_length_gain(
    score_a: ArrayLike, score_b: ArrayLike, length_a: ArrayLike, length_b: ArrayLike
) -> Estimate:
    """How much more A scores than B at equal length: what a mere change of length does not explain.

    With d = score_a − score_b and x = length_a − length_b, both (N,), ordinary least squares of
    d = α + β·x + e; the gain is α, the difference expected at x = 0. It is linear in d:

        α = Σ c_i d_i,  c_i = 1/N − x̄ (x_i − x̄) / Σ (x_j − x̄)²,  Var α = N/(N−k) · Σ c_i² e_i²

    (HC1, k = 2), and the interval α ± 1.96 √Var, made for N of some dozens and more. Where all x are
    equal there is no slope: α is the plain mean of d (c_i = 1/N, k = 1), matched only if that x is 0.
    Rows with a NaN are left out.

    Raises:
        ValueError: if fewer than 3 whole rows remain, or the shapes differ.
    """
    a, b = _paired(score_a, score_b)
    d, x = _paired(a - b, np.subtract(*_paired(length_a, length_b)))
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
    reach = _Z * math.sqrt(variance)
    return Estimate(gain, gain - reach, gain + reach, int(d.size))


def agreement(labels: ArrayLike, gold: ArrayLike) -> Estimate:
    """Share of pairs on which `labels` say what `gold` says, with the interval of `rate`.

    Both are (N,) outcomes. Pairs that gold calls a tie are left out, and those with a NaN; a tie of
    `labels` where gold decides counts half, as a coin toss would.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if no pair remains.
    """
    given, truth = _paired(labels, gold)
    _counts(truth)
    return rate(np.where(truth == 0.5, np.nan, 1 - np.abs(given - truth)))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation of two (N,) arrays; 0 where either is constant or N < 2."""
    a, b = _paired(x, y)
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def calibration_error(differences: ArrayLike, outcomes: ArrayLike, num_bins: int = 10) -> float:
    """Expected calibration error of σ(Δ) as the probability that the first of a pair wins.

    `differences` Δ (N,) are score differences, first minus second; `outcomes` (N,) as above, without
    NaN. Each pair is first turned so that the model favours its first member: confidence σ(|Δ|),
    against the share of such pairs that it got right. A set that always lists the chosen text first
    would otherwise look miscalibrated whatever the scores. Bins hold equal counts (± 1) by rising
    confidence; the error is Σ_bins n_bin/N · |mean confidence − mean outcome|, in 0 … 1.

    Raises:
        ValueError: if N is 0, or the shapes differ.
    """
    delta, won = _paired(differences, outcomes)
    if delta.size == 0:
        raise ValueError("calibration needs at least one pair")
    confidence = 1 / (1 + np.exp(-np.abs(delta)))
    right = 0.5 + np.sign(delta) * (won - 0.5)
    gaps = (confidence - right)[np.argsort(confidence, kind="stable")]
    return float(sum(abs(part.sum()) for part in np.array_split(gaps, num_bins)) / delta.size)


def _paired(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Two (N,) float arrays of one length, or a ValueError."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"expected two flat arrays of one length, got shapes {a.shape} and {b.shape}")
    return a, b

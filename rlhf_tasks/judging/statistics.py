"""Win rates, agreement, calibration, length control: arrays in, numbers with 95% intervals out. numpy only.

Notation: N prompts; the outcome of a prompt is 1 where A wins, ½ for a tie, 0 where B wins, and NaN for a
failure of the judge. Failures are counted, and never treated as losses. Swapping A and B mirrors each number.
All but the interval of `kappa` are closed forms or exact distributions, so only that needs a seed. Sources:
    interval of a rate      percentile bootstrap (Efron & Tibshirani 1993, §13.3), see `rate`
    interval of a share     Wilson 1927
    sign test               exact two-sided binomial at ½ on the decisive prompts
    kappa                   Cohen 1960; its interval by a seeded bootstrap over prompts
    calibration error       Guo et al. 2017, arXiv 1706.04599, eq. 3, over equal-count bins
    interval of a gain      heteroskedasticity-robust OLS, HC1 (White 1980; MacKinnon & White 1985)
    rate at equal length    logistic regression (Dubois et al. 2024, arXiv 2404.04475, eq. 2, shortened)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_TAIL = 0.025  # probability left out on either side of a 95% interval
Z = NormalDist().inv_cdf(1 - _TAIL)
_NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval, `low <= value <= high`, and the number of prompts or pairs behind it."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Summary:
    """A against B over many prompts.

    `win_rate` counts a tie as half a win; `decisive` is A's share of the prompts that are not ties, with
    Wilson's interval; `p_value` is the two-sided sign test's. Failures are in none of them.
    """

    win_rate: Estimate
    decisive: Estimate
    wins: int
    ties: int
    losses: int
    failures: int
    p_value: float


@dataclass(frozen=True)
class PositionBias:
    """How the order of two responses changes a judge's preference.

    `flips` is the share of pairs whose preference changes with the order. `first` is the share of all
    replies that prefer the response shown first: ½ without bias; a reply of exactly ½ counts half. `count`
    is the number of pairs judged in both orders.
    """

    flips: float
    first: float
    count: int


def outcomes(scores_a: ArrayLike, scores_b: ArrayLike) -> Floats:
    """(N,) outcomes of (N,) scores: 1 where A's is higher, ½ where they are equal, 0 where B's is higher.

    NaN where either score is NaN.
    """
    a, b = paired(scores_a, scores_b)
    result = (1.0 * (a > b) + (a >= b)) / 2
    return np.asarray(np.where(np.isnan(a) | np.isnan(b), np.nan, result))


def both_orders(a_shown_first: ArrayLike, a_shown_second: ArrayLike) -> Floats:
    """Outcomes of pairs that were judged in both orders: 1 or 0 where both agree, ½ where they do not.

    Both arguments are (N,) probabilities that A is better, NaN for a failure, which makes the outcome NaN
    too. A probability of exactly ½ in either order makes a tie.
    """
    p, q = paired(a_shown_first, a_shown_second)
    result = np.where((p > 0.5) & (q > 0.5), 1.0, np.where((p < 0.5) & (q < 0.5), 0.0, 0.5))
    return np.asarray(np.where(np.isnan(p) | np.isnan(q), np.nan, result))


def position_bias(a_shown_first: ArrayLike, a_shown_second: ArrayLike) -> PositionBias:
    """How far replies depend on the order; the arguments are those of `both_orders`. No pair: 0 and ½."""
    p, q = paired(a_shown_first, a_shown_second)
    whole = ~(np.isnan(p) | np.isnan(q))
    p, q = p[whole], q[whole]
    if p.size == 0:
        return PositionBias(0.0, 0.5, 0)
    flips = (p - 0.5) * (q - 0.5) < 0
    first = np.concatenate([outcomes(p, np.full_like(p, 0.5)), outcomes(np.full_like(q, 0.5), q)])
    return PositionBias(float(flips.mean()), float(first.mean()), int(p.size))


def summarise(outcomes: ArrayLike) -> Summary:
    """Summarise (N,) outcomes of A against B.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if every one of them is NaN.
    """
    given = np.asarray(outcomes, dtype=np.float64)
    wins, ties, losses = counts(given)
    return Summary(
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
    wins, ties and losses. One FFT gives its coefficients, which are the limit of ever more random
    resamples: there is no seed and no Monte Carlo error. If all outcomes are equal, the bootstrap has
    no spread (low = high); read Wilson's interval there.

    Raises:
        ValueError: as `summarise`.
    """
    return _rate(*counts(np.asarray(outcomes, dtype=np.float64)))


def _rate(wins: int, ties: int, losses: int) -> Estimate:
    count = wins + ties + losses
    size = 2 * count + 1  # twice the drawn sum is 0 … 2N
    shares = np.array([losses, ties, wins]) / count
    masses = np.fft.irfft(np.fft.rfft(shares, size) ** count, size)
    low = int(np.argmax(np.cumsum(masses) >= _TAIL))
    high = 2 * count - int(np.argmax(np.cumsum(masses[::-1]) >= _TAIL))
    return Estimate((wins + ties / 2) / count, low / (2 * count), high / (2 * count), count)


def counts(given: Floats) -> tuple[int, int, int]:
    """The numbers of wins, ties and losses; NaN is left out.

    Raises:
        ValueError: as `summarise`.
    """
    counted = given[~np.isnan(given)]
    wins, ties, losses = (int((counted == value).sum()) for value in (1.0, 0.5, 0.0))
    if wins + ties + losses != counted.size:
        raise ValueError("an outcome is 1 (A wins), 0.5 (tie), 0 (B wins) or NaN (failure)")
    if counted.size == 0:
        raise ValueError(f"none of {given.size} prompts was judged, so there is no rate")
    return wins, ties, losses


def wilson(successes: int, count: int) -> Estimate:
    """Share of successes with Wilson's 95% interval; with a count of 0, ½ between 0 and 1."""
    if count == 0:
        return Estimate(0.5, 0.0, 1.0, 0)
    share = successes / count
    scale = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / scale
    reach = Z / scale * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    low, high = min(share, centre - reach), max(share, centre + reach)  # equal at 0 and 1 but for rounding
    return Estimate(share, max(0.0, low), min(1.0, high), count)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of "wins and losses are equally likely": min(1, 2·P(X <= min(w, l))).

    X ~ Binomial(w + l, ½); ties are left out. 1 without a decisive prompt.
    """
    count = wins + losses
    whole = math.lgamma(count + 1) - count * math.log(2)
    tail = math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(count - k + 1))
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * tail)


def kappa(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Cohen's κ of two judges: (p − e) / (1 − e), p the share on which they agree, e that by chance.

    Both are (N,) or (N, K) outcomes of N prompts with K comparisons each; win, tie and loss are three
    categories without an order. A failure of either judge leaves the comparison out. κ is 0 where both
    judges give one outcome throughout. The interval is a percentile bootstrap over prompts with a fixed
    seed; `count` is the number of comparisons.

    Raises:
        ValueError: if the shapes differ, or no comparison was judged by both.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim not in (1, 2):
        raise ValueError(f"expected two sets of outcomes of one shape, got {a.shape} and {b.shape}")
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    levels = (1.0, 0.5, 0.0)
    tables = np.stack([((a == i) & (b == j)).sum(axis=1) for i in levels for j in levels], axis=1)
    count = int(tables.sum())
    if count == 0:
        raise ValueError("no comparison was judged by both, so there is no agreement")
    draws = np.random.default_rng(0).multinomial(len(a), np.full(len(a), 1 / len(a)), _NUM_RESAMPLES)
    resampled = _kappas((draws @ tables).reshape(-1, 3, 3))
    low, high = np.quantile(resampled, [_TAIL, 1 - _TAIL])
    value = float(_kappas(tables.sum(axis=0).reshape(1, 3, 3))[0])
    return Estimate(value, min(value, float(low)), max(value, float(high)), count)


def _kappas(tables: NDArray[np.int64]) -> Floats:
    """(M, 3, 3) counts → (M,) κ; 0 where it is undefined."""
    shares = tables / np.maximum(1, tables.sum(axis=(1, 2), keepdims=True))
    agreed = np.trace(shares, axis1=1, axis2=2)
    chance = (shares.sum(axis=1) * shares.sum(axis=2)).sum(axis=1)
    return np.where(chance < 1 - 1e-12, (agreed - chance) / np.maximum(1 - chance, 1e-12), 0.0)


def agreement(labels: ArrayLike, gold: ArrayLike) -> Estimate:
    """Share of pairs on which `labels` and `gold` agree, with the interval of `rate`.

    Both are (N,) outcomes. Ties of `gold` are left out, and NaN of either; a tie of `labels` counts half,
    as a coin toss would.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if no pair remains.
    """
    given, truth = paired(labels, gold)
    counts(truth)
    return rate(np.where(truth == 0.5, np.nan, 1 - np.abs(given - truth)))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation of two (N,) arrays; 0 where either is constant or N < 2."""
    a, b = paired(x, y)
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def calibration_error(differences: ArrayLike, outcomes: ArrayLike, num_bins: int = 10) -> float:
    """Expected calibration error of σ(Δ) as the probability that the first of a pair wins.

    `differences` Δ (N,) are score differences, first minus second; `outcomes` (N,) as above, without
    NaN. Each pair is first turned so that the model favours its first member: the confidence σ(|Δ|) is
    compared with the share of such pairs that the model orders right. Without the turn, a set that always
    lists the chosen text first would seem miscalibrated whatever the scores. Bins hold equal counts (± 1)
    by rising confidence; the error is Σ_bins n_bin/N · |mean confidence − mean outcome|, in 0 … 1.

    Raises:
        ValueError: if N is 0, or the shapes differ.
    """
    delta, won = paired(differences, outcomes)
    if delta.size == 0:
        raise ValueError("calibration needs at least one pair")
    confidence = 1 / (1 + np.exp(-np.abs(delta)))
    right = 0.5 + np.sign(delta) * (won - 0.5)
    gaps = (confidence - right)[np.argsort(confidence, kind="stable")]
    return float(sum(abs(part.sum()) for part in np.array_split(gaps, num_bins)) / delta.size)


def paired(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Two (N,) float arrays.

    Raises:
        ValueError: if they are not flat arrays of one length.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"expected two flat arrays of one length, got shapes {a.shape} and {b.shape}")
    return a, b


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

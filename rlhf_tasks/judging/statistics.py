"""Win rates, agreement, calibration, length control: arrays in, numbers with 95% intervals out.

Notation: N prompts; the outcome of a prompt is 1 where A wins, ½ for a tie, 0 where B wins, and NaN for a
failure of the judge. Failures are counted, and never treated as losses. Swapping A and B mirrors each number.
All but the interval of `kappa` are closed forms or exact distributions, so only that needs a seed. Sources:
    interval of a rate      percentile bootstrap (Efron & Tibshirani 1993, §13.3), see `rate`
    interval of a share     Wilson 1927
    sign test               exact two-sided binomial at ½ on the decisive prompts
    mean over seeds         two-way clustered variance (Cameron, Gelbach & Miller 2011, JBES 29), Student's t
    kappa                   Cohen 1960; its interval by a seeded bootstrap over prompts
    calibration error       Guo et al. 2017, arXiv 1706.04599, eq. 3, over equal-count bins
    interval of a gain      heteroskedasticity-robust OLS, HC1 (White 1980; MacKinnon & White 1985)
    rate at equal length    logistic regression (Dubois et al. 2024, arXiv 2404.04475, eq. 2, shortened)
    KL of best-of-n         Beirami et al. 2024, arXiv 2401.01879
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict

Floats = NDArray[np.float64]

_TAIL = 0.025  # probability left out on either side of a 95% interval
Z = NormalDist().inv_cdf(1 - _TAIL)
_NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval, `low <= value <= high`."""

    value: float
    low: float
    high: float
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def outcomes(scores_a: ArrayLike, scores_b: ArrayLike) -> Floats:
    """(N,) outcomes of (N,) scores: 1 where A's is higher, ½ where they are equal, 0 where B's is higher.

    NaN where either score is NaN.
    """
    a, b = pair(scores_a, scores_b)
    result = (1.0 * (a > b) + (a >= b)) / 2
    return np.asarray(np.where(np.isnan(a) | np.isnan(b), np.nan, result))


def both_orders(a_shown_first: ArrayLike, a_shown_second: ArrayLike) -> Floats:
    """Outcomes of pairs that were judged in both orders: 1 or 0 where both agree, ½ where they do not.

    Both arguments are (N,) probabilities that A is better, NaN for a failure, which makes the outcome NaN
    too. A probability of exactly ½ in either order makes a tie.
    """
    p, q = pair(a_shown_first, a_shown_second)
    result = np.where((p > 0.5) & (q > 0.5), 1.0, np.where((p < 0.5) & (q < 0.5), 0.0, 0.5))
    return np.asarray(np.where(np.isnan(p) | np.isnan(q), np.nan, result))


def position_bias(a_shown_first: ArrayLike, a_shown_second: ArrayLike) -> tuple[float, float]:
    """How far a judge's replies depend on the order; the arguments are those of `both_orders`.

    Returns the share of pairs whose preference changes with the order (0 without a pair), and the share of
    replies that prefer the response shown first: ½ without bias; a reply of exactly ½ counts half.
    """
    p, q = pair(a_shown_first, a_shown_second)
    whole = ~(np.isnan(p) | np.isnan(q))
    p, q = p[whole], q[whole]
    if p.size == 0:
        return 0.0, 0.5
    first = np.concatenate([outcomes(p, np.full_like(p, 0.5)), outcomes(np.full_like(q, 0.5), q)])
    return float(((p - 0.5) * (q - 0.5) < 0).mean()), float(first.mean())


def counts(given: ArrayLike) -> tuple[int, int, int]:
    """The numbers of wins, ties and losses in (N,) outcomes; NaN is left out.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if every one of them is NaN.
    """
    values = np.asarray(given, dtype=np.float64)
    counted = values[~np.isnan(values)]
    wins, ties, losses = (int((counted == value).sum()) for value in (1.0, 0.5, 0.0))
    if wins + ties + losses != counted.size:
        raise ValueError("an outcome is 1 (A wins), 0.5 (tie), 0 (B wins) or NaN (failure)")
    if counted.size == 0:
        raise ValueError(f"none of {values.size} prompts was judged, so there is no rate")
    return wins, ties, losses


def rate(outcomes: ArrayLike) -> Interval:
    """Mean of (N,) outcomes with its percentile-bootstrap interval; NaN is left out.

    A bootstrap over prompts draws N outcomes with replacement. Only three values occur, so twice the
    drawn sum has the probability-generating function (l + t·x + w·x²)^N with w, t, l the shares of
    wins, ties and losses. One FFT gives its coefficients, which are the limit of ever more random
    resamples: there is no seed and no Monte Carlo error. If all outcomes are equal, the bootstrap has
    no spread (low = high); read Wilson's interval there.

    Raises:
        ValueError: as `counts`.
    """
    wins, ties, losses = counts(outcomes)
    count = wins + ties + losses
    size = 2 * count + 1  # twice the drawn sum is 0 … 2N
    shares = np.array([losses, ties, wins]) / count
    masses = np.fft.irfft(np.fft.rfft(shares, size) ** count, size)
    low = int(np.argmax(np.cumsum(masses) >= _TAIL))
    high = 2 * count - int(np.argmax(np.cumsum(masses[::-1]) >= _TAIL))
    return Interval((wins + ties / 2) / count, low / (2 * count), high / (2 * count))


def mean_over_seeds(values: ArrayLike, *, same_prompts: bool, num_intervals: int = 1) -> Interval:
    """Mean of (S, N) values by seed and prompt, with its interval over both; a prompt with a NaN is left out.

    The variance is that of the seeds' means plus that of the prompts' means less that of all values, where
    the seeds have the `same_prompts`; else that of the seeds' means, which has the prompts in it. It is not
    less than any of these alone. Student's t has S − 1 degrees of freedom. With one seed the interval is over
    its prompts, and says nothing of other seeds. `num_intervals` that are read together hold all with at
    least 95% (Bonferroni).

    Raises:
        ValueError: if no prompt is left.
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=np.float64)
    x = x[:, ~np.isnan(x).any(axis=0)]
    seeds, prompts = x.shape
    if not prompts:
        raise ValueError("no prompt has a value for every seed")

    def variance_of_mean(of: Floats) -> float:
        return float(of.var(ddof=1)) / of.size if of.size > 1 else 0.0

    parts = [variance_of_mean(x.mean(axis=1)), variance_of_mean(x.reshape(-1))]
    if same_prompts and seeds > 1:
        parts.append(variance_of_mean(x.mean(axis=0)))
        parts.append(parts[0] + parts[2] - parts[1])
    degrees = seeds - 1 if seeds > 1 else max(1, prompts - 1)
    reach = float(t.ppf(1 - _TAIL / num_intervals, degrees)) * math.sqrt(max(parts))
    mean = float(x.mean())
    return Interval(mean, mean - reach, mean + reach)


def best_of_n_kl(scores: ArrayLike) -> float:
    """Mean KL of best-of-n from the model that it samples, in nats; (N, n) scores of n samples per prompt.

    A share p of a prompt's samples has one score, and a share C that or a lower one: best-of-n has it with
    Cⁿ − (C − p)ⁿ. Responses of equal scores share that as they share p, so that only scores count.
    """
    from scipy.special import rel_entr

    total, rows = 0.0, np.asarray(scores, dtype=np.float64)
    for row in rows:
        counts = np.unique(row, return_counts=True)[1]
        best = np.diff((counts.cumsum() / row.size) ** row.size, prepend=0.0)
        total += float(rel_entr(best, counts / row.size).sum())  # Σ best · log(best / p), of best = 0 too
    return total / len(rows)


def wilson(successes: int, count: int) -> Interval:
    """Share of successes with Wilson's 95% interval; with a count of 0, ½ between 0 and 1."""
    from scipy.stats import binomtest

    if count == 0:
        return Interval(0.5, 0.0, 1.0)
    share, ends = successes / count, binomtest(successes, count).proportion_ci(method="wilson")
    # At 0 and 1 an end differs from the share by rounding.
    return Interval(share, min(share, float(ends.low)), max(share, float(ends.high)))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of "wins and losses are equally likely"; ties are left out.

    1 without a decisive prompt.
    """
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def kappa(first: ArrayLike, second: ArrayLike) -> Interval:
    """Cohen's κ of two judges: (p − e) / (1 − e), p the share on which they agree, e that by chance.

    Both are (N,) or (N, K) outcomes of N prompts with K comparisons each; win, tie and loss are three
    categories without an order. A failure of either judge leaves the comparison out. κ is 0 where both
    judges give one outcome throughout. The interval is a percentile bootstrap over prompts with a fixed
    seed.

    Raises:
        ValueError: if the shapes differ, or no comparison was judged by both.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim not in (1, 2):
        raise ValueError(f"expected two sets of outcomes of one shape, got {a.shape} and {b.shape}")
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    levels = (1.0, 0.5, 0.0)
    tables = np.stack([((a == i) & (b == j)).sum(axis=1) for i in levels for j in levels], axis=1)  # (N, 9)
    if not tables.any():
        raise ValueError("no comparison was judged by both, so there is no agreement")
    draws = np.random.default_rng(0).multinomial(len(a), np.full(len(a), 1 / len(a)), _NUM_RESAMPLES)
    whole_and_resampled = np.concatenate([tables.sum(axis=0, keepdims=True), draws @ tables])
    shares = whole_and_resampled.reshape(-1, 3, 3)
    shares = shares / np.maximum(1, shares.sum(axis=(1, 2), keepdims=True))
    agreed = np.trace(shares, axis1=1, axis2=2)
    chance = (shares.sum(axis=1) * shares.sum(axis=2)).sum(axis=1)
    kappas = np.where(chance < 1 - 1e-12, (agreed - chance) / np.maximum(1 - chance, 1e-12), 0.0)
    value = float(kappas[0])
    low, high = np.quantile(kappas[1:], [_TAIL, 1 - _TAIL])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def agreement(labels: ArrayLike, gold: ArrayLike) -> Interval:
    """Share of pairs on which `labels` and `gold` agree, with the interval of `rate`.

    Both are (N,) outcomes. Ties of `gold` are left out, and NaN of either; a tie of `labels` counts half,
    as a coin toss would.

    Raises:
        ValueError: if an outcome is not 1, ½, 0 or NaN, or if no pair remains.
    """
    given, truth = pair(labels, gold)
    counts(truth)
    return rate(np.where(truth == 0.5, np.nan, 1 - np.abs(given - truth)))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation of two (N,) arrays; 0 where either is constant or N < 2."""
    a, b = pair(x, y)
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def calibration_bins(leads: ArrayLike, num_bins: int = 10) -> list[tuple[float, float, int]]:
    """Mean confidence σ(|lead|), share that the model orders right, and count, by rising confidence.

    `leads` (N,) are scores of the better responses minus those of the worse ones. Each pair is turned so that
    the model favors its first response: without the turn, a set that always lists the chosen text first
    would seem miscalibrated whatever the scores. Equal scores are half right. Bins have equal counts (± 1).

    Raises:
        ValueError: if N is 0.
    """
    values = np.asarray(leads, dtype=np.float64)
    if values.size == 0:
        raise ValueError("calibration needs at least one pair")
    confidence, right = 1 / (1 + np.exp(-np.abs(values))), (1 + np.sign(values)) / 2
    parts = np.array_split(np.argsort(confidence, kind="stable"), num_bins)
    return [(float(confidence[p].mean()), float(right[p].mean()), p.size) for p in parts if p.size]


def calibration_error(leads: ArrayLike, num_bins: int = 10) -> float:
    """Expected calibration error, Σ_bins n_bin/N · |mean confidence − share right|, in 0 … 1.

    The arguments are those of `calibration_bins`.
    """
    bins = calibration_bins(leads, num_bins)
    return sum(count * abs(sure - right) for sure, right, count in bins) / sum(count for *_, count in bins)


def pair(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Two (N,) float arrays.

    Raises:
        ValueError: if they are not flat arrays of one length.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"expected two flat arrays of one length, got shapes {a.shape} and {b.shape}")
    return a, b


def length_controlled(outcomes: ArrayLike, length_a: ArrayLike, length_b: ArrayLike) -> Interval:
    """Win rate that A would have if its responses were as long as B's.

    With x = tanh(d / s), d = length_a − length_b and s the standard deviation of d, a logistic regression

        P(A wins) = σ(θ + φ·x)

    is fitted to the (N,) outcomes, ties as ½; the rate is σ(θ), the one at d = 0. This is AlpacaEval 2's
    regression for one model against one baseline, without its term for the difficulty of each instruction,
    which needs many other models. Its weak penalty on φ is ½φ² here, so that φ stays finite for a judge
    that only prefers length. The interval is σ(θ ± 1.96·√Var θ) with the heteroskedasticity-robust variance
    of θ (HC1), which the ½ of a tie does not invalidate (Papke & Wooldridge 1996). Rows with a NaN are left
    out.

    Where all d are equal, length explains nothing and σ(θ) is the plain win rate. Where A wins always or
    never, the same holds at equal length: the interval is Wilson's.

    Raises:
        ValueError: as `counts`, or if the shapes differ.
    """
    from scipy.optimize import root
    from scipy.special import expit

    y, d = pair(outcomes, np.subtract(*pair(length_a, length_b)))
    counts(y)
    whole = ~(np.isnan(y) | np.isnan(d))
    y, d = y[whole], d[whole]
    if y.min() == y.max() != 0.5:
        return wilson(int(y.sum()), y.size)
    spread = d.std()
    x = np.tanh(d / spread) if spread > 0 else d
    rows = np.stack([np.ones_like(x), x], axis=1)[:, : 1 + (np.ptp(x) > 0)]  # equal d: no slope
    ridge = np.diag([0.0, 1.0])[: rows.shape[1], : rows.shape[1]]

    def gradient(w: Floats) -> Floats:
        return np.asarray(rows.T @ (expit(rows @ w) - y) + ridge @ w)

    def hessian(w: Floats) -> Floats:
        p = expit(rows @ w)
        return np.asarray((rows * (p * (1 - p))[:, None]).T @ rows + ridge)

    theta = root(gradient, np.zeros(rows.shape[1]), jac=hessian, tol=1e-14).x  # of a convex loss
    bread: Floats = np.asarray(np.linalg.inv(hessian(theta)), dtype=np.float64)
    scores = rows * (y - expit(rows @ theta))[:, None]
    variance = y.size / max(1, y.size - theta.size) * (bread @ (scores.T @ scores) @ bread)[0, 0]
    reach = Z * math.sqrt(variance)
    value, low, high = (float(expit(theta[0] + shift)) for shift in (0.0, -reach, reach))
    return Interval(value, low, high)

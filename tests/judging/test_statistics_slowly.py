"""The same statistics by slow loops, exact fractions and root finding, on inputs drawn at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import Floats, length_controlled, matched_length_gain

Z = 1.959963984540054
OUTCOMES = (1.0, 0.5, 0.0)


def counts(most: int) -> Iterator[tuple[int, int, int]]:
    """All wins, ties and losses of 1 to `most` prompts."""
    for total in range(1, most + 1):
        for wins in range(total + 1):
            for ties in range(total - wins + 1):
                yield wins, ties, total - wins - ties


def drawn(seed: int, size: int, *, failures: float = 0.1) -> Floats:
    random = np.random.default_rng(seed)
    result = random.choice(OUTCOMES, size, p=[0.5, 0.2, 0.3])
    return np.where(random.random(size) < failures, np.nan, result)


def test_the_bootstrap_equals_the_distribution_of_all_resamples() -> None:
    """Every count of up to 7 prompts: the distribution of 2 × the drawn sum, one draw at a time."""
    tail = Fraction(25, 1000)
    for wins, ties, losses in counts(7):
        size = wins + ties + losses
        masses = {0: Fraction(1)}
        for _ in range(size):
            grown: dict[int, Fraction] = {}
            for total, mass in masses.items():
                for points, weight in ((2, wins), (1, ties), (0, losses)):
                    share = mass * Fraction(weight, size)
                    grown[total + points] = grown.get(total + points, Fraction(0)) + share
            masses = grown
        sums = range(2 * size + 1)
        low = next(s for s in sums if sum(masses.get(k, 0) for k in sums[: s + 1]) >= tail)
        high = next(s for s in reversed(sums) if sum(masses.get(k, 0) for k in sums[s:]) >= tail)
        result = statistics.rate([1.0] * wins + [0.5] * ties + [0.0] * losses)
        assert (result.low, result.high) == pytest.approx((low / (2 * size), high / (2 * size)))
        assert result.low <= result.value <= result.high


def test_the_bootstrap_of_many_prompts_is_close_to_the_normal_interval() -> None:
    result = statistics.rate([1.0] * 60_000 + [0.5] * 10_000 + [0.0] * 30_000)
    deviation = math.sqrt((0.6 + 0.1 / 4 - 0.65**2) / 100_000)
    assert (result.low, result.high) == pytest.approx((0.65 - Z * deviation, 0.65 + Z * deviation), abs=2e-5)


def test_wilsons_ends_are_the_limits_of_the_score_test() -> None:
    """|s/n − p| = z √(p(1−p)/n), solved by bisection on either side of s/n; the interval contains s/n."""
    for count in (1, 2, 3, 7, 20, 49, 1000):
        for successes in sorted({0, 1, count // 3, count // 2, count - 1, count}):
            share, result = successes / count, statistics.wilson(successes, count)

            def refused(p: float, share: float = share, count: int = count) -> bool:
                return abs(share - p) > Z * math.sqrt(p * (1 - p) / count)

            for end, outermost in ((result.low, 0.0), (result.high, 1.0)):
                inside, outside = share, outermost
                for _ in range(100):
                    middle = (inside + outside) / 2
                    inside, outside = (inside, middle) if refused(middle) else (middle, outside)
                assert end == pytest.approx(inside, abs=1e-9)
    for count in range(1, 400):
        for successes in range(count + 1):
            result = statistics.wilson(successes, count)
            assert 0 <= result.low <= result.value <= result.high <= 1


def test_the_sign_test_is_the_exact_binomial() -> None:
    """All splits of up to 40: the sum over all outcomes that are at most as likely, in fractions."""
    for count in range(41):
        likely = [Fraction(math.comb(count, k), 2**count) for k in range(count + 1)]
        for wins in range(count + 1):
            exact = sum(p for p in likely if p <= likely[wins])
            assert statistics.sign_test(wins, count - wins) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_kappa_by_counting(seed: int) -> None:
    first, second = drawn(seed, 60), drawn(seed + 100, 60)
    second = np.where(np.random.default_rng(seed).random(60) < 0.6, first, second)
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if not math.isnan(a + b)]
    agreed = Fraction(sum(a == b for a, b in pairs), len(pairs))
    chance = sum(
        Fraction(sum(a == x for a, _ in pairs), len(pairs))
        * Fraction(sum(b == x for _, b in pairs), len(pairs))
        for x in OUTCOMES
    )
    result = statistics.kappa(first, second)
    assert result.value == pytest.approx(float((agreed - chance) / (1 - chance)))
    assert result.count == len(pairs)


def test_the_interval_of_kappa_resamples_prompts_with_all_comparisons() -> None:
    """Three equal comparisons per prompt give the interval of one."""
    one, other = drawn(1, 80, failures=0), drawn(2, 80, failures=0)
    other = np.where(np.random.default_rng(3).random(80) < 0.7, one, other)
    random, resampled = np.random.default_rng(4), []
    for _ in range(4000):
        rows = random.integers(0, 80, 80)
        a, b = one[rows], other[rows]
        chance = sum(float((a == x).mean() * (b == x).mean()) for x in OUTCOMES)
        resampled.append((float((a == b).mean()) - chance) / (1 - chance))
    low, high = np.quantile(resampled, [0.025, 0.975])
    for times in (1, 3):
        result = statistics.kappa(np.stack([one] * times, axis=1), np.stack([other] * times, axis=1))
        assert (result.low, result.high) == pytest.approx((low, high), abs=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_the_gain_is_least_squares_with_the_sandwich_variance(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(3, 40))
    x, d = random.integers(-3, 9, size).astype(float), random.normal(size=size)
    x[0] = x[1] + 1  # some slope
    rows = np.stack([np.ones(size), x], axis=1)
    beta, *_ = np.linalg.lstsq(rows, d, rcond=None)
    bread, meat = np.linalg.inv(rows.T @ rows), np.zeros((2, 2))
    for row, value in zip(rows, d, strict=True):
        meat += np.outer(row, row) * (value - row @ beta) ** 2
    variance = size / (size - 2) * (bread @ meat @ bread)[0, 0]
    result = matched_length_gain(d, np.zeros(size), x, np.zeros(size))
    assert result.value == pytest.approx(beta[0])
    assert result.high - result.value == pytest.approx(Z * math.sqrt(variance))


def descended(loss: Callable[[Floats], float]) -> Floats:
    """The minimum of a convex function of two numbers by ever smaller steps along the axes."""
    at, step = np.zeros(2), 1.0
    while step > 1e-9:
        tries = [at + step * np.array(move) for move in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        best = min(tries, key=loss)
        at, step = (best, step) if loss(best) < loss(at) else (at, step / 2)
    return at


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_at_equal_length_equals_a_slow_search_with_the_sandwich(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(6, 60))
    y, d = random.choice(OUTCOMES, size), random.normal(1, 4, size)
    y[:2] = 1.0, 0.0
    x = np.tanh(d / math.sqrt(sum((v - sum(d) / size) ** 2 for v in d) / size))

    def loss(w: Floats) -> float:
        result = w[1] ** 2 / 2
        for xi, yi in zip(x, y, strict=True):
            z = w[0] + w[1] * xi
            result += yi * math.log1p(math.exp(-z)) + (1 - yi) * math.log1p(math.exp(z))
        return float(result)

    w = descended(loss)
    hessian, meat = np.diag([0.0, 1.0]), np.zeros((2, 2))
    for xi, yi in zip(x, y, strict=True):
        p, row = 1 / (1 + math.exp(-w[0] - w[1] * xi)), np.array([1.0, xi])
        hessian += p * (1 - p) * np.outer(row, row)
        meat += (yi - p) ** 2 * np.outer(row, row)
    bread = np.linalg.inv(hessian)
    reach = Z * math.sqrt(size / (size - 2) * (bread @ meat @ bread)[0, 0])
    expected = [1 / (1 + math.exp(-w[0] - r)) for r in (0.0, -reach, reach)]
    result = length_controlled(y, d, np.zeros(size))
    assert [result.value, result.low, result.high] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "d",
    [
        np.array([1e-9, 2e-9, -1e-9, 3e-9, -2e-9, 0.0]),
        np.array([1e9, 2e9, -1e9, 3e9, -2e9, 0.0]),
        np.array([0.0, 0.0, 0.0, 0.0, 0.0, 5000.0]),
    ],
    ids=["hardly any difference", "huge ones", "one outlier"],
)
def test_extreme_lengths_give_a_rate_inside_its_interval(d: Floats) -> None:
    for y in ([1, 1, 0, 1, 0, 0.5], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0.5]):
        result = length_controlled(y, d, np.zeros(6))
        assert 0 <= result.low <= result.value <= result.high <= 1


def test_the_rate_at_equal_length_of_many_wins_stays_finite() -> None:
    """A thousand wins and one loss, at the greatest difference of length."""
    d = np.linspace(-50, 50, 1001)
    y = np.where(np.arange(1001) == 0, 0.0, 1.0)
    result = length_controlled(y, d, np.zeros(1001))
    assert 0.98 < result.low <= result.value <= result.high < 1


@pytest.mark.parametrize("seed", range(5))
def test_calibration_by_loops(seed: int) -> None:
    random = np.random.default_rng(seed)
    delta = random.normal(scale=2, size=53)
    won = random.choice(OUTCOMES, 53)
    pairs = []
    for difference, outcome in zip(delta, won, strict=True):
        sure = 1 / (1 + math.exp(-abs(difference)))
        pairs.append((sure, outcome if difference > 0 else 1 - outcome))
    pairs.sort()
    error, start = 0.0, 0
    for number in range(10):
        size = 53 // 10 + (number < 53 % 10)
        part, start = pairs[start : start + size], start + size
        error += abs(sum(sure for sure, _ in part) - sum(right for _, right in part)) / 53
    assert statistics.calibration_error(delta, won) == pytest.approx(error)


@pytest.mark.parametrize("seed", range(5))
def test_agreement_position_bias_and_both_orders_by_loops(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = (np.where(random.random(50) < 0.1, np.nan, random.choice([0, 0.2, 0.5, 0.7, 1], 50)) for _ in "ab")
    outcomes, flips, firsts = [], 0, []
    for a, b in zip(p, q, strict=True):
        if math.isnan(a) or math.isnan(b):
            outcomes.append(math.nan)
            continue
        preferred = [int(x > 0.5) - int(x < 0.5) for x in (a, b)]  # 1: for A
        outcomes.append(1.0 if preferred == [1, 1] else 0.0 if preferred == [-1, -1] else 0.5)
        flips += preferred[0] * preferred[1] == -1
        firsts += [(1 + preferred[0]) / 2, (1 - preferred[1]) / 2]
    np.testing.assert_array_equal(statistics.both_orders(p, q), outcomes)
    bias = statistics.position_bias(p, q)
    assert (bias.flips, bias.first) == pytest.approx((2 * flips / len(firsts), sum(firsts) / len(firsts)))
    gold = drawn(seed, 50)
    points = [
        1.0 if x == g else 0.5 if x == 0.5 else 0.0
        for x, g in zip(outcomes, gold, strict=True)
        if g in (0.0, 1.0) and not math.isnan(x)
    ]
    result = statistics.agreement(outcomes, gold)
    assert (result.value, result.count) == pytest.approx((sum(points) / len(points), len(points)))

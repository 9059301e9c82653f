"""Statistics of comparisons against hand-worked numbers, slow loops, simulation and scikit-learn."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize
from sklearn.metrics import cohen_kappa_score

from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import Floats, length_controlled, rate

WIN, TIE, LOSS, FAILED = 1.0, 0.5, 0.0, math.nan
OUTCOMES = (WIN, TIE, LOSS)
Z = 1.959963984540054


def made_of(wins: int, ties: int, losses: int, failures: int = 0) -> list[float]:
    return [WIN] * wins + [TIE] * ties + [LOSS] * losses + [FAILED] * failures


def test_the_higher_score_wins_equal_scores_tie_and_nan_is_a_failure() -> None:
    result = statistics.outcomes(
        [2.0, 1.0, 0.5, math.nan, 3.0, math.inf], [1.0, 2.0, 0.5, 1.0, math.nan, math.inf]
    )
    np.testing.assert_array_equal(result, [WIN, LOSS, TIE, FAILED, FAILED, TIE])


def test_ties_count_half_and_failures_not_at_all() -> None:
    given = made_of(wins=5, ties=4, losses=1, failures=7)
    assert statistics.rate(given).value == pytest.approx(0.7)  # (5 + 4/2) / 10
    assert statistics.counts(given) == (5, 4, 1)


@pytest.mark.parametrize("counts", [(30, 5, 15), (1, 0, 0), (10, 10, 10), (0, 4, 3), (700, 50, 250)])
def test_swapping_a_and_b_mirrors_rate_share_and_sign_test(counts: tuple[int, int, int]) -> None:
    wins, ties, losses = counts
    for mine, other in (
        (statistics.rate(made_of(*counts)), statistics.rate(made_of(losses, ties, wins))),
        (statistics.wilson(wins, wins + losses), statistics.wilson(losses, wins + losses)),
    ):
        assert other.value == pytest.approx(1 - mine.value)
        assert other.low == pytest.approx(1 - mine.high)
        assert other.high == pytest.approx(1 - mine.low)
    assert statistics.sign_test(wins, losses) == statistics.sign_test(losses, wins)


@pytest.mark.parametrize("counts", [(7, 3, 2), (1, 0, 0), (0, 4, 3), (1, 5, 1), (3, 0, 4), (5, 5, 0)])
def test_the_bootstrap_cuts_off_no_more_than_a_tail_on_either_side(counts: tuple[int, int, int]) -> None:
    # Exact distribution of 2 × the drawn sum, by adding one draw at a time in fractions.
    (wins, ties, losses), size = counts, sum(counts)
    masses = {0: Fraction(1)}
    for _ in range(size):
        grown: dict[int, Fraction] = {}
        for total, mass in masses.items():
            for points, weight in ((2, wins), (1, ties), (0, losses)):
                grown[total + points] = grown.get(total + points, Fraction(0)) + mass * Fraction(weight, size)
        masses = grown
    tail = Fraction(25, 1000)
    low = next(s for s in range(2 * size + 1) if sum(masses.get(k, 0) for k in range(s + 1)) >= tail)
    high = next(
        s for s in range(2 * size, -1, -1) if sum(masses.get(k, 0) for k in range(s, 2 * size + 1)) >= tail
    )
    result = statistics.rate(made_of(wins, ties, losses))
    assert (result.low, result.high) == pytest.approx((low / (2 * size), high / (2 * size)))


def test_equal_outcomes_leave_the_bootstrap_no_spread_but_wilson_some() -> None:
    rate, share = statistics.rate(made_of(wins=20, ties=0, losses=0)), statistics.wilson(20, 20)
    assert (rate.low, rate.high) == (1.0, 1.0)
    # Wilson at 20 of 20: n / (n + z²) = 20 / 23.8415.
    assert share.low == pytest.approx(0.83887, abs=1e-5)
    assert share.high == 1.0


def test_wilson_by_hand() -> None:
    # 8 of 10, z² = 3.841459: centre (.8 + .192073) / 1.384146 = .716740,
    # reach 1.959964 / 1.384146 · √(.016 + .009604) = .226577.
    result = statistics.wilson(8, 10)
    assert (result.value, result.low, result.high) == pytest.approx((0.8, 0.490163, 0.943317), abs=1e-5)
    assert statistics.wilson(0, 0) == statistics.Interval(0.5, 0.0, 1.0)


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        *((5, 0, 2 / 32), (0, 5, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (0, 0, 1.0)),
        (3, 3, 1.0),  # 2 · (1 + 6 + 15 + 20) / 64 is more than 1
    ],
)
def test_the_sign_test_by_hand(wins: int, losses: int, p_value: float) -> None:
    assert statistics.sign_test(wins, losses) == pytest.approx(p_value)


def test_the_kl_of_best_of_n_by_hand() -> None:
    """Of two different samples the better one is chosen in three of four cases."""
    two = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert statistics.best_of_n_kl([[0.3, -1.0]]) == pytest.approx(two)
    assert statistics.best_of_n_kl([[7.0, 7.0]]) == 0, "equal samples leave nothing to choose"
    assert statistics.best_of_n_kl([[1.0, 2.0], [0.5, 0.5]]) == pytest.approx(two / 2), "a mean over prompts"
    # of three samples two share the lower score: that is chosen with (2/3)^3
    low = (2 / 3) ** 3
    shared = low * math.log(low / (2 / 3)) + (1 - low) * math.log((1 - low) / (1 / 3))
    assert statistics.best_of_n_kl([[0.0, 1.0, 0.0]]) == pytest.approx(shared)


@pytest.mark.parametrize("n", [2, 16, 1024])
def test_the_kl_of_best_of_n_is_at_most_its_bound(n: int) -> None:
    """Of many different samples the k-th best has e^-k (1 - 1/e), whose entropy is 1.0407 nats."""
    bound, rng = math.log(n) - (n - 1) / n, np.random.default_rng(n)
    assert statistics.best_of_n_kl([rng.permutation(n)]) <= bound
    assert statistics.best_of_n_kl(rng.integers(0, 5, (3, n))) <= bound
    if n == 1024:
        assert statistics.best_of_n_kl([rng.permutation(n)]) == pytest.approx(bound - 0.0407, abs=1e-3)


def test_agreement_leaves_out_gold_ties_and_counts_the_judges_ties_half() -> None:
    labels = [WIN, WIN, LOSS, TIE, WIN, FAILED]
    gold = [WIN, LOSS, LOSS, WIN, TIE, WIN]
    result = statistics.agreement(labels, gold)
    assert result.value == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert result.low <= result.value <= result.high


def test_pearson_by_hand() -> None:
    # x − x̄ = (−1, 0, 1), y − ȳ = (−1, 1, 0): 1 / (√2 · √2).
    assert statistics.pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert statistics.pearson([1, 2, 3], [6, 4, 2]) == pytest.approx(-1.0)
    assert statistics.pearson([1, 2, 3], [5, 5, 5]) == 0.0


def test_invalid_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="none of 2 prompts was judged"):
        statistics.rate([math.nan, math.nan])
    with pytest.raises(ValueError, match=r"0\.5 \(tie\)"):
        statistics.rate([0.7])
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        statistics.outcomes([1, 2], [1, 2, 3])


def test_orders_by_hand() -> None:
    p = [0.9, 0.2, 0.9, 0.5, math.nan, 0.6]
    q = [0.7, 0.1, 0.3, 0.9, 0.9, math.nan]
    np.testing.assert_array_equal(statistics.both_orders(p, q), [WIN, LOSS, TIE, TIE, FAILED, FAILED])
    # Of four whole pairs one flips. The first place wins 1, 0, 1, ½ with A there; 0, 1, 1, 0 with B there.
    assert statistics.position_bias(p, q) == (0.25, (2.5 + 2.0) / 8)
    assert statistics.position_bias([], []) == (0.0, 0.5)


# -------------------------------------------------------------------------------------- equal length


def test_without_length_differences_the_rate_is_the_plain_one() -> None:
    for length in (5, 9):
        rate = length_controlled(made_of(6, 2, 2), [length] * 10, [5] * 10)
        assert rate.value == pytest.approx(0.7)


def test_a_contender_that_always_wins_also_wins_at_equal_length() -> None:
    assert length_controlled([1.0] * 5, range(5), [0] * 5) == statistics.wilson(5, 5)
    assert length_controlled([0.0] * 5, range(5), [0] * 5) == statistics.wilson(0, 5)
    assert length_controlled([0.5] * 5, range(5), [0] * 5).value == pytest.approx(0.5)


def test_a_failure_does_not_change_the_rate_at_equal_length() -> None:
    y, d, zeros = [1.0, 0.0, 0.5, 1.0], [1.0, 2.0, -1.0, 0.5], [0.0] * 5
    rate = length_controlled([*y, FAILED], [*d, 90.0], zeros)
    assert rate == length_controlled(y, d, zeros[1:])


def test_swapping_a_and_b_mirrors_the_rate_at_equal_length() -> None:
    random = np.random.default_rng(11)
    la, lb = random.normal(size=(2, 80))
    y = random.choice([1, 0.5, 0], 80)
    ours, theirs = length_controlled(y, la, lb), length_controlled(1 - y, lb, la)
    mirrored = (1 - ours.value, 1 - ours.high, 1 - ours.low)
    assert (theirs.value, theirs.low, theirs.high) == pytest.approx(mirrored)


# ---------------------------------------------------------------------------------------- agreement


def test_kappa_of_a_judge_with_itself_with_its_mirror_and_of_one_constant_outcome() -> None:
    a = np.array(made_of(10, 5, 10))
    assert statistics.kappa(a, a).value == pytest.approx(1)
    assert statistics.kappa(a, 1 - a).value < 0
    assert statistics.kappa([WIN] * 4, [WIN] * 4).value == 0
    with pytest.raises(ValueError, match="judged by both"):
        statistics.kappa([WIN, FAILED], [FAILED, WIN])
    with pytest.raises(ValueError, match="one shape"):
        statistics.kappa([WIN], [WIN, LOSS])


# ------------------------------------------------------------------------------- slow loops and oracles


def drawn(seed: int, size: int, *, failures: float = 0.1) -> Floats:
    random = np.random.default_rng(seed)
    result = random.choice(OUTCOMES, size, p=[0.5, 0.2, 0.3])
    return np.where(random.random(size) < failures, np.nan, result)


def test_a_mean_over_seeds_has_an_interval_over_seeds_and_prompts() -> None:
    alone = statistics.mean_over_seeds([[1, 0, 1, np.nan, 1, 0.5]], same_prompts=True)
    low, high = stats.ttest_1samp([1, 0, 1, 1, 0.5], 0).confidence_interval()
    assert (alone.value, alone.low, alone.high) == pytest.approx((0.7, low, high))
    means = np.array([0.5, 0.6, 0.7])  # a variance of the mean of 1/300
    constant = np.repeat(means[:, None], 4, axis=1)
    for same in (True, False):  # prompts that do not differ add nothing
        found = statistics.mean_over_seeds(constant, same_prompts=same)
        assert (found.value, found.high) == pytest.approx((0.6, 0.6 + 4.30265 * 300**-0.5), abs=1e-6)
    together = statistics.mean_over_seeds(constant, same_prompts=True, num_intervals=2)
    assert together.high == pytest.approx(0.6 + 6.20535 * 300**-0.5, abs=1e-6)
    # Variances of the mean by seeds 1/4, by prompts 1/4, of all values 1/6.
    both = statistics.mean_over_seeds([[0, 1], [1, 2]], same_prompts=True)
    assert both.high - 1 == pytest.approx(12.7062 * (1 / 4 + 1 / 4 - 1 / 6) ** 0.5, abs=1e-3)
    nested = statistics.mean_over_seeds([[0, 1], [1, 2]], same_prompts=False)
    assert nested.high - 1 == pytest.approx(12.7062 * (1 / 4) ** 0.5, abs=1e-3)
    alike = statistics.mean_over_seeds([[0, 1], [1, 0]], same_prompts=False)
    assert alike.high - 0.5 == pytest.approx(12.7062 * (1 / 12) ** 0.5, abs=1e-3), "equal means of seeds"
    with pytest.raises(ValueError, match="no prompt"):
        statistics.mean_over_seeds([[np.nan, 1], [1, np.nan]], same_prompts=True)


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

    w = minimize(loss, np.zeros(2), tol=1e-10).x
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
    [[1e-9, 2e-9, -1e-9, 3e-9, -2e-9, 0.0], [1e9, 2e9, -1e9, 3e9, -2e9, 0.0], [0.0] * 5 + [5000.0]],
    ids=["hardly any difference", "huge ones", "one outlier"],
)
def test_extreme_lengths_give_a_rate_inside_its_interval(d: list[float]) -> None:
    for y in ([1, 1, 0, 1, 0, 0.5], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0.5]):
        result = length_controlled(y, d, np.zeros(6))
        assert 0 <= result.low <= result.value <= result.high <= 1
    separated = [3.0, 2.0, 1.0, -1.0, -2.0, -3.0]  # by the wins
    result = length_controlled([1, 1, 1, 0, 0, 0], separated, np.zeros(6))
    assert 0 < result.low < result.value < result.high < 1
    assert result.value == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(8))
def test_kappa_is_scikit_learns(seed: int) -> None:
    """Of judges that agree by chance, and more often than that; some comparisons failed."""
    random = np.random.default_rng(seed)
    a = random.choice([1.0, 0.5, 0.0], 200, p=random.dirichlet((1, 1, 1)))
    b = np.where(random.random(200) < seed / 8, a, random.choice([1.0, 0.5, 0.0], 200))
    expected = cohen_kappa_score((2 * a).astype(int), (2 * b).astype(int))
    assert statistics.kappa(a, b).value == pytest.approx(expected, abs=1e-12)
    failed = np.append(a, np.nan), np.append(b, 1.0)
    assert statistics.kappa(*failed).value == pytest.approx(expected, abs=1e-12)


# ------------- The win rate at equal length against the length-controlled win rate that AlpacaEval publishes


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

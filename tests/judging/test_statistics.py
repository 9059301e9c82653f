"""Statistics of comparisons against hand-worked numbers, slow loops and simulation."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import length_controlled, matched_length_gain

WIN, TIE, LOSS, FAILED = 1.0, 0.5, 0.0, math.nan


def made_of(wins: int, ties: int, losses: int, failures: int = 0) -> list[float]:
    return [WIN] * wins + [TIE] * ties + [LOSS] * losses + [FAILED] * failures


def test_the_higher_score_wins_equal_scores_tie_and_nan_is_a_failure() -> None:
    result = statistics.outcomes(
        [2.0, 1.0, 0.5, math.nan, 3.0, math.inf], [1.0, 2.0, 0.5, 1.0, math.nan, math.inf]
    )
    np.testing.assert_array_equal(result, [WIN, LOSS, TIE, FAILED, FAILED, TIE])


def test_ties_count_half_and_failures_not_at_all() -> None:
    result = statistics.summarise(made_of(wins=5, ties=4, losses=1, failures=7))
    assert result.win_rate.value == pytest.approx(0.7)  # (5 + 4/2) / 10
    assert (result.wins, result.ties, result.losses, result.failures) == (5, 4, 1, 7)
    assert result.win_rate.count == 10
    assert result.decisive.value == pytest.approx(5 / 6)


@pytest.mark.parametrize("counts", [(30, 5, 15), (1, 0, 0), (10, 10, 10), (0, 4, 3), (700, 50, 250)])
def test_swapping_a_and_b_mirrors_the_summary(counts: tuple[int, int, int]) -> None:
    wins, ties, losses = counts
    ours, theirs = statistics.summarise(made_of(*counts)), statistics.summarise(made_of(losses, ties, wins))
    for mine, other in ((ours.win_rate, theirs.win_rate), (ours.decisive, theirs.decisive)):
        assert other.value == pytest.approx(1 - mine.value)
        assert other.low == pytest.approx(1 - mine.high)
        assert other.high == pytest.approx(1 - mine.low)
    assert theirs.p_value == ours.p_value
    assert (theirs.wins, theirs.losses) == (ours.losses, ours.wins)


def test_swapped_scores_give_mirrored_outcomes() -> None:
    a, b = np.array([0.1, 0.4, 0.4]), np.array([0.3, 0.4, 0.2])
    np.testing.assert_array_equal(statistics.outcomes(a, b), 1 - statistics.outcomes(b, a))


def test_the_interval_is_the_percentile_bootstrap_over_prompts() -> None:
    outcomes = np.array(made_of(wins=60, ties=10, losses=30))
    random = np.random.default_rng(5)
    resampled = [outcomes[random.integers(0, 100, 100)].mean() for _ in range(20_000)]
    result = statistics.rate(outcomes)
    # Resampled means lie on a grid of 1/200, and 20,000 of them place a percentile within one step.
    assert result.low == pytest.approx(np.percentile(resampled, 2.5), abs=0.0051)
    assert result.high == pytest.approx(np.percentile(resampled, 97.5), abs=0.0051)


def test_the_bootstrap_of_two_prompts_by_hand() -> None:
    # A win and a loss: two draws give 0, ½, ½, 1 with ¼ each, so both 2.5% points are the extremes.
    assert statistics.rate([WIN, LOSS]) == statistics.Estimate(0.5, 0.0, 1.0, 2)


def test_the_bootstrap_cuts_off_no_more_than_a_tail_on_either_side() -> None:
    # Exact distribution of 2 × the drawn sum, by adding one draw at a time in fractions.
    wins, ties, losses = 7, 3, 2
    masses = {0: Fraction(1)}
    for _ in range(12):
        grown: dict[int, Fraction] = {}
        for total, mass in masses.items():
            for points, weight in ((2, wins), (1, ties), (0, losses)):
                grown[total + points] = grown.get(total + points, Fraction(0)) + mass * Fraction(weight, 12)
        masses = grown
    tail = Fraction(25, 1000)
    low = next(s for s in range(25) if sum(masses.get(k, 0) for k in range(s + 1)) >= tail)
    high = next(s for s in range(24, -1, -1) if sum(masses.get(k, 0) for k in range(s, 25)) >= tail)
    result = statistics.rate(made_of(wins, ties, losses))
    assert (result.low, result.high) == pytest.approx((low / 24, high / 24))


def test_equal_outcomes_leave_the_bootstrap_no_spread_but_wilson_some() -> None:
    result = statistics.summarise(made_of(wins=20, ties=0, losses=0))
    assert (result.win_rate.low, result.win_rate.high) == (1.0, 1.0)
    # Wilson at 20 of 20: n / (n + z²) = 20 / 23.8415.
    assert result.decisive.low == pytest.approx(0.83887, abs=1e-5)
    assert result.decisive.high == 1.0


def test_the_interval_of_the_win_rate_covers_the_truth_in_95_percent() -> None:
    random = np.random.default_rng(0)
    held = []
    for wins, ties, losses in random.multinomial(300, [0.55, 0.15, 0.30], size=1500):
        result = statistics.rate(made_of(wins, ties, losses))
        held.append(result.low <= 0.625 <= result.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_wilson_by_hand() -> None:
    # 8 of 10, z² = 3.841459: centre (.8 + .192073) / 1.384146 = .716740,
    # reach 1.959964 / 1.384146 · √(.016 + .009604) = .226577.
    result = statistics.wilson(8, 10)
    assert (result.value, result.low, result.high) == pytest.approx((0.8, 0.490163, 0.943317), abs=1e-5)
    assert statistics.wilson(0, 0) == statistics.Estimate(0.5, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),  # 2 · (1 + 6 + 15 + 20) / 64 is more than 1
        (0, 0, 1.0),
    ],
)
def test_the_sign_test_by_hand(wins: int, losses: int, p_value: float) -> None:
    assert statistics.sign_test(wins, losses) == pytest.approx(p_value)


def test_the_sign_test_of_many_prompts_is_the_exact_binomial() -> None:
    exact = 2 * sum(math.comb(1000, k) for k in range(441)) / 2**1000
    assert statistics.sign_test(560, 440) == pytest.approx(exact, rel=1e-9)


def test_a_gain_from_length_alone_is_zero_at_matched_length() -> None:
    random = np.random.default_rng(1)
    length_b = random.integers(5, 20, 200)
    length_a = length_b + random.integers(0, 6, 200)
    result = matched_length_gain(0.3 * length_a, 0.3 * length_b, length_a, length_b)
    assert np.mean(0.3 * (length_a - length_b)) > 0.5
    assert result.value == pytest.approx(0.0, abs=1e-12)


def test_a_gain_besides_length_has_the_robust_interval() -> None:
    # d = 1 + 2x + e with x = 0, 1, 2, 3 and e = ±.1 such that Σe = Σxe = 0: α = 1, β = 2 exactly.
    # c = (.7, .4, .1, −.2); Σc²e² = .01 · .70 = .007; Var = 4/2 · .007 = .014.
    x = np.array([0.0, 1.0, 2.0, 3.0])
    e = np.array([0.1, -0.1, -0.1, 0.1])
    result = matched_length_gain(1 + 2 * x + e, np.zeros(4), x, np.zeros(4))
    reach = 1.959964 * math.sqrt(0.014)
    assert (result.value, result.low, result.high) == pytest.approx((1.0, 1 - reach, 1 + reach), abs=1e-6)
    assert result.count == 4


def test_without_length_variation_the_gain_is_the_plain_mean() -> None:
    result = matched_length_gain([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [4, 4, 4], [4, 4, 4])
    reach = 1.959964 * math.sqrt(1 / 3)  # sample variance 1, N = 3
    assert (result.value, result.low, result.high) == pytest.approx((2.0, 2 - reach, 2 + reach), abs=1e-6)


def test_swapping_a_and_b_mirrors_the_gain() -> None:
    random = np.random.default_rng(2)
    a, b, la, lb = random.normal(size=(4, 50))
    ours, theirs = matched_length_gain(a, b, la, lb), matched_length_gain(b, a, lb, la)
    assert (theirs.value, theirs.low, theirs.high) == pytest.approx((-ours.value, -ours.high, -ours.low))


def test_the_interval_of_the_gain_covers_the_truth_in_95_percent() -> None:
    random = np.random.default_rng(3)
    held = []
    for _ in range(1500):
        x = random.normal(2.0, 3.0, 200)
        noise = random.normal(size=200) * (0.5 + 0.5 * np.abs(x))  # spread grows with the length difference
        result = matched_length_gain(0.4 + 0.2 * x + noise, np.zeros(200), x, np.zeros(200))
        held.append(result.low <= 0.4 <= result.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_a_failure_does_not_change_the_gain() -> None:
    whole = matched_length_gain([1.0, 2.0, 4.0], [0.0, 1.0, 1.0], [3, 4, 7], [3, 3, 5])
    with_failure = matched_length_gain(
        [1.0, 2.0, math.nan, 4.0], [0.0, 1.0, 9.0, 1.0], [3, 4, 9, 7], [3, 3, 1, 5]
    )
    assert with_failure == whole


def test_agreement_leaves_out_gold_ties_and_counts_the_judges_ties_half() -> None:
    labels = [WIN, WIN, LOSS, TIE, WIN, FAILED]
    gold = [WIN, LOSS, LOSS, WIN, TIE, WIN]
    result = statistics.agreement(labels, gold)
    assert result.count == 4  # not the gold tie, not the failure
    assert result.value == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert result.low <= result.value <= result.high


def test_pearson_by_hand() -> None:
    # x − x̄ = (−1, 0, 1), y − ȳ = (−1, 1, 0): 1 / (√2 · √2).
    assert statistics.pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert statistics.pearson([1, 2, 3], [6, 4, 2]) == pytest.approx(-1.0)
    assert statistics.pearson([1, 2, 3], [5, 5, 5]) == 0.0


def test_calibration_by_hand() -> None:
    # σ(ln 3) = .75 and σ(ln 9) = .9. Lower bin: 2 of 4 right, gap .25; upper: 4 of 4, gap .10.
    differences = [math.log(3)] * 4 + [math.log(9)] * 4
    result = statistics.calibration_error(differences, [1, 1, 0, 0, 1, 1, 1, 1], num_bins=2)
    assert result == pytest.approx((0.25 + 0.10) / 2)


def test_turning_pairs_does_not_change_the_calibration_error() -> None:
    random = np.random.default_rng(4)
    differences = random.normal(size=400)
    won = (random.random(400) < 0.6).astype(float)
    turned = random.random(400) < 0.5
    result = statistics.calibration_error(
        np.where(turned, -differences, differences), np.where(turned, 1 - won, won)
    )
    assert result == pytest.approx(statistics.calibration_error(differences, won))


def test_outcomes_drawn_from_the_model_itself_are_calibrated() -> None:
    random = np.random.default_rng(6)
    differences = random.normal(scale=2, size=50_000)
    won = (random.random(50_000) < 1 / (1 + np.exp(-differences))).astype(float)
    assert statistics.calibration_error(differences, won) < 0.01
    assert statistics.calibration_error(3 * differences, won) > 0.05


def test_invalid_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="none of 2 prompts was judged"):
        statistics.summarise([math.nan, math.nan])
    with pytest.raises(ValueError, match=r"0\.5 \(tie\)"):
        statistics.summarise([0.7])
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        statistics.outcomes([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="3 judged prompts"):
        matched_length_gain([1, 2], [1, 2], [1, 2], [1, 2])


# ------------------------------------------------------------------------- planted judges, both orders


def test_always_preferring_the_first_gives_ties_and_full_bias() -> None:
    shown_first, shown_second = np.ones(200), np.zeros(200)  # P(A is better), A shown first and second
    result = statistics.summarise(statistics.both_orders(shown_first, shown_second))
    bias = statistics.position_bias(shown_first, shown_second)
    assert (result.win_rate.value, result.ties) == (0.5, 200)
    assert (bias.flips, bias.first, bias.count) == (1.0, 1.0, 200)


def test_always_preferring_the_second_is_the_opposite_bias() -> None:
    bias = statistics.position_bias(np.zeros(10), np.ones(10))
    assert (bias.flips, bias.first) == (1.0, 0.0)


def test_a_perfect_judge_gives_the_known_ranking_without_bias() -> None:
    random = np.random.default_rng(7)
    a, b = random.normal(0.5, 1, 500), random.normal(0, 1, 500)
    certain = (a > b).astype(float)
    result = statistics.both_orders(certain, certain)
    np.testing.assert_array_equal(result, statistics.outcomes(a, b))
    bias = statistics.position_bias(certain, certain)
    assert bias.flips == 0
    assert bias.first == 0.5  # each pair prefers A once in the first place, or once in the second


def test_a_random_judge_flips_half_and_its_interval_covers_one_half() -> None:
    random = np.random.default_rng(8)
    p, q = (random.random((2, 2000)) < 0.5).astype(float)
    result = statistics.summarise(statistics.both_orders(p, q)).win_rate
    assert result.low <= 0.5 <= result.high
    assert statistics.position_bias(p, q).flips == pytest.approx(0.5, abs=0.05)


def test_orders_by_hand() -> None:
    p = [0.9, 0.2, 0.9, 0.5, math.nan, 0.6]
    q = [0.7, 0.1, 0.3, 0.9, 0.9, math.nan]
    np.testing.assert_array_equal(statistics.both_orders(p, q), [WIN, LOSS, TIE, TIE, FAILED, FAILED])
    bias = statistics.position_bias(p, q)
    # Of four whole pairs one flips. The first place wins 1, 0, 1, ½ with A there; 0, 1, 1, 0 with B there.
    assert (bias.flips, bias.first, bias.count) == (0.25, (2.5 + 2.0) / 8, 4)


def test_the_bias_of_no_pair_is_zero_flips_and_one_half() -> None:
    assert statistics.position_bias([], []) == statistics.PositionBias(0.0, 0.5, 0)


@pytest.mark.parametrize("shares", [(0.55, 0.15, 0.30), (0.25, 0.5, 0.25), (0.7, 0.0, 0.3)])
def test_the_win_rate_of_a_simulated_judge_is_covered_in_95_percent(shares: tuple[float, ...]) -> None:
    random = np.random.default_rng(9)
    truth = shares[0] + shares[1] / 2
    held = [
        result.low <= truth <= result.high
        for counts in random.multinomial(1000, shares, size=4000)
        for result in [statistics.rate(made_of(*counts))]
    ]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


# -------------------------------------------------------------------------------------- equal length


def test_a_judge_of_length_only_gives_one_half_at_equal_length() -> None:
    random = np.random.default_rng(10)
    difference = random.normal(5, 10, 4000)
    longer_wins = (random.random(4000) < 1 / (1 + np.exp(-2 * np.tanh(difference / 10)))).astype(float)
    assert statistics.rate(longer_wins).low > 0.55
    result = length_controlled(longer_wins, difference, np.zeros(4000))
    assert result.low <= 0.5 <= result.high
    assert result.high - result.low < 0.08


def test_the_rate_at_equal_length_solves_its_equations() -> None:
    """Gradient zero: Σ(p − y) = 0 and Σ(p − y)·x + φ = 0, result by bisection in θ for a φ on a grid."""
    y = np.array([1, 1, 1, 0, 0.5, 0, 1, 0])
    d = np.array([4.0, 2.0, -1.0, -3.0, 0.0, 1.0, 3.0, -2.0])
    x = np.tanh(d / d.std())

    def theta_of(phi: float) -> float:
        low, high = -20.0, 20.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(1 / (1 + np.exp(-middle - phi * x)) - y) > 0 else (middle, high)
        return low

    low, high = -20.0, 20.0
    for _ in range(80):
        phi = (low + high) / 2
        p = 1 / (1 + np.exp(-theta_of(phi) - phi * x))
        low, high = (low, phi) if float((p - y) @ x) + phi > 0 else (phi, high)
    result = length_controlled(y, d, np.zeros(8))
    assert result.value == pytest.approx(1 / (1 + math.exp(-theta_of(low))), abs=1e-9)


def test_swapping_a_and_b_mirrors_the_rate_at_equal_length() -> None:
    random = np.random.default_rng(11)
    y, la, lb = random.choice([1, 0.5, 0], 80), random.normal(size=80), random.normal(size=80)
    ours, theirs = length_controlled(y, la, lb), length_controlled(1 - y, lb, la)
    assert (theirs.value, theirs.low, theirs.high) == pytest.approx(
        (1 - ours.value, 1 - ours.high, 1 - ours.low)
    )


def test_without_length_differences_it_is_the_plain_rate() -> None:
    y = made_of(6, 2, 2)
    assert length_controlled(y, [5] * 10, [5] * 10).value == pytest.approx(0.7)
    assert length_controlled(y, [9] * 10, [5] * 10).value == pytest.approx(0.7)


def test_a_contender_that_always_wins_also_wins_at_equal_length() -> None:
    assert length_controlled([1.0] * 5, range(5), [0] * 5) == statistics.wilson(5, 5)
    assert length_controlled([0.0] * 5, range(5), [0] * 5) == statistics.wilson(0, 5)
    assert length_controlled([0.5] * 5, range(5), [0] * 5).value == pytest.approx(0.5)


def test_the_rate_is_finite_where_length_separates_the_wins() -> None:
    d = np.array([3.0, 2.0, 1.0, -1.0, -2.0, -3.0])
    result = length_controlled((d > 0).astype(float), d, np.zeros(6))
    assert 0 < result.low < result.value < result.high < 1
    assert result.value == pytest.approx(0.5)


def test_the_rate_at_equal_length_leaves_out_failures() -> None:
    y, d = [1.0, 0.0, 0.5, 1.0], [1.0, 2.0, -1.0, 0.5]
    with_failure = length_controlled([*y, FAILED], [*d, 90.0], [0.0] * 5)
    assert with_failure == length_controlled(y, d, [0.0] * 4)


def test_the_rate_at_equal_length_is_covered_in_95_percent() -> None:
    random = np.random.default_rng(12)
    held = []
    for _ in range(1500):
        d = random.normal(3, 10, 300)
        p = 1 / (1 + np.exp(-(0.4 + 0.8 * np.tanh(d / 10))))
        y = np.where(random.random(300) < 0.2, 0.5, 0.0)  # a fifth are ties, that leave the mean as it is
        y = np.where(y == 0.5, 0.5, (random.random(300) < 0.5 + (p - 0.5) / 0.8).astype(float))
        result = length_controlled(y, d, np.zeros(300))
        held.append(result.low <= 1 / (1 + math.exp(-0.4)) <= result.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)


# ---------------------------------------------------------------------------------------- agreement


def test_kappa_by_hand() -> None:
    # Both say win on 20, both loss on 15, they differ on 5 and 10: p = .7, e = .5·.6 + .5·.4 = .5, κ = .4.
    a = [WIN] * 25 + [LOSS] * 25
    b = [WIN] * 20 + [LOSS] * 5 + [WIN] * 10 + [LOSS] * 15
    result = statistics.kappa(a, b)
    assert result.value == pytest.approx(0.4)
    assert result.low < 0.4 < result.high
    assert result.count == 50
    assert statistics.kappa(b, a).value == pytest.approx(0.4)


def test_kappa_of_a_judge_with_itself_is_one_with_its_mirror_below_zero() -> None:
    a = np.array(made_of(10, 5, 10))
    assert statistics.kappa(a, a).value == pytest.approx(1)
    assert statistics.kappa(a, 1 - a).value < 0


def test_kappa_of_random_judges_covers_zero_and_leaves_out_failures() -> None:
    random = np.random.default_rng(13)
    a, b = random.choice([1, 0.5, 0], (2, 400, 3))
    result = statistics.kappa(a, b)
    assert result.low <= 0 <= result.high
    assert result.count == 1200
    a[0, 0] = b[3, 2] = FAILED
    assert statistics.kappa(a, b).count == 1198


def test_kappa_of_one_constant_outcome_is_zero() -> None:
    assert statistics.kappa([WIN] * 4, [WIN] * 4).value == 0
    with pytest.raises(ValueError, match="judged by both"):
        statistics.kappa([WIN, FAILED], [FAILED, WIN])
    with pytest.raises(ValueError, match="one shape"):
        statistics.kappa([WIN], [WIN, LOSS])

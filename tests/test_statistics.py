"""Verdict statistics against hand-worked numbers, slow loops and simulation."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from rlhf_tasks import statistics as verdicts

WIN, TIE, LOSS, FAILED = 1.0, 0.5, 0.0, math.nan


def made_of(wins: int, ties: int, losses: int, failures: int = 0) -> list[float]:
    return [WIN] * wins + [TIE] * ties + [LOSS] * losses + [FAILED] * failures


def test_the_higher_score_wins_equal_scores_tie_and_nan_is_a_failure() -> None:
    found = verdicts.outcomes(
        [2.0, 1.0, 0.5, math.nan, 3.0, math.inf], [1.0, 2.0, 0.5, 1.0, math.nan, math.inf]
    )
    np.testing.assert_array_equal(found, [WIN, LOSS, TIE, FAILED, FAILED, TIE])


def test_ties_count_half_and_failures_not_at_all() -> None:
    found = verdicts.verdict(made_of(wins=5, ties=4, losses=1, failures=7))
    assert found.win_rate.value == pytest.approx(0.7)  # (5 + 4/2) / 10
    assert (found.wins, found.ties, found.losses, found.failures) == (5, 4, 1, 7)
    assert found.win_rate.count == 10
    assert found.decisive.value == pytest.approx(5 / 6)


@pytest.mark.parametrize("counts", [(30, 5, 15), (1, 0, 0), (10, 10, 10), (0, 4, 3), (700, 50, 250)])
def test_swapping_a_and_b_mirrors_the_verdict(counts: tuple[int, int, int]) -> None:
    wins, ties, losses = counts
    ours, theirs = verdicts.verdict(made_of(*counts)), verdicts.verdict(made_of(losses, ties, wins))
    for mine, other in ((ours.win_rate, theirs.win_rate), (ours.decisive, theirs.decisive)):
        assert other.value == pytest.approx(1 - mine.value)
        assert other.low == pytest.approx(1 - mine.high)
        assert other.high == pytest.approx(1 - mine.low)
    assert theirs.p_value == ours.p_value
    assert (theirs.wins, theirs.losses) == (ours.losses, ours.wins)


def test_swapped_scores_give_mirrored_outcomes() -> None:
    a, b = np.array([0.1, 0.4, 0.4]), np.array([0.3, 0.4, 0.2])
    np.testing.assert_array_equal(verdicts.outcomes(a, b), 1 - verdicts.outcomes(b, a))


def test_the_interval_is_the_percentile_bootstrap_over_prompts() -> None:
    given = np.array(made_of(wins=60, ties=10, losses=30))
    random = np.random.default_rng(5)
    resampled = [given[random.integers(0, 100, 100)].mean() for _ in range(20_000)]
    found = verdicts.rate(given)
    # Resampled means lie on a grid of 1/200, and 20,000 of them place a percentile within one step.
    assert found.low == pytest.approx(np.percentile(resampled, 2.5), abs=0.0051)
    assert found.high == pytest.approx(np.percentile(resampled, 97.5), abs=0.0051)


def test_the_bootstrap_of_two_prompts_by_hand() -> None:
    # A win and a loss: two draws give 0, ½, ½, 1 with ¼ each, so both 2.5% points are the extremes.
    assert verdicts.rate([WIN, LOSS]) == verdicts.Estimate(0.5, 0.0, 1.0, 2)


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
    found = verdicts.rate(made_of(wins, ties, losses))
    assert (found.low, found.high) == pytest.approx((low / 24, high / 24))


def test_a_bootstrap_without_spread_says_so_while_wilson_stays_open() -> None:
    found = verdicts.verdict(made_of(wins=20, ties=0, losses=0))
    assert (found.win_rate.low, found.win_rate.high) == (1.0, 1.0)
    # Wilson at 20 of 20: n / (n + z²) = 20 / 23.8415.
    assert found.decisive.low == pytest.approx(0.83887, abs=1e-5)
    assert found.decisive.high == 1.0


def test_intervals_of_the_win_rate_hold_the_truth_95_times_of_100() -> None:
    random = np.random.default_rng(0)
    held = []
    for wins, ties, losses in random.multinomial(300, [0.55, 0.15, 0.30], size=1500):
        found = verdicts.rate(made_of(wins, ties, losses))
        held.append(found.low <= 0.625 <= found.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_wilson_by_hand() -> None:
    # 8 of 10, z² = 3.841459: centre (.8 + .192073) / 1.384146 = .716740,
    # reach 1.959964 / 1.384146 · √(.016 + .009604) = .226577.
    found = verdicts.wilson(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.490163, 0.943317), abs=1e-5)
    assert verdicts.wilson(0, 0) == verdicts.Estimate(0.5, 0.0, 1.0, 0)


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
    assert verdicts.sign_test(wins, losses) == pytest.approx(p_value)


def test_the_sign_test_of_many_prompts_is_the_exact_binomial() -> None:
    exact = 2 * sum(math.comb(1000, k) for k in range(441)) / 2**1000
    assert verdicts.sign_test(560, 440) == pytest.approx(exact, rel=1e-9)


def test_a_gain_that_is_all_length_is_none_at_matched_length() -> None:
    random = np.random.default_rng(1)
    length_b = random.integers(5, 20, 200)
    length_a = length_b + random.integers(0, 6, 200)
    found = verdicts.matched_length_gain(0.3 * length_a, 0.3 * length_b, length_a, length_b)
    assert np.mean(0.3 * (length_a - length_b)) > 0.5
    assert found.value == pytest.approx(0.0, abs=1e-12)


def test_a_gain_besides_length_is_found_with_its_robust_interval() -> None:
    # d = 1 + 2x + e with x = 0, 1, 2, 3 and e = ±.1 such that Σe = Σxe = 0: α = 1, β = 2 exactly.
    # c = (.7, .4, .1, −.2); Σc²e² = .01 · .70 = .007; Var = 4/2 · .007 = .014.
    x = np.array([0.0, 1.0, 2.0, 3.0])
    e = np.array([0.1, -0.1, -0.1, 0.1])
    found = verdicts.matched_length_gain(1 + 2 * x + e, np.zeros(4), x, np.zeros(4))
    reach = 1.959964 * math.sqrt(0.014)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1 - reach, 1 + reach), abs=1e-6)
    assert found.count == 4


def test_without_length_variation_the_gain_is_the_plain_mean() -> None:
    found = verdicts.matched_length_gain([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [4, 4, 4], [4, 4, 4])
    reach = 1.959964 * math.sqrt(1 / 3)  # sample variance 1, N = 3
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - reach, 2 + reach), abs=1e-6)


def test_swapping_a_and_b_mirrors_the_gain() -> None:
    random = np.random.default_rng(2)
    a, b, la, lb = random.normal(size=(4, 50))
    ours, theirs = verdicts.matched_length_gain(a, b, la, lb), verdicts.matched_length_gain(b, a, lb, la)
    assert (theirs.value, theirs.low, theirs.high) == pytest.approx((-ours.value, -ours.high, -ours.low))


def test_intervals_of_the_gain_hold_the_truth_95_times_of_100() -> None:
    random = np.random.default_rng(3)
    held = []
    for _ in range(1500):
        x = random.normal(2.0, 3.0, 200)
        noise = random.normal(size=200) * (0.5 + 0.5 * np.abs(x))  # spread grows with the length difference
        found = verdicts.matched_length_gain(0.4 + 0.2 * x + noise, np.zeros(200), x, np.zeros(200))
        held.append(found.low <= 0.4 <= found.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_a_failed_row_leaves_the_gain_as_it_is_without_it() -> None:
    whole = verdicts.matched_length_gain([1.0, 2.0, 4.0], [0.0, 1.0, 1.0], [3, 4, 7], [3, 3, 5])
    with_failure = verdicts.matched_length_gain(
        [1.0, 2.0, math.nan, 4.0], [0.0, 1.0, 9.0, 1.0], [3, 4, 9, 7], [3, 3, 1, 5]
    )
    assert with_failure == whole


def test_agreement_leaves_out_gold_ties_and_halves_the_judges_own() -> None:
    labels = [WIN, WIN, LOSS, TIE, WIN, FAILED]
    gold = [WIN, LOSS, LOSS, WIN, TIE, WIN]
    found = verdicts.agreement(labels, gold)
    assert found.count == 4  # not the gold tie, not the failure
    assert found.value == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert found.low <= found.value <= found.high


def test_pearson_by_hand() -> None:
    # x − x̄ = (−1, 0, 1), y − ȳ = (−1, 1, 0): 1 / (√2 · √2).
    assert verdicts.pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert verdicts.pearson([1, 2, 3], [6, 4, 2]) == pytest.approx(-1.0)
    assert verdicts.pearson([1, 2, 3], [5, 5, 5]) == 0.0


def test_calibration_by_hand() -> None:
    # σ(ln 3) = .75 and σ(ln 9) = .9. Lower bin: 2 of 4 right, gap .25; upper: 4 of 4, gap .10.
    differences = [math.log(3)] * 4 + [math.log(9)] * 4
    found = verdicts.calibration_error(differences, [1, 1, 0, 0, 1, 1, 1, 1], num_bins=2)
    assert found == pytest.approx((0.25 + 0.10) / 2)


def test_turning_pairs_over_leaves_calibration_as_it_was() -> None:
    random = np.random.default_rng(4)
    differences = random.normal(size=400)
    won = (random.random(400) < 0.6).astype(float)
    turned = random.random(400) < 0.5
    found = verdicts.calibration_error(
        np.where(turned, -differences, differences), np.where(turned, 1 - won, won)
    )
    assert found == pytest.approx(verdicts.calibration_error(differences, won))


def test_outcomes_drawn_from_the_model_itself_are_calibrated() -> None:
    random = np.random.default_rng(6)
    differences = random.normal(scale=2, size=50_000)
    won = (random.random(50_000) < 1 / (1 + np.exp(-differences))).astype(float)
    assert verdicts.calibration_error(differences, won) < 0.01
    assert verdicts.calibration_error(3 * differences, won) > 0.05


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 2 prompts was judged"):
        verdicts.verdict([math.nan, math.nan])
    with pytest.raises(ValueError, match=r"0\.5 \(tie\)"):
        verdicts.verdict([0.7])
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        verdicts.outcomes([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="3 judged prompts"):
        verdicts.matched_length_gain([1, 2], [1, 2], [1, 2], [1, 2])

"""Which metrics trip which guard, and when."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhf_tasks.config import ppo as config
from rlhf_tasks.ppo.guards import BF16_RATIO_ERROR, FLOAT32_RATIO_ERROR, GuardChecks
from tests import small

WELL = {
    "objective/kl_k1": 2.0,
    "objective/kl_k1_standard_error": 0.1,
    "objective/perplexity": 1.5,
    "val/ratio": 1.0,
    "val/first_ratio_error": 1e-6,
    "val/response_length": 20.0,
    "val/repetition": 0.1,
    "val/truncated_share": 0.05,
}


def settings(**changes: Any) -> config.Guards:
    return config.Guards.model_validate(small.params()["ppo"]["guards"] | {"patience": 1} | changes)


def trips(*updates: dict[str, float], num_episodes: int = 256, **changes: Any) -> list[str | None]:
    """Which guards trip after each update, `+` between them."""
    guards = GuardChecks(settings(**changes), num_episodes)
    return ["+".join(trip.name for trip in guards.check(WELL | update)) or None for update in updates]


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({}, None),
        ({"objective/kl_k1": 10.5}, "kl_high"),
        ({"objective/kl_k1": 9.5}, None),
        ({"objective/kl_k1": -0.3}, "kl_low"),
        ({"objective/kl_k1": -0.15}, None),  # within two standard errors of zero
        ({"objective/kl_k1": -5e-7, "objective/kl_k1_standard_error": 0.0}, None),  # an unchanged policy
        ({"objective/kl_k1": -5e-4, "objective/kl_k1_standard_error": 0.0}, "kl_low"),
        ({"val/ratio": 2.5}, "ratio"),
        ({"val/ratio": 0.05}, "ratio"),
    ],
)
def test_a_guard_trips_where_its_metric_leaves_the_range(metrics: dict[str, float], name: str | None) -> None:
    assert trips(metrics) == [name]


def test_a_negative_kl_is_not_answered_by_a_higher_coefficient() -> None:
    [trip] = GuardChecks(settings(action="raise_kl"), 256).check(WELL | {"objective/kl_k1": -0.3})
    assert not trip.kl_helps, "it would pay twice as much for the fault"


def test_the_gap_trips_at_each_evaluation_above_its_bound_and_is_off_by_default() -> None:
    """Updates without an evaluation have no gap; `patience` does not count for it."""
    low, high = ({"eval/standardized_gap": gap} for gap in (0.9, 1.1))
    updates: list[dict[str, float]] = [{}, low, {}, high, {}, high, low]
    assert config.Guards().gap_max is None
    assert trips(*updates) == [None] * 7
    assert trips(*updates, gap_max=1.0, patience=3) == [None, None, None, "gap", None, "gap", None]


def test_with_raise_kl_a_condition_that_keeps_failing_trips_again() -> None:
    high = {"objective/kl_k1": 12.0}
    found = trips(*[high] * 5, patience=2, action="raise_kl")
    assert found == [None, "kl_high", None, "kl_high", None]


@pytest.mark.parametrize(
    ("bound", "error", "name"),
    [
        (FLOAT32_RATIO_ERROR, 9e-4, None),
        (FLOAT32_RATIO_ERROR, 1.1e-3, "first_ratio"),
        (BF16_RATIO_ERROR, 0.02, None),
        (BF16_RATIO_ERROR, 0.06, "first_ratio"),
    ],
)
def test_a_first_ratio_that_is_not_1_trips_and_bf16_may_round_more(
    bound: float, error: float, name: str | None
) -> None:
    found = GuardChecks(settings(), 256, ratio_error=bound).check(WELL | {"val/first_ratio_error": error})
    assert [trip.name for trip in found] == ([name] if name else [])


def test_a_guard_trips_after_patience_updates_in_a_row() -> None:
    high = {"objective/kl_k1": 12.0}
    assert trips(high, high, {}, high, high, high, patience=3) == [None] * 5 + ["kl_high"]


def test_responses_that_no_longer_end_trip_the_guard_and_those_that_never_did_do_not() -> None:
    assert trips({}, {"val/truncated_share": 0.5}, {"val/truncated_share": 0.6}) == [None, None, "eos"]
    assert trips(*[{"val/truncated_share": 0.99}] * 3) == [None] * 3


def test_the_eos_guard_allows_for_the_noise_of_small_rollouts() -> None:
    """Each of 16 responses ends with probability 0.3, so the largest share is chance."""
    rng = random.Random(1)
    ended = [sum(rng.random() < 0.3 for _ in range(16)) / 16 for _ in range(500)]
    assert max(ended) >= 0.6, "by chance"
    low = [share < 0.5 * max(ended) for share in ended]
    assert any(all(low[i : i + 3]) for i in range(498)), (
        "noise alone is below half of that, three times in a row"
    )
    shares = [*ended, 0.0, 0.0, 0.0]
    result = trips(*[{"val/truncated_share": 1 - share} for share in shares], num_episodes=16, patience=3)
    assert result == [None] * 502 + ["eos"]


def test_collapse_is_low_perplexity_while_length_or_repetition_rises() -> None:
    sure = {"objective/perplexity": 1.001}
    assert trips({}, *[sure] * 9) == [None] * 10
    longer, repeats = {"val/response_length": 25.0}, {"val/repetition": 0.4}
    assert trips({}, sure | longer) == [None, "pattern_collapse"]
    assert trips({}, *[sure | repeats] * 3, patience=3) == [None, None, None, "pattern_collapse"]
    assert trips({}, longer | repeats) == [None, None]


def test_a_condition_that_keeps_failing_trips_once_and_hides_no_other_guard() -> None:
    high, silent = {"objective/kl_k1": 12.0}, {"val/truncated_share": 0.9}
    assert trips({}, high, high, high | silent, {}, high) == [None, "kl_high", None, "eos", None, "kl_high"]


def test_guards_continue_from_their_saved_state() -> None:
    high = WELL | {"objective/kl_k1": 12.0}
    one, other = GuardChecks(settings(patience=2), 256), GuardChecks(settings(patience=2), 256)
    assert not one.check(high)
    other.load_state_dict(one.state_dict())
    assert other.check(high)


def test_the_first_update_is_compared_with_the_responses_before_training() -> None:
    guards = GuardChecks(settings(), 256)
    guards.begin(0.9)
    assert [trip.name for trip in guards.check(WELL | {"val/truncated_share": 0.8})] == ["eos"]

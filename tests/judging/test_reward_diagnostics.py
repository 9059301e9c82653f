"""Reward diagnostics by hand: agreement and bins of calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from rlhf_tasks.judging import reward_diagnostics
from rlhf_tasks.scoring.protocol import Responses


def lead(confidence: float) -> float:
    """The score difference of which σ is the confidence."""
    return math.log(confidence / (1 - confidence))


def test_bins_rise_by_confidence_and_the_error_is_their_mean_gap() -> None:
    """A bin has twenty pairs."""
    sure, unsure = [lead(0.9)] * 10 + [-lead(0.9)] * 10, [lead(0.6)] * 18 + [-lead(0.6)] * 2
    error, (first, second) = reward_diagnostics.calibration([*sure, *unsure])
    assert (first["confidence"], first["right"]) == pytest.approx((0.6, 0.9))
    assert (second["confidence"], second["right"]) == pytest.approx((0.9, 0.5))
    assert first["low"] < 0.9 < first["high"] < 1
    assert (first["pairs"], second["pairs"]) == (20, 20)
    assert error == pytest.approx((0.3 + 0.4) / 2)


def test_pairs_of_equal_scores_are_left_out_of_calibration_and_count_half_in_agreement() -> None:
    assert reward_diagnostics.calibration([0.0, 0.0]) == (0.0, [])
    assert reward_diagnostics.calibration([0.0, 2.0, 0.0])[1][0]["pairs"] == 1
    samples = {"sft_samples": [("p", "aa", "bb"), ("p", "aaa", "b"), ("p", "a", "bb"), ("p", "aaaa", "b")]}
    ((result,), _) = reward_diagnostics.diagnose({"reward": score_length}, {}, samples)
    assert result.agreement is not None
    assert result.agreement.value == 2.5 / 4


def score_length(rows: Responses) -> torch.Tensor:
    return torch.tensor([float(len(text)) for text in rows.texts])


def test_diagnostics_are_by_model_and_origin() -> None:
    given = [("p", "long one", "x"), ("p", "a", "long one")]
    labeled = {"given": given, "sft_samples": given}
    samples = {"sft_samples": [("p", "yes.", "no")], "policy_samples": []}
    results, rows = reward_diagnostics.diagnose({"reward": score_length}, labeled, samples)
    assert [(one.model, one.origin) for one in results] == [("reward", "given"), ("reward", "sft_samples")]
    of_given, of_samples = results
    assert of_given.agreement is None, "gold did not label those pairs"
    assert of_samples.agreement is not None
    assert of_samples.agreement.value == 1.0
    assert {(row["model"], row["origin"], row["right"]) for row in rows} == {
        ("reward", "given", 0.5),
        ("reward", "sft_samples", 1.0),
    }
    assert of_samples.calibration_error == pytest.approx(1 - 1 / (1 + math.exp(-2)))
    assert reward_diagnostics.diagnose({}, labeled, samples) == ((), [])


def test_two_samples_are_ordered_by_score_and_equal_ones_are_left_out() -> None:
    def number(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [float(text) for text in responses]

    pairs = reward_diagnostics.order_by(number, ["a", "b", "c"], ["1", "2", "3"], ["2", "2", "1"])
    assert pairs == [("a", "2", "1"), ("c", "3", "1")]

"""Calibration and length by hand: bins of few pairs, and what is left out."""

from __future__ import annotations

import math

import pytest

from rlhf_tasks.evaluation import trust
from rlhf_tasks.evaluation.trust import Pairs


def lead(confidence: float) -> float:
    """The score difference of which σ is this."""
    return math.log(confidence / (1 - confidence))


def test_a_model_that_means_its_confidence_has_no_error() -> None:
    """Of ten pairs at 80% eight are right, of ten at 60% six."""
    leads = [lead(0.8)] * 8 + [-lead(0.8)] * 2 + [lead(0.6)] * 6 + [-lead(0.6)] * 4
    error, bins = trust.calibration(leads)
    assert len(bins) == 1, "twenty pairs are one bin"
    assert bins[0]["confidence"] == pytest.approx(0.7)
    assert bins[0]["right"] == pytest.approx(0.7)
    assert error == pytest.approx(0, abs=1e-12)


def test_bins_rise_by_confidence_and_the_error_is_their_mean_gap() -> None:
    sure, unsure = [lead(0.9)] * 10 + [-lead(0.9)] * 10, [lead(0.6)] * 18 + [-lead(0.6)] * 2
    error, (first, second) = trust.calibration([*sure, *unsure])
    assert (first["confidence"], first["right"]) == pytest.approx((0.6, 0.9))
    assert (second["confidence"], second["right"]) == pytest.approx((0.9, 0.5))
    assert first["low"] < 0.9 < first["high"] < 1
    assert (first["pairs"], second["pairs"]) == (20, 20)
    assert error == pytest.approx((0.3 + 0.4) / 2)


def test_pairs_of_equal_scores_favour_nobody_and_are_left_out() -> None:
    assert trust.calibration([0.0, 0.0]) == (0.0, [])
    assert trust.calibration([0.0, 2.0, 0.0])[1][0]["pairs"] == 1
    assert trust.agreement([0.0, 2.0, -1.0, 3.0]).value == 2.5 / 4


class Known:
    """A reward model that scores an answer by its length; longer is better."""

    def scores(self, prompts: list[str], answers: list[str]) -> list[float]:
        return [float(len(answer)) for answer in answers]


def test_agreement_and_calibration_are_told_by_model_and_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Pairs(["p", "p"], ["long one", "a"], ["x", "long one"])
    monkeypatch.setattr(trust, "compared", lambda: {"given": given, "sft_samples": given})
    samples = {"sft_samples": Pairs(["p"], ["yes."], ["no"]), "policy_samples": Pairs([], [], [])}
    metrics, rows = trust.measured({"reward": Known()}, samples)  # type: ignore[dict-item]
    assert metrics["agreement/reward/sft_samples"] == 1.0
    assert "agreement/reward/given" not in metrics, "labels there are not gold's of the policy's answers"
    assert {(row["model"], row["origin"], row["right"]) for row in rows} == {
        ("reward", "given", 0.5), ("reward", "sft_samples", 1.0),
    }  # fmt: skip
    sigma = 1 / (1 + math.exp(-2))
    assert metrics["calibration/reward/sft_samples"] == pytest.approx(1 - sigma)
    assert not [key for key in metrics if "policy_samples" in key], "nothing to agree on"
    assert trust.measured({}, samples) == ({}, [])


def test_two_samples_are_ordered_by_gold_and_its_ties_left_out() -> None:
    prompts = ["a", "b", "c"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "gold_scores", lambda prompts, answers: [float(a) for a in answers])
        pairs = trust.by_gold(prompts, ["1", "2", "3"], ["2", "2", "1"])
    assert pairs == Pairs(["a", "c"], ["2", "3"], ["1", "1"])


def test_scores_are_averaged_over_answers_of_like_length() -> None:
    texts = {"sft": ["x" * n for n in range(40, 0, -1)]}
    scores = {("gold", "sft"): [float(n) for n in range(40, 0, -1)]}
    short, long = trust.by_length(scores, texts)
    assert (short["length"], short["score"], short["answers"]) == (10.5, 10.5, 20)
    assert (long["length"], long["score"]) == (30.5, 30.5)
    deviation = math.sqrt(sum((n - 10.5) ** 2 for n in range(1, 21)) / 19)
    assert short["high"] - short["score"] == pytest.approx(1.96 * deviation / math.sqrt(20))
    failed = trust.by_length({("gold", "sft"): [math.nan] * 39 + [1.0]}, texts)
    assert [(row["length"], row["low"], row["answers"]) for row in failed] == [(1.0, 1.0, 1)]
    assert trust.by_length({("gold", "sft"): [math.nan] * 40}, texts) == []

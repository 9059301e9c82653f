"""Accuracies of verifiers, of all responses and by the values of columns, against counts by hand."""

from __future__ import annotations

import pytest

from rlhf_tasks.config import Judging
from rlhf_tasks.judging import summary
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.tracking import catalogue

JUDGE = {
    "kind": "verifier",
    "name": "exact",
    "checks": [{"kind": "exact", "column": "answer"}],
    "by": ["kind"],
}
KEPT = {"answer": ["1", "2", "3", "4"], "kind": ["odd", "even", "odd", "even one"]}
TEXTS = {"sft": ["1", "0", "0", "0"], "policy": ["1", "2", "3", "0"]}


def test_values_of_one_name_in_metrics_are_told_apart() -> None:
    settings = Judging.model_validate({"judges": [JUDGE]})
    found = summary.measure_accuracies(settings, TEXTS, {**KEPT, "kind": ["+", "*", "+", "_"]})
    right = {name: one.right["policy"].value for name, one in found["exact"].by.items()}
    assert right == {"kind._": 1, "kind.__": 1, "kind.___": 0}
    long = summary.measure_accuracies(settings, TEXTS, {**KEPT, "kind": ["a" * 300, "a" * 299, "b", "b"]})
    assert max(map(len, long["exact"].by)) < 100, "MLflow takes 250 letters"
    assert len(long["exact"].by) == 3


def test_accuracy_is_measured_for_each_value_of_a_column() -> None:
    settings = Judging.model_validate({"judges": [JUDGE]})
    found = summary.measure_accuracies(settings, TEXTS, KEPT)
    metrics = EvaluationResults(accuracies=found).metrics()
    expected = {
        "exact/accuracy/sft": 1 / 4,
        "exact/accuracy/policy": 3 / 4,
        "exact/accuracy_gain": 2 / 4,
        "exact/accuracy/policy/in/kind.odd": 1,
        "exact/accuracy/sft/in/kind.odd": 1 / 2,
        "exact/accuracy_gain/in/kind.odd": 1 / 2,
        "exact/accuracy_gain/in/kind.even": 1,
        "exact/accuracy/policy/in/kind.even_one": 0,
        "exact/accuracy_gain/in/kind.even_one": 0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert (
        metrics["exact/accuracy/sft/in/kind.odd/low"] < 0.5 < metrics["exact/accuracy/sft/in/kind.odd/high"]
    )
    assert [key for key in metrics if catalogue.find("judge", key) is None] == []
    rows = summary.accuracy_table(found["exact"])
    assert [row[:3] for row in rows] == [
        ["all", "25.0%", "75.0%"],
        ["kind.odd", "50.0%", "100.0%"],
        ["kind.even", "0.0%", "100.0%"],
        ["kind.even_one", "0.0%", "0.0%"],
    ]
    assert rows[3][3] == "+0.0 (+0.0 to +0.0)"

"""The results document: what it holds is what metrics/judge.json holds, and it survives the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import Judging
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import summary
from rlhf_tasks.judging.results import (
    ComparisonResult,
    Cost,
    EvaluationResults,
    HumanAgreement,
    HumanLabels,
    JudgeKappa,
    ResponseStatistics,
    RetentionResult,
    RewardDiagnostic,
    TaskChange,
    TaskScore,
)
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.tracking import catalogue


def interval(value: float) -> Interval:
    return Interval(float(value), value - 1.0, value + 1.0)


def comparison(judge: str, a: str, b: str, **optional: Any) -> ComparisonResult:
    rates = {"win_rate": interval(10), "decisive": interval(20), "length_controlled": interval(30)}
    counts = {"p_value": 0.25, "ties": 3, "examples": 17, "failures": 2}
    return ComparisonResult.model_validate({"judge": judge, "a": a, "b": b} | rates | counts | optional)


def bounds(name: str, value: float) -> dict[str, float]:
    """The metrics of an interval."""
    return {name: value, f"{name}/low": value - 1, f"{name}/high": value + 1}


COMPARISON: dict[str, float] = {
    **{"win_rate": 10, "low": 9, "high": 11, "ties": 3, "examples": 17, "failures": 2, "p_value": 0.25},
    **bounds("decisive", 20),
    **bounds("length_controlled", 30),
}
BIAS: dict[str, float] = {"position_bias": 0.125, "first_share": 0.625}
RESPONSES: dict[str, float] = {
    **{"rouge_l": 0.1, "ended": 0.2, "distinct_1": 0.3, "distinct_2": 0.4, "corpus_distinct_2": 0.6},
    **{"sft_perplexity": 7.0, "repetition": 0.5},
}
ARC = {
    "acc": TaskScore(value=0.5, standard_error=0.02, examples=9),
    "f1": TaskScore(value=0.25, standard_error=None, examples=9),
}


def responses(length: float) -> ResponseStatistics:
    return ResponseStatistics(**RESPONSES, length=length)


WHOLE = EvaluationResults(
    comparisons=(
        comparison("gold", "policy", "sft"),
        comparison("llm", "sft", "reference", **BIAS, cost=Cost(replies=8, tokens=90)),
    ),
    optimised_judges={"own": "models/reward"},
    responses={"sft": responses(4), "policy": responses(6)},
    facets={"gold": {"reference": {"score": 0.75}}},
    retention={
        "base": RetentionResult(perplexity={"sft_text": 5.0, "general": 7.0}, multiple_choice=interval(50)),
        "sft": RetentionResult(perplexity={}, multiple_choice=None, tasks={"arc": ARC}),
    },
    task_changes={"arc": TaskChange(metric="acc", drop=-0.125, standard_error=0.01)},
    reward_diagnostics=(
        RewardDiagnostic(model="reward", origin="given", calibration_error=0.01, agreement=None),
        RewardDiagnostic(
            model="reward_heldout", origin="sft_samples", calibration_error=0.02, agreement=interval(60)
        ),
    ),
    human_labels=HumanLabels(
        labels=12,
        judges={
            "gold": HumanAgreement(kappa=interval(70), agreement=interval(80)),
            "llm": HumanAgreement(kappa=interval(90), agreement=None),
        },
    ),
    judge_kappas=(JudgeKappa(first="gold", second="llm", kappa=interval(100)),),
)


def test_metrics_have_the_keys_and_values_of_metrics_judge_json() -> None:
    expected: dict[str, float] = {"own/is_optimised_reward": 1}
    asked = COMPARISON | BIAS | {"cost/replies": 8, "cost/tokens": 90}
    expected |= {f"gold/policy_vs_sft/{key}": value for key, value in COMPARISON.items()}
    expected |= {f"llm/sft_vs_reference/{key}": value for key, value in asked.items()}
    for name, length in (("sft", 4), ("policy", 6)):
        expected |= {f"{key}/{name}": value for key, value in (RESPONSES | {"length": length}).items()}
    expected |= {"length/policy_over_sft": 1.5, "gold/reference/score": 0.75}
    expected |= {"perplexity/sft_text/base": 5, "perplexity/general/base": 7}
    expected |= bounds("choice/base", 50)
    expected |= {"task/arc/acc/sft": 0.5, "task/arc/acc/sft/standard_error": 0.02, "task/arc/f1/sft": 0.25}
    expected |= {"task_drop/arc": -0.125, "task_drop/arc/standard_error": 0.01}
    expected |= {"calibration/reward/given": 0.01, "calibration/reward_heldout/sft_samples": 0.02}
    expected |= bounds("agreement/reward_heldout/sft_samples", 60)
    expected |= {"human/labels": 12}
    expected |= bounds("human/gold/kappa", 70) | bounds("human/gold/agreement", 80)
    expected |= bounds("human/llm/kappa", 90) | bounds("kappa/gold_and_llm", 100)
    assert WHOLE.metrics() == expected


def test_the_document_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    file = tmp_path / "evaluation" / "results.json"
    WHOLE.write(file)
    assert EvaluationResults.read(file) == WHOLE
    again = tmp_path / "again.json"
    EvaluationResults.read(file).write(again)
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"comparisons": [{"judge": "gold"}]}', r"comparisons\.0\.a: Field required"),
        ('{"verdicts": []}', "verdicts: Extra inputs"),
    ],
)
def test_a_file_that_is_not_a_results_document_is_a_user_error(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "results.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        EvaluationResults.read(file)
    assert str(file) in str(caught.value)
    assert "rlhf judge" in str(caught.value)
    file.unlink()
    with pytest.raises(UserError, match=r"results\.json cannot be read .*; run `rlhf judge` to write it"):
        EvaluationResults.read(file)


def test_wins_and_losses_follow_from_the_win_rate_and_the_ties() -> None:
    """(4 + ½ · 3) / 10 = 0.55."""
    counted = comparison("gold", "policy", "sft").model_copy(
        update={"win_rate": interval(0.55), "ties": 3, "examples": 10}
    )
    assert (counted.wins, counted.losses) == (4, 3)


# ------------ Accuracies of verifiers, of all responses and by the values of columns, against counts by hand


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

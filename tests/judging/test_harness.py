"""Tasks of lm-evaluation-harness: its results against single rows through the bare model, and its failures.

What runs the harness is skipped where the extra is not installed: `pip install -e '.[eval]'`.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

from rlhf_tasks.config import judge as config
from rlhf_tasks.config.judge import Retention
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.data.tokenizer import encode, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import harness
from rlhf_tasks.judging.harness import HarnessTasks, TaskResult
from rlhf_tasks.judging.results import EvaluationResults, TaskScore
from rlhf_tasks.judging.retention import Probes
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.project.paths import Paths
from tests import small
from tests.conftest import Command
from tests.promotion import planted

ROOT = Path(__file__).parents[2]
SHIPPED = "rlhf_tasks/judging/tasks"
has_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs lm-evaluation-harness: `pip install -e '.[eval]'`",
)
FOLDERS = {name: Path("models") / name for name in ("base", "sft", "policy")}


def settings(**changes: Any) -> config.Tasks:
    values = {"names": ["post_facts"], "folder": SHIPPED, "num_examples": 12, "batch_size": 5}
    return config.Tasks.model_validate(values | changes)


def documents() -> list[dict[str, Any]]:
    lines = (ROOT / SHIPPED / "post_facts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def tasks_here(models_here: Path) -> Path:
    """A folder `mine` in the working folder with the shipped task, a copy of it, and a group of both."""
    yaml, folder = YAML(), models_here / "mine"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in documents()[:12]), encoding="utf-8"
    )
    tree = yaml.load((ROOT / SHIPPED / "post_facts.yaml").read_text(encoding="utf-8"))
    tree["dataset_kwargs"] = {"data_files": {"test": "mine/rows.jsonl"}}
    for name in ("post_facts", "again"):
        yaml.dump({**tree, "task": name}, folder / f"{name}.yaml")
    mean = {"metric": "acc", "aggregation": "mean", "weight_by_size": True}
    both = {"group": "both", "task": ["post_facts", "again"], "aggregate_metric_list": [mean]}
    yaml.dump(both, folder / "both.yaml")
    return folder


# ------------------------------------------------------------------------------- without the harness


def test_the_shipped_task_has_one_right_answer_at_every_place() -> None:
    rows = documents()
    assert len({row["prompt"] for row in rows}) == len(rows) == 200
    for row in rows:
        scores = [gold(row["prompt"], choice).score for choice in row["choices"]]
        assert (scores[row["answer"]], sorted(scores)[-2] < 1) == (1, True)
        assert all(choice.startswith(" ") for choice in row["choices"])
    places = Counter(row["answer"] for row in rows)
    assert min(places.values()) > 35


def test_without_the_extra_the_first_stage_stops_with_one_message(
    project: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    values = {"names": ["x"], "folder": None, "num_examples": None, "batch_size": 1}
    planted.params(project, {"judge.retention.tasks": values})
    assert rlhf("prepare", status=2).err == (
        "rlhf: judge.retention.tasks needs lm-evaluation-harness, which is not installed; install it with "
        "`pip install -e '.[eval]'`, or set judge.retention.tasks to null\n"
    )


def test_a_folder_that_does_not_exist_and_names_that_cannot_be_are_refused_and_no_tasks_need_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="folder: rlhf_tasks/judging/tasks is not a folder"):
        harness.check(settings(), tmp_path)
    harness.check(settings(), ROOT)
    harness.check(settings(folder=None), tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    harness.check(None, tmp_path)
    for names, problem in ((["a", "b", "a"], "a is there twice"), ([], "at least 1")):
        with pytest.raises(ValueError, match=problem):
            settings(names=names)


def done(
    values: list[float] | None, value: float, error: float | None, *, better: bool = True
) -> dict[str, TaskResult]:
    score = TaskScore(value=value, standard_error=error, examples=4)
    return {"t": TaskResult({"acc": score}, "acc", better, None if values is None else np.array(values))}


def test_the_drop_has_the_error_of_the_mean_difference_or_of_two_values_and_lower_may_be_better() -> None:
    """Differences 0, 1, 0, 1: their mean is ½, their variance 1/3, and √(1/3 / 4) = √(1/12)."""
    change = harness.compare_results(done([1, 1, 0, 1], 0.75, 0.2), done([1, 0, 0, 0], 0.25, 0.2))["t"]
    assert (change.metric, change.drop) == ("acc", 0.5)
    assert change.standard_error == pytest.approx(math.sqrt(1 / 12)), "on the same documents"
    before, after = done(None, 10.0, 3.0, better=False), done(None, 12.0, 4.0, better=False)
    change = harness.compare_results(before, after)["t"]
    assert (change.drop, change.standard_error) == (2.0, 5.0)
    assert harness.compare_results(before, done(None, 12.0, None, better=False))["t"].standard_error is None


# ---------------------------------------------------------------------------------- with the harness


@has_harness
def test_accuracies_are_those_of_single_rows_through_the_bare_model(models_here: Path) -> None:
    """By Σ log p of a choice, and by that per character; the errors are those of a mean of 12 values."""
    folder = FOLDERS["policy"]
    model, tokenizer = load_causal(folder).eval(), load_tokenizer(folder)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row in documents()[:12]:
        sums = []
        for choice in row["choices"]:
            query, response = encode(tokenizer, [row["prompt"], choice])
            logprobs = small.logits_alone(model, query, response).log_softmax(-1)
            sums.append(float(sum(logprobs[t, token] for t, token in enumerate(response))))
        rates = [s / len(choice) for s, choice in zip(sums, row["choices"], strict=True)]
        for name, by in (("acc", sums), ("acc_norm", rates)):
            right[name].append(by.index(max(by)) == row["answer"])
    result = HarnessTasks(settings(), ROOT).measure(model, tokenizer)["post_facts"]
    for name, values in right.items():
        assert result.scores[name].value == pytest.approx(np.mean(values))
        assert result.scores[name].standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(12))
        assert result.scores[name].examples == 12
    assert (result.metric, result.higher_is_better) == ("acc", True)
    assert result.values is not None
    assert result.values.tolist() == right["acc"]


@has_harness
def test_base_sft_and_policy_do_the_tasks_and_batches_change_nothing(tasks_here: Path) -> None:
    results = []
    for size in (1, 7):
        values: dict[str, Any] = {"num_examples": 6, "micro_batch_tokens": 256, "general": None}
        values |= {"questions": None, "tasks": settings(folder="mine", batch_size=size).model_dump()}
        probes = Probes(Retention.model_validate(values), Paths())
        results.append(probes.measure_all(FOLDERS, torch.device("cpu")))
    assert results[0] == results[1]
    retention, changes = results[0]
    assert [(name, set(one.tasks)) for name, one in retention.items()] == [
        (f, {"post_facts"}) for f in FOLDERS
    ]
    accuracies = {name: one.tasks["post_facts"]["acc"].value for name, one in retention.items()}
    assert changes["post_facts"].drop == pytest.approx(accuracies["sft"] - accuracies["policy"])


@has_harness
def test_a_group_with_a_result_of_its_own_is_reported_instead_of_its_tasks(tasks_here: Path) -> None:
    model, tokenizer = load_causal(FOLDERS["sft"]).eval(), load_tokenizer(FOLDERS["sft"])
    one = HarnessTasks(settings(names=["again"], folder="mine"), Path()).measure(model, tokenizer)
    both = HarnessTasks(settings(names=["both"], folder="mine"), Path()).measure(model, tokenizer)
    assert set(both) == {"both"}
    assert both["both"].scores["acc"].value == pytest.approx(one["again"].scores["acc"].value)
    assert both["both"].values is None


@has_harness
def test_stage_judge_writes_the_results_of_tasks(tasks_here: Path) -> None:
    values = settings(folder="mine").model_dump(mode="json")
    changes = {"judge.num_examples": 6, "judge.judges": [small.GOLD], "judge.retention.tasks": values}
    metrics = small.run("judge", changes)
    for model in FOLDERS:
        assert 0 <= metrics[f"task/post_facts/acc/{model}"] <= 1
        assert metrics[f"task/post_facts/acc_norm/{model}/standard_error"] >= 0
    drop = metrics["task/post_facts/acc/sft"] - metrics["task/post_facts/acc/policy"]
    assert metrics["task_drop/post_facts"] == pytest.approx(drop)
    results = EvaluationResults.read(Paths().evaluation_results)
    assert results.retention["base"].tasks["post_facts"]["acc"].examples == 12
    assert results.task_changes["post_facts"].metric == "acc"


@has_harness
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other", None, r"names: other is not a task: neither mine nor the harness has one of that name"),
        ("bad", "dataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\n", "FileNotFound"),
        ("bad", "dataset_path: json\noutput_type: dance\n", "invalid output_type 'dance'"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_a_user_error(
    tasks_here: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tasks_here / "bad.yaml").write_text(f"task: bad\n{text}", encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        HarnessTasks(settings(names=[name], folder="mine"), Path())
    assert str(caught.value).startswith("judge.retention.tasks")

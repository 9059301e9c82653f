"""Tasks of lm-evaluation-harness, an extra of this package, done by checkpoints. The harness runs the models.

A task's results are those of `lm_eval.evaluate`: the task's own metrics, with the standard errors that the
harness estimates. Few-shot examples are drawn with a fixed seed, the same for every model.

Source of the paired standard error: Miller 2024 (arXiv 2411.00640).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks.config import judge as config
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import TaskChange, TaskScore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKAGE = "lm_eval"
SEED = 1234  # of few-shot examples; the harness's own default
NUM_RESAMPLES = 1000  # for standard errors without a closed form
NO_FILTER = "none"


@dataclass(frozen=True)
class First:
    """The first metric of a task, by which a model's drop is measured."""

    metric: str
    higher_is_better: bool
    values: NDArray[np.float64] | None
    """(N,) values on the documents whose mean the metric is; None for another metric, or a group of tasks."""


@dataclass(frozen=True)
class Done:
    """What one model did: its scores by task and metric, and the first metric of each task."""

    scores: dict[str, dict[str, TaskScore]]
    firsts: dict[str, First]


def check(tasks: config.Tasks | None, root: Path) -> None:
    """Check that the tasks can be done, by what is known without a model. Nothing is imported.

    Raises:
        UserError: if the harness is not installed, or the folder of the tasks does not exist.
    """
    if tasks is None:
        return
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            "judge.retention.tasks needs lm-evaluation-harness, which is not installed; install it with `pip "
            "install -e '.[eval]'`, or set judge.retention.tasks to null"
        )
    if tasks.folder is not None and not (root / tasks.folder).is_dir():
        raise UserError(
            f"judge.retention.tasks.folder: {tasks.folder} is not a folder; give one with YAML files of "
            "tasks, or null for tasks that lm-evaluation-harness has"
        )


class HarnessTasks:
    """The tasks of `judge.retention.tasks`, loaded once. Their files are below `root`.

    Raises:
        UserError: if the harness is not installed, or a task is unknown or cannot be loaded.
    """

    def __init__(self, settings: config.Tasks, root: Path) -> None:
        check(settings, root)
        self._settings = settings
        with contextlib.chdir(root):  # a task's file names its data from there
            self._loaded = _load(settings)
        for task in self._loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def do(self, model: Any, tokenizer: Any) -> Done:
        """Do all tasks with a causal language model, on the model's device.

        Raises:
            UserError: if a task has no number as its result.
        """
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM

        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=SEED)
        runner = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=self._settings.batch_size
        )
        os.environ["DISABLE_MULTIPROC"] = "1"  # or it forks this process, which has threads, to resample
        found = evaluate(
            runner,
            self._loaded,
            limit=self._settings.num_examples,
            bootstrap_iters=NUM_RESAMPLES,
            log_samples=True,
        )
        wanted = self._reported()
        scores = {_name(task): _scores(task, found) for task in wanted}
        return Done(scores, {_name(task): self._first(task, found) for task in wanted})

    def _reported(self) -> list[str]:
        """The groups that have a result of their own, and the tasks outside those."""
        groups = {name: one for name, one in self._loaded.get("groups", {}).items() if one.has_aggregation}
        named = {name: one for name, one in groups.items() if name in self._settings.names}
        inside = {task.task_name for one in named.values() for task in one.get_all_tasks()}
        return [*named, *(name for name in self._loaded["tasks"] if name not in inside)]

    def _first(self, name: str, found: Mapping[str, Any]) -> First:
        known = _metrics(found["results"][name])
        task = self._loaded["tasks"].get(name)
        listed = [] if task is None else [one["metric"] for one in task.get_config("metric_list") or []]
        key = next((key for metric in listed for key in known if key[0] == metric), next(iter(known)))
        better = found["higher_is_better"].get(name, {}).get(key[0])
        return First(
            _metric_name(*key), better is not False, None if task is None else _values(task, key, found)
        )


def changes(before: Done, after: Done) -> dict[str, TaskChange]:
    """How much worse `after` is than `before` on each task, by its first metric."""
    result = {}
    for name, first in before.firsts.items():
        old, new = (done.scores[name][first.metric] for done in (before, after))
        sign = 1 if first.higher_is_better else -1
        x, y, error = first.values, after.firsts[name].values, None
        if x is not None and y is not None and x.shape == y.shape and y.size > 1:  # on the same documents
            error = float((y - x).std(ddof=1) / math.sqrt(y.size))
        elif old.standard_error is not None and new.standard_error is not None:
            error = math.hypot(old.standard_error, new.standard_error)
        drop = sign * (old.value - new.value)
        result[name] = TaskChange(metric=first.metric, drop=drop, standard_error=error)
    return result


def _load(settings: config.Tasks) -> Any:
    """The tasks by name, as the harness's `evaluate` takes them."""
    from lm_eval.tasks import TaskManager

    folder = settings.folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(settings.names) <= set(manager.all_tasks):  # reading thousands of the harness's takes seconds
        manager = TaskManager(include_path=folder)
    unknown = sorted(set(settings.names) - set(manager.all_tasks))
    if unknown:
        where = (
            "lm-evaluation-harness has none"
            if folder is None
            else f"neither {folder} nor the harness has one"
        )
        raise UserError(
            f"judge.retention.tasks.names: {', '.join(unknown)} is not a task: {where} of that name; "
            "`lm-eval ls tasks` lists the harness's, and a YAML file's name is its `task`"
        )
    try:
        return manager.load(list(settings.names))
    except Exception as error:  # a task's file, its functions and its data can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"judge.retention.tasks: {', '.join(settings.names)} cannot be loaded ({reason}). Without a "
            "network a task must have local data: see docs/how-to/evaluation-tasks.md"
        ) from error


Key = tuple[str, str]
"""A metric and its filter."""


def _metrics(result: Mapping[str, Any]) -> list[Key]:
    """The metrics of one task's result, without their standard errors, in the harness's order."""
    keys = [tuple(name.split(",", 1)) for name in result if "," in name]
    return [(metric, filtered) for metric, filtered in keys if not metric.endswith("_stderr")]


def _scores(name: str, found: Mapping[str, Any]) -> dict[str, TaskScore]:
    result = found["results"][name]
    scores = {}
    for metric, filtered in _metrics(result):
        value, error = result[f"{metric},{filtered}"], result.get(f"{metric}_stderr,{filtered}")
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(
                f"judge.retention.tasks: the metric {metric} of {name} is {value!r}, not a finite number; "
                "remove the task, or the metric from its metric_list"
            )
        has_error = isinstance(error, Real) and math.isfinite(error)
        scores[_metric_name(metric, filtered)] = TaskScore(
            value=float(value),
            standard_error=float(error) if has_error else None,
            examples=int(result.get("sample_len", 0)),
        )
    if not scores:
        raise UserError(f"judge.retention.tasks: {name} has no metric; a task needs a metric_list")
    return scores


def _values(task: Any, key: Key, found: Mapping[str, Any]) -> NDArray[np.float64] | None:
    """The metric's value on each document, by document; None where the metric is not their mean."""
    import numpy as np
    from lm_eval.api.metrics import mean

    metric, filtered = key
    if task.aggregation().get(metric) is not mean:
        return None
    samples = [one for one in found["samples"][task.task_name] if one["filter"] == filtered and metric in one]
    values: Sequence[float] = [one[metric] for one in sorted(samples, key=lambda one: one["doc_id"])]
    return np.asarray(values, dtype=np.float64)


def _metric_name(metric: str, filtered: str) -> str:
    """A metric's name in our metrics, such as `acc`, or `exact_match_strict_match` after a filter."""
    words = metric if filtered == NO_FILTER else f"{metric}_{filtered}"
    return re.sub(r"\W", "_", words)


def _name(task: str) -> str:
    """A task's name in our metrics."""
    return re.sub(r"[^\w.-]", "_", task)

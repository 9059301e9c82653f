"""Tasks of lm-evaluation-harness, an extra of this package, done by checkpoints. The harness runs the models.

A task's results are those of `lm_eval.simple_evaluate`: the task's own metrics, with the standard errors that
the harness estimates. Its seeds are fixed, the same for every model.

Source of the paired standard error: Miller 2024 (arXiv 2411.00640).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping
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

NUM_RESAMPLES = 1000  # for standard errors without a closed form


@dataclass(frozen=True)
class TaskResult:
    """What one model did of a task."""

    scores: dict[str, TaskScore]
    """By metric."""
    metric: str
    """The first one that the task lists, by which a model's drop is measured."""
    higher_is_better: bool
    values: NDArray[np.float64] | None
    """(N,) values on the documents whose mean the metric is; None for another metric, or a group of tasks."""


def check(tasks: config.Tasks | None, root: Path) -> None:
    """Check that the tasks can be done, by what is known without a model. Nothing is imported.

    Raises:
        UserError: if the harness is not installed, or the folder of the tasks does not exist.
    """
    if tasks is None:
        return
    if importlib.util.find_spec("lm_eval") is None:
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
            self._manager, loaded = _load(settings)
        named = {name: group for name, group in loaded["groups"].items() if name in settings.names}
        groups = {name: group for name, group in named.items() if group.has_aggregation}
        inside = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
        alone = {name: task for name, task in loaded["tasks"].items() if name not in inside}
        self._tasks: dict[str, Any] = groups | alone
        """The groups that have a result of their own, and the tasks outside those."""

    def measure(self, model: Any, tokenizer: Any) -> dict[str, TaskResult]:
        """Do all tasks with a causal language model, on the model's device.

        Raises:
            UserError: if a task has no number as its result.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        os.environ["DISABLE_MULTIPROC"] = "1"  # or it forks this process, which has threads, to resample
        results = simple_evaluate(
            HFLM(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=self._settings.batch_size
            ),
            tasks=list(self._tasks.values()),
            task_manager=self._manager,
            limit=self._settings.num_examples,
            bootstrap_iters=NUM_RESAMPLES,
        )
        return {
            re.sub(r"[^\w.-]", "_", name): _read_result(name, task, results)
            for name, task in self._tasks.items()
        }


def compare_results(
    before: Mapping[str, TaskResult], after: Mapping[str, TaskResult]
) -> dict[str, TaskChange]:
    """How much worse `after` is than `before` on each task, by its first metric."""
    result = {}
    for name, first in before.items():
        old, new = (one[name].scores[first.metric] for one in (before, after))
        sign = 1 if first.higher_is_better else -1
        x, y, error = first.values, after[name].values, None
        if x is not None and y is not None and x.shape == y.shape and y.size > 1:  # on the same documents
            error = float((y - x).std(ddof=1) / math.sqrt(y.size))
        elif old.standard_error is not None and new.standard_error is not None:
            error = math.hypot(old.standard_error, new.standard_error)
        drop = sign * (old.value - new.value)
        result[name] = TaskChange(metric=first.metric, drop=drop, standard_error=error)
    return result


def _load(settings: config.Tasks) -> tuple[Any, Any]:
    """The harness's manager of tasks, and the named tasks and groups."""
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
        return manager, manager.load(list(settings.names))
    except Exception as error:  # a task's file, its functions and its data can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"judge.retention.tasks: {', '.join(settings.names)} cannot be loaded ({reason}). Without a "
            "network a task must have local data: see docs/how-to/evaluation-tasks.md"
        ) from error


def _read_result(name: str, task: Any, results: Mapping[str, Any]) -> TaskResult:
    """The results of one task or group, whose keys are `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
    import numpy as np
    from lm_eval.api.metrics import mean

    result, scores = results["results"][name], dict[tuple[str, str], TaskScore]()
    for key, value in result.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(
                f"judge.retention.tasks: the metric {metric} of {name} is {value!r}, not a finite number; "
                "remove the task, or the metric from its metric_list"
            )
        error = result.get(f"{metric}_stderr,{filtered}")
        has_error = isinstance(error, Real) and math.isfinite(error)
        scores[metric, filtered] = TaskScore(
            value=float(value),
            standard_error=float(error) if has_error else None,
            examples=int(result.get("sample_len", 0)),
        )
    if not scores:
        raise UserError(f"judge.retention.tasks: {name} has no metric; a task needs a metric_list")
    samples = results["samples"].get(name)  # None of a group
    listed = [one["metric"] for one in task.get_config("metric_list") or []] if samples else []
    first = next((key for metric in listed for key in scores if key[0] == metric), next(iter(scores)))
    values = None
    if samples and task.aggregation().get(first[0]) is mean:
        used = [one for one in samples if one["filter"] == first[1] and first[0] in one]
        values = np.array([one[first[0]] for one in sorted(used, key=lambda one: one["doc_id"])], np.float64)
    return TaskResult(
        {_metric_name(*key): score for key, score in scores.items()},
        _metric_name(*first),
        results["higher_is_better"].get(name, {}).get(first[0]) is not False,
        values,
    )


def _metric_name(metric: str, filtered: str) -> str:
    """A metric's name in our metrics, such as `acc`, or `exact_match_strict_match` after a filter."""
    return re.sub(r"\W", "_", metric if filtered == "none" else f"{metric}_{filtered}")

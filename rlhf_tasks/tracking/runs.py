"""Runs read from MLflow: a pipeline's run with its stages, or one stage's run. Imports MLflow; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking import context, curves, view
from rlhf_tasks.tracking.store import EXPERIMENT, NO_ANSWER, open_store

NAMED_BY = ("attributes.run_id", "tags.`rlhf.run`", "tags.`rlhf.pipeline`", "attributes.run_name")


@dataclass(frozen=True)
class StoredRun:
    """What MLflow has of a run, by stage."""

    run: str  # MLflow's id
    experiment: str | None  # the DVC experiment that was saved after it (tag `dvc.exp`)
    parameters: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float]]  # the last value of each metric
    curves: Mapping[str, Sequence[Mapping[str, float]]]
    """A dict per point, the x axis first, of the metrics in `drawn`."""


def find(uri: str | None, home: Path, name: str, drawn: Sequence[str]) -> StoredRun | None:
    """The run of this id, key (`rlhf.run`, `rlhf.pipeline`) or name; the newest of several of one name.

    `drawn` are the endings of the names of metrics whose whole history is read.

    Raises UserError if MLflow does not answer.
    """
    if "'" in name or (uri is None and not (home / "mlflow.db").exists()):
        return None
    context.bound_requests()
    try:
        client = open_store(uri, home)
        run = _search(client, name)
        if run is None:
            return None
        inside = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run.info.run_id}'"
        children = client.search_runs(
            [run.info.experiment_id], inside, order_by=["attributes.start_time ASC"], max_results=1000
        )
        parts = {
            part.data.tags["dvc.stage"]: part for part in [run, *children] if "dvc.stage" in part.data.tags
        }
        parameters = dict(run.data.params)
        for part in parts.values():
            parameters |= part.data.params
        return StoredRun(
            run.info.run_id,
            run.data.tags.get(EXPERIMENT),
            parameters,
            {stage: _final(part.data.metrics) for stage, part in parts.items()},
            {stage: _history(client, stage, part, drawn) for stage, part in parts.items()},
        )
    except NO_ANSWER as error:
        reason = " ".join(str(error).split())[:200]
        where = uri or home / "mlflow.db"
        raise UserError(f"run {name} cannot be read from MLflow at {where}: {reason}") from None


def pages(
    uri: str | None, home: Path, experiment: str, server: str, named: Mapping[str, tuple[str, str]]
) -> dict[str, str]:
    """`{name: address}` of the pages of the runs with these tags; empty if MLflow does not answer."""
    found = dict[str, str]()
    try:
        client = open_store(uri, home)
        known = client.get_experiment_by_name(experiment)
        if known is None:
            return {}
        for name, (tag, value) in named.items():
            condition = f"tags.`{tag}` = '{value}'"
            for run in client.search_runs([known.experiment_id], condition, max_results=1):
                tab = "/model-metrics" if "dvc.stage" in run.data.tags else ""
                found[name] = view.run_page(server, known.experiment_id, run.info.run_id, tab)
    except NO_ANSWER:
        return {}
    return found


def _search(client: MlflowClient, name: str) -> Run | None:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for attribute in NAMED_BY:
        runs = client.search_runs(experiments, f"{attribute} = '{name}'", max_results=1)
        if runs:
            return runs[0]
    return None


def _final(metrics: Mapping[str, float]) -> dict[str, float]:
    """A stage's result is `final/NAME` if the curve NAME ended at another value."""
    ends = {name: value for name, value in metrics.items() if name.startswith("final/")}
    others = {name: value for name, value in metrics.items() if name not in ends}
    return others | {name.removeprefix("final/"): value for name, value in ends.items()}


def _history(client: MlflowClient, stage: str, run: Run, drawn: Sequence[str]) -> list[dict[str, float]]:
    axis = curves.axis(stage)  # type: ignore[arg-type]  # a stage that a later version knows has steps
    rows: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        if name.endswith(tuple(drawn)) and not name.startswith("final/"):
            for point in client.get_metric_history(run.info.run_id, name):
                if math.isfinite(point.value):
                    rows.setdefault(point.step, {axis: point.step})[name] = point.value
    return [rows[step] for step in sorted(rows)]

"""Runs read back from MLflow: a pipeline's with its stages', or one stage's. Imports MLflow; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from sqlalchemy.exc import SQLAlchemyError

from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking import context, curves
from rlhf_tasks.tracking.store import embedded_uri

NAMED_BY = ("tags.`rlhf.run`", "tags.`rlhf.pipeline`", "attributes.run_name")
IDENTITY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Record:
    """What MLflow has of a run, by stage."""

    run: str
    """MLflow's id."""
    experiment: str | None
    """The DVC experiment that came of it (tag `dvc.exp`)."""
    parameters: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float]]
    """The last value of each."""
    curves: Mapping[str, Sequence[Mapping[str, float]]]
    """A dict per point, its x axis first; of the metrics that were asked for."""


def find(uri: str | None, home: Path, asked: str, drawn: Sequence[str]) -> Record | None:
    """The run of this id, key (`rlhf.run`, `rlhf.pipeline`) or name; the newest of several of one name.

    `drawn` are the ends of the names of metrics whose whole history is wanted.

    Raises:
        UserError: if MLflow cannot be asked.
    """
    if "'" in asked or (uri is None and not (home / "mlflow.db").exists()):
        return None
    with _asking(uri, home, asked) as client:
        run = _found(client, asked)
        return None if run is None else _record(client, run, drawn)


def tags(uri: str | None, home: Path, run: str) -> dict[str, str]:
    """Those of the run of this id; empty if there is no such run.

    Raises:
        UserError: if MLflow cannot be asked.
    """
    if uri is None and not (home / "mlflow.db").exists():
        return {}
    with _asking(uri, home, run) as client:
        found = _of_identity(client, run)
        return {} if found is None else dict(found.data.tags)


@contextmanager
def _asking(uri: str | None, home: Path, asked: str) -> Iterator[MlflowClient]:
    """Raises UserError if MLflow does not answer what is asked while this lasts."""
    context.bound_requests()
    try:
        yield MlflowClient(uri or embedded_uri(home))
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        where = uri or home / "mlflow.db"
        raise UserError(f"MLflow at {where} cannot be asked for {asked}: {reason}") from None


def _found(client: MlflowClient, asked: str) -> Run | None:
    places = [experiment.experiment_id for experiment in client.search_experiments()]
    if IDENTITY.fullmatch(asked):
        return _of_identity(client, asked)
    for attribute in NAMED_BY:
        runs = client.search_runs(places, f"{attribute} = '{asked}'", max_results=1)
        if runs:
            return runs[0]
    return None


def _of_identity(client: MlflowClient, run: str) -> Run | None:
    try:
        return client.get_run(run)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _record(client: MlflowClient, run: Run, drawn: Sequence[str]) -> Record:
    inside = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run.info.run_id}'"
    children = client.search_runs(
        [run.info.experiment_id], inside, order_by=["attributes.start_time ASC"], max_results=1000
    )
    parts = {part.data.tags["dvc.stage"]: part for part in [run, *children] if "dvc.stage" in part.data.tags}
    parameters = dict(run.data.params)
    for part in parts.values():
        parameters |= part.data.params
    return Record(
        run.info.run_id,
        run.data.tags.get("dvc.exp"),
        parameters,
        {stage: _final(part.data.metrics) for stage, part in parts.items()},
        {stage: _history(client, stage, part, drawn) for stage, part in parts.items()},
    )


def _final(metrics: Mapping[str, float]) -> dict[str, float]:
    """A stage's result stands under `final/NAME` where the curve NAME ended elsewhere."""
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

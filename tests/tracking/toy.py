"""Runs to be tracked, what MLflow has of them, and a server over the store."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.config import Stage, StageView
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import dashboard
from rlhf_tasks.tracking import record as records
from rlhf_tasks.tracking.local_pages import MLFLOW_APP
from rlhf_tasks.tracking.record import Record
from rlhf_tasks.tracking.store import Delivery, embedded_uri
from rlhf_tasks.tracking.sync import attempt
from tests.flows.toy import until

UNREACHABLE = "http://127.0.0.1:9"  # the discard port: connections are refused at once


def view(stage: Stage = "sft", **settings: Any) -> StageView:
    """The stage's view of the project's parameters, with these settings of `tracking`."""
    values = config.load()
    section = values.tracking.model_copy(update=settings)
    return config.VIEWS[stage].of(values.model_copy(update={"tracking": section}))


def log(key: str, losses: Sequence[tuple[int, float]] = (), stage: Stage = "sft", **settings: Any) -> None:
    """A stage's run with these points of `train/loss`."""
    with tracking.open_run(Paths(), stage, view(stage, **settings), key=key) as tracker:
        for step, loss in losses:
            tracker.metrics({"train/loss": loss}, step=step)


def record(home: Path, key: str) -> Record:
    return Record(home, key)


def pending(home: Path) -> set[str]:
    """The keys of the runs that MLflow does not have completely."""
    return {record.key for record in records.pending(home)}


def step(home: Path) -> None:
    """Deliver what there is of each run, also of live ones, as their threads do."""
    for one in records.pending(home):
        attempt(Delivery(one))


def killed(home: Path, key: str) -> None:
    """Make a run's record that of a killed process: it has no end, and the process has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = record(home, key).file
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    kept = [event for event in events if event["kind"] != "end" and event.get("folder") != "plots"]
    latest = [event for event in kept if event["kind"] == "run"][-1]
    latest["process"] = f"{platform.node()}:{ended.pid}:1"
    file.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")


def runs(home: Path, uri: str | None = None) -> dict[str, Any]:
    """The runs of the store by stage, or `pipeline`: the latest of each. Empty before the first delivery."""
    client = MlflowClient(uri or embedded_uri(home))
    experiment = client.get_experiment_by_name("rlhf")
    rows = client.search_runs([experiment.experiment_id]) if experiment is not None else []
    return {run.data.tags.get("dvc.stage", "pipeline"): run for run in reversed(rows)}


def status(home: Path, *names: str) -> list[str]:
    return [runs(home)[name].info.status for name in names]


def reason(home: Path, name: str) -> str | None:
    """Why MLflow shows the run as failed or killed."""
    text: str | None = runs(home)[name].data.tags.get("rlhf.reason")
    return text


def points(
    home: Path, stage: str = "sft", name: str = "train/loss", uri: str | None = None
) -> list[tuple[int, float]]:
    """What MLflow has of a curve; empty before the run is there."""
    run = runs(home, uri).get(stage)
    history = MlflowClient(uri or embedded_uri(home)).get_metric_history(run.info.run_id, name) if run else []
    return sorted((point.step, point.value) for point in history)


def artifact(home: Path, stage: str, path: str) -> Path:
    return Path(MlflowClient(embedded_uri(home)).download_artifacts(runs(home)[stage].info.run_id, path))


def table(home: Path, stage: str, name: str) -> Any:
    return json.loads(artifact(home, stage, f"tables/{name}.json").read_text(encoding="utf-8"))


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def served(home: Path, port: int, *, plain: bool = False) -> Iterator[None]:
    """A server over the store in `home`, killed in the end; `plain`: as MLflow is without our plugin."""
    command = dashboard.server_command(home, port)
    command = [word for word in command if not plain or word not in ("--app-name", MLFLOW_APP)]
    environment = dashboard.server_environment(home, os.environ)
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}"), "MLflow")
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)

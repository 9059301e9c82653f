"""Runs to be tracked, what MLflow has of them, and a server over the store."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from mlflow.tracking import MlflowClient

from rlhf_tasks import config
from rlhf_tasks.config import Stage, StageView
from rlhf_tasks.tracking import courier, dashboard
from rlhf_tasks.tracking.spool import pending
from rlhf_tasks.tracking.store import embedded_uri
from tests.flows.toy import until


def view(stage: Stage = "sft", **tracked: Any) -> StageView:
    settings = config.load()
    section = settings.tracking.model_copy(update=tracked)
    return config.VIEWS[stage].of(settings.model_copy(update={"tracking": section}))


def deliver(home: Path) -> None:
    for spool in pending(home / "spool"):
        assert courier.deliver(spool) is None


def runs(home: Path, uri: str | None = None) -> dict[str, Any]:
    """The runs of the store by name, the latest of each name."""
    client = MlflowClient(uri or embedded_uri(home))
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    return {run.info.run_name.split("-")[0]: run for run in reversed(found)}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def served(home: Path, port: int) -> Iterator[None]:
    """A server over the store in `home`, killed in the end."""
    command = dashboard.server_command(home, port)
    environment = dashboard.server_environment(os.environ)
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}"), "MLflow")
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)

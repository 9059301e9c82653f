"""The MLflow dashboard over the embedded store, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import HOST, free_port
from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.uploader import sync

MODEL_TRAINING = "workflowType=machine_learning"  # selects one of the two layouts of MLflow's pages
UNNAMED = "0"  # MLflow's default experiment, for runs that name none


def serve(home: Path, port: int) -> int:
    """Deliver pending runs, then serve until Ctrl-C, on `port` or the next free one.

    Raises:
        UserError: without a store, or without a free port.
    """
    sync(home)
    database = home / "mlflow.db"
    if not database.exists():
        raise UserError(f"there is no MLflow store yet ({database}); run `make run` first")
    free = free_port(port)
    console.say(f"MLflow: http://{HOST}:{free} (Ctrl-C ends it)")
    for name, page in runs_pages(home, f"http://{HOST}:{free}").items():
        console.say(f"runs of {name}: {page}")
    environment = server_environment(os.environ)
    return subprocess.run(server_command(home, free), env=environment, check=False).returncode


def runs_pages(home: Path, address: str) -> dict[str, str]:
    """The page with the runs of each experiment: the dashboard's first page shows prompts and traces."""
    from mlflow.tracking import MlflowClient

    from rlhf_tasks.tracking.store import embedded_uri

    experiments = MlflowClient(embedded_uri(home)).search_experiments()
    return {
        one.name: f"{address}/#/experiments/{one.experiment_id}/runs?{MODEL_TRAINING}"
        for one in experiments
        if one.experiment_id != UNNAMED
    }


def server_command(home: Path, port: int) -> list[str]:
    """The command that serves the embedded store and its artifacts on loopback."""
    words = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    return [sys.executable, *words, *store, "--default-artifact-root", str(home / "mlartifacts")]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """No telemetry, and no job runners: nothing here gives jobs to MLflow."""
    return {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **context.uploader_environment(environment)}

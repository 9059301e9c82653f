"""MLflow's server over the embedded store, on loopback, and the addresses of its pages of runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import HOST, free_port
from rlhf_tasks.tracking import local_pages, view
from rlhf_tasks.tracking.sync import sync

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
    for name, page in runs_pages(home, f"http://{HOST}:{free}").items():
        console.say(f"MLflow, runs of {name}: {page}")
    console.say("Ctrl-C ends the server")
    environment = server_environment(home, os.environ)
    # the server looks for modules in its working folder, which must not be the project's
    with subprocess.Popen(server_command(home, free), env=environment, cwd=home) as server:
        try:
            return server.wait()
        except BaseException:
            server.terminate()  # if it were killed, as `subprocess.run` does, its workers would live on
            server.wait()
            raise


def server_command(home: Path, port: int) -> list[str]:
    """The command that serves the store of `server_environment` and its artifacts on loopback."""
    words = ["-P", "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    pages = ["--app-name", local_pages.MLFLOW_APP]
    return [sys.executable, *words, *pages, "--default-artifact-root", str(home / "mlartifacts")]


def server_environment(home: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The embedded store; no telemetry, and no job runners: nothing here gives jobs to MLflow."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    own = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{home / 'mlflow.db'}", "OMP_NUM_THREADS": "1"}
    return {**quiet, **environment, **own}


def runs_pages(home: Path, address: str, experiment: str | None = None) -> dict[str, str]:
    """The page with the runs of each experiment; `experiment` is created if there is none of that name."""
    from rlhf_tasks.tracking.store import open_experiment, open_store

    client, pages = open_store(None, home), dict[str, str]()
    names = [one.name for one in client.search_experiments() if one.experiment_id != UNNAMED]
    for name in dict.fromkeys([*names, *([experiment] if experiment else [])]):
        identity = open_experiment(client, name, (home / "mlartifacts").as_uri())
        pages[name] = view.page(address, identity)
    return pages

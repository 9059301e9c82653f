"""What cleans up after a run whose own process could not. Idempotent; no torch here."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State

from rlhf_tasks.project import processes, workspaces
from rlhf_tasks.tracking.context import STAGE_RUN

GRACE_SECONDS = 10.0


def workspace_name(flow_run: str) -> str:
    """The name of a flow run's worktree. A retry of the run first removes what is left of it.

    It has the end of the id, since the ids of runs that were scheduled together begin alike.
    """
    return f"run-{flow_run[-12:]}"


def clean(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the stages that the run left running, and remove its workspace.

    Prefect prescribes the names of the arguments. MLflow needs nothing here: delivery closes the run.
    """
    clean_run(str(flow_run.id))


def clean_run(flow_run: str) -> None:
    """The same by the id of the run, in the project's folder."""
    processes.end(STAGE_RUN, flow_run, signal.SIGINT, GRACE_SECONDS)
    if (Path.cwd() / "dvc.yaml").exists():  # not so where a worker only makes jobs for other machines
        workspaces.remove(Path.cwd(), workspace_name(flow_run))

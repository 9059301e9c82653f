"""What is done when a run has ended without its own process being able to. Idempotent; no torch here."""

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
    """Of a flow run's worktree: a retry of the run begins by removing what was left of it.

    By the end of the id: those of runs that were scheduled together begin alike.
    """
    return f"run-{flow_run[-12:]}"


def clean(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End what the run's stages left running, and remove its workspace.

    Prefect wants these names of the arguments. The uploader closes the run in MLflow by itself.
    """
    clean_run(str(flow_run.id))


def clean_run(flow_run: str) -> None:
    """The same for whoever knows only its id; in the project's folder."""
    processes.end_carriers(STAGE_RUN, flow_run, signal.SIGINT, GRACE_SECONDS)
    if (Path.cwd() / "dvc.yaml").exists():  # not where a worker only makes jobs for other machines
        workspaces.remove(Path.cwd(), workspace_name(flow_run))

"""What cleans up after a run whose own process could not. Idempotent; no torch here.

A hook of Prefect gets its arguments by their names: flow, flow_run and state.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Crashed

from flows.slots import LABEL
from rlhf_tasks.project import processes, workspaces
from rlhf_tasks.tracking.context import STAGE_RUN

GRACE_SECONDS = 10.0
ENDED = "it ended with its run"


def workspace_name(flow_run: str) -> str:
    """The name of a flow run's worktree. A retry of the run first removes what is left of it.

    It has the end of the id, since the ids of runs that were scheduled together begin alike.
    """
    return f"run-{flow_run[-12:]}"


def clean(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Clean up after a cancelled or crashed run. MLflow needs nothing: delivery closes the run."""
    cancelled = state.is_cancelling() or state.is_cancelled()
    clean_run(flow_run.id, Cancelled(message=ENDED) if cancelled else Crashed(message=ENDED))


def clean_run(flow_run: UUID, end: State[Any]) -> None:
    """End the stages that the run left running, free its slots, end its tasks, and remove its workspace.

    Tasks that have no end, and those that a cancellation made crash, get this end.
    """
    processes.end(STAGE_RUN, str(flow_run), signal.SIGINT, GRACE_SECONDS)
    with get_client(sync_client=True) as client:
        for lease in str(client.read_flow_run(flow_run).labels.get(LABEL, "")).split():
            client.release_concurrency_slots_with_lease(UUID(lease))  # only now: nothing uses a GPU any more
        ids = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        for task in client.read_task_runs(flow_run_filter=ids):
            state = task.state
            if state is None or not state.is_final() or (state.is_crashed() and end.is_cancelled()):
                client.set_task_run_state(task.id, end.fresh_copy(), force=True)
    if (Path.cwd() / "dvc.yaml").exists():  # not so where a worker only makes jobs for other machines
        workspaces.remove(Path.cwd(), workspace_name(str(flow_run)))

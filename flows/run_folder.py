"""A run's working folder and its cleanup. No torch here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from filelock import FileLock, Timeout
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Crashed

from flows import settings
from flows.slots import LABEL
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git, processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.workspaces import Workspace
from rlhf_tasks.tracking import pipeline as tracking
from rlhf_tasks.tracking.context import EXPERIMENT_NAME, STAGE_RUN

PREFECT_ENGINE = ("PREFECT__", "PYTHONSAFEPATH")  # begin variables of Prefect's programs, not of stages
GRACE_SECONDS = 10.0
ENDED = "it ended with its run"


@contextmanager
def open_folder(
    root: Path, run: str, commit: str | None, text: str, values: Config
) -> Iterator[Workspace | None]:
    """A workspace of the commit, which is removed in the end; None for the checkout, which is then locked.

    `text` is the params.yaml of the run.

    Raises UserError if another flow run works in the checkout.
    """
    if commit is not None:
        workspace = workspaces.create(root, name_workspace(run), text, values, commit)
        try:
            yield workspace
        finally:
            workspace.remove()
        return
    try:
        lock = FileLock(Paths(root).home / "checkout.lock").acquire(timeout=0)
    except Timeout:
        raise UserError(
            "another flow run works in the checkout; wait for it, or set `where` to workspace"
        ) from None
    with lock:
        yield None


def stage_environment(workspace: Workspace | None, run: str, name: str) -> dict[str, str]:
    """The environment of the stages: `rlhf` on the path, the flow run as their parent in MLflow, its name."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFECT_ENGINE)}
    return {
        **settings.QUIET,
        **own,
        "PATH": processes.environment_path(os.environ),
        "PYTHONUNBUFFERED": "1",
        "RLHF_PARENT_RUN": tracking.key(run),
        "PREFECT__FLOW_RUN_ID": run,
        STAGE_RUN: run,
        EXPERIMENT_NAME: name,
        **(workspace.environment() if workspace else {}),
    }


def save_experiment(workspace: Workspace | None, name: str, given: bool, run: str) -> tuple[str, str | None]:
    """The name and the commit of the run's experiment.

    They are those of an earlier experiment if the result is the same and the user gave no name. If another
    result of the same commit has the name, a short id of the run is added. No commit if the result equals
    the parent commit, nor for a run in the checkout.
    """
    if workspace is None:
        return name, None
    if not given and workspace.like is not None and workspace.is_like():
        return workspace.like[1], workspace.like[0]
    if not given and not git.list_changes(workspace.folder):
        return name, None
    return workspace.save(name, instead=f"{name}-{run[-4:]}")


def name_workspace(flow_run: str) -> str:
    """The name of a flow run's worktree. A retry of the run first removes what is left of it.

    It has the end of the id, since the ids of runs that were scheduled together begin alike.
    """
    return f"run-{flow_run[-12:]}"


def clean(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook: clean up after a cancelled or crashed run."""
    cancelled = state.is_cancelling() or state.is_cancelled()
    clean_run(flow_run.id, Cancelled(message=ENDED) if cancelled else Crashed(message=ENDED))


def clean_run(flow_run: UUID, end: State[Any]) -> None:
    """End the stages that the run left running, free its slots, end its tasks, and remove its workspace.

    MLflow gets what a killed run could not deliver, and its end. Tasks that have no end, and those that a
    cancellation made crash, get this end.
    """
    processes.end(STAGE_RUN, str(flow_run), signal.SIGINT, GRACE_SECONDS)
    with get_client(sync_client=True) as client:
        for lease in str(client.read_flow_run(flow_run).labels.get(LABEL, "")).split():
            client.release_concurrency_slots_with_lease(UUID(lease))  # only now: nothing uses a GPU any more
        ids = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        for task in client.read_task_runs(flow_run_filter=ids):
            state = task.state
            is_other = state and state.type != end.type and (state.is_crashed() or state.is_cancelled())
            if state is None or not state.is_final() or is_other:
                client.set_task_run_state(task.id, end.fresh_copy(), force=True)
    if (Path.cwd() / "dvc.yaml").exists():  # not so where a worker only makes jobs for other machines
        workspaces.remove(Path.cwd(), name_workspace(str(flow_run)))
        tracking.close_killed(Paths(Path.cwd()).home, str(flow_run))

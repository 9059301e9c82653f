"""Where a run works: a workspace of its own, or the checkout. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from flows import hooks, settings
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.workspaces import Workspace
from rlhf_tasks.tracking import pipeline as tracking
from rlhf_tasks.tracking.context import EXPERIMENT_NAME, STAGE_RUN

PREFECT_ENGINE = "PREFECT__"  # begins the variables that Prefect sets for its engine, not for stages


@contextmanager
def opened(root: Path, run: str, commit: str | None, text: str, values: Config) -> Iterator[Workspace | None]:
    """A workspace of the commit, which is removed in the end; None for the checkout, which is then locked.

    `text` is the params.yaml of the run.

    Raises:
        UserError: if another flow run works in the checkout.
    """
    if commit is not None:
        workspace = workspaces.create(root, hooks.workspace_name(run), text, values, commit)
        try:
            yield workspace
        finally:
            workspace.remove()
        return
    lock = FileLock(Paths(root).home / "checkout.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            "another flow run works in the checkout; wait for it, or set `where` to workspace"
        ) from None
    try:
        yield None
    finally:
        lock.release()


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


def saved_experiment(workspace: Workspace | None, name: str, given: bool) -> tuple[str, str | None]:
    """The name and the commit of the run's experiment.

    They are those of an earlier experiment if the result is the same and the user gave no name. There is no
    commit if nothing differs from the commit below, nor for a run in the checkout.
    """
    if workspace is None:
        return name, None
    if not given and workspace.like is not None and workspace.is_like():
        return workspace.like[1], workspace.like[0]
    dvc = partial(dvc_cli.run, workspace.folder)
    return name, workspace.save(name, dvc) if given or workspace.differs() else None

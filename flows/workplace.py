"""Where a run works: a workspace of its own, or the checkout. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from prefect import get_run_logger

from flows import hooks, settings
from flows.dvc_client import Dvc
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.workspaces import Workspace
from rlhf_tasks.tracking import pipeline as tracking
from rlhf_tasks.tracking.context import EXPERIMENT_NAME, STAGE_RUN

PREFECT_ENGINE = "PREFECT__"  # begins the variables that Prefect sets for its engine, not for stages

Place = Workspace | Path


@contextmanager
def opened(
    root: Path, run: str, commit: str | None, text: str, values: Config, unseen: Sequence[str]
) -> Iterator[Place]:
    """A workspace of the commit, which is removed in the end, or the locked checkout.

    `text` is the params.yaml of the run, and `unseen` are the uncommitted files that it does not see.

    Raises:
        UserError: if another flow run works in the checkout.
    """
    if commit is None:
        with _checkout(root):
            yield root
        return
    logger = get_run_logger()
    data = f", with the data at {values.data.path} as it is now" if values.data.source == "files" else ""
    logger.info("the run works on commit %s%s", commit, data)
    if unseen:
        logger.warning("the run does not see the uncommitted changes of %s", ", ".join(unseen))
    workspace = workspaces.create(root, hooks.workspace_name(run), text, values, commit)
    try:
        yield workspace
    finally:
        workspace.remove()


@contextmanager
def _checkout(root: Path) -> Iterator[None]:
    lock = FileLock(Paths(root).home / "checkout.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            "another flow run works in the checkout; wait for it, or set `where` to workspace"
        ) from None
    try:
        yield
    finally:
        lock.release()


def folder_of(place: Place) -> Path:
    return place.folder if isinstance(place, Workspace) else place


def stage_environment(place: Place, run: str, name: str) -> dict[str, str]:
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
        **(place.environment() if isinstance(place, Workspace) else {}),
    }


def saved_experiment(place: Place, name: str, given: bool, dvc: Dvc) -> tuple[str, str | None]:
    """The name and the commit of the run's experiment.

    They are those of an earlier experiment if the result is the same and the user gave no name. There is no
    commit if nothing differs from the commit below, nor for a run in the checkout.
    """
    if not isinstance(place, Workspace):
        return name, None
    if not given and place.like is not None and place.is_like():
        return place.like[1], place.like[0]
    return name, place.save(name, dvc.run) if given or place.differs() else None

"""One stage's right to its state: nobody trains the very same thing at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_tasks import console
from rlhf_tasks.config import StageView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import launch
from rlhf_tasks.training.resume.state import differences, read_manifest, state_folder

WORKER_WAIT_SECONDS = 10.0  # for the lock: the other processes of the stage wait meanwhile


@dataclass(frozen=True)
class Claim:
    """One stage's right to its state while it lasts; `key` names the run, the former one if that goes on."""

    key: str
    folder: Path | None

    def clear(self) -> None:
        """The stage's outs are whole: the state is of no more use."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def claim(paths: Paths, view: StageView, *, main: bool) -> Iterator[Claim]:
    """Hold the stage's state, so that nobody trains the very same thing at the same time; waits for it.

    For the first process of a training stage; for others, and other stages, nothing is held.

    Raises:
        UserError: in a launched worker, whose fellows cannot wait for long.
    """
    holds = main and view.stage in launch.TRAINING
    identity = lineage.identity(paths, view.stage, view.declared) if holds else None
    if identity is None:
        yield Claim(lineage.new_key(view.stage), None)
        return
    folder = state_folder(paths, view.stage, identity)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), view.stage):
        folder.mkdir(exist_ok=True)  # whoever was waited for has cleared it
        run = folder / "run"
        if not (run.exists() and any(folder.glob("*/step-*"))):
            _tell_others(folder, identity, view.stage)
            atomic.write_text(run, lineage.new_key(view.stage))
        yield Claim(run.read_text(encoding="utf-8"), folder)


@contextmanager
def _locked(path: Path, stage: str) -> Iterator[None]:
    lock = FileLock(path)
    if not _acquired(lock):
        console.say(f"{stage}: another process is training the very same thing; waiting for it to end")
        try:
            lock.acquire(timeout=WORKER_WAIT_SECONDS if launch.is_worker() else -1, poll_interval=0.5)
        except Timeout:
            raise UserError(
                f"another process is training the very same {stage} (it holds {path}); run this one when it "
                "has ended, or stop it"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _tell_others(folder: Path, identity: Mapping[str, Any], stage: str) -> None:
    """Unfinished runs of other parameters or inputs are not gone on with: say what differs."""
    for other in sorted(folder.parent.iterdir()):
        lock = FileLock(other.with_suffix(".lock"))
        if other == folder or not other.is_dir() or not _acquired(lock):
            continue  # not another's, or another's that is running
        manifest = next(filter(None, map(read_manifest, other.glob("*/step-*"))), None)
        lock.release()
        if manifest is not None:
            console.say(
                f"{stage} begins anew: the state of an unfinished run differs in "
                f"{differences(manifest['identity'], identity)} (it is kept; if it is of no use, remove "
                f"{other})"
            )

"""Locks the snapshots of a stage, so that two processes never train the same thing at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_tasks import config, console
from rlhf_tasks.config import StageView
from rlhf_tasks.config.stage_views import PRECISION
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import launch
from rlhf_tasks.training.resume.manifests import differences, read_manifest, state_folder, states

FINISHED = "finished"
WORKER_WAIT_SECONDS = 10.0  # for the lock, since the other processes of the stage wait too


@dataclass(frozen=True)
class Claim:
    """The locked snapshots of a stage; `key` names the run, which is the earlier one if it is resumed."""

    key: str
    folder: Path | None

    def finish(self) -> None:
        """Let the next stage that starts remove the snapshots: only then has DVC stored the complete outs."""
        if self.folder is not None:
            (self.folder / FINISHED).touch()


@contextmanager
def claim(
    paths: Paths, view: StageView, *, main: bool, worker_wait_seconds: float = WORKER_WAIT_SECONDS
) -> Iterator[Claim]:
    """Lock the stage's snapshots within the block; waits for another process that holds them.

    Only the first process of a training stage locks them.

    Raises:
        UserError: in a launched worker, because the other workers cannot wait for long.
    """
    holds = main and view.stage in launch.TRAINING
    identity = lineage.identity(paths, view.stage, view.declared) if holds else None
    folder = state_folder(paths, view.stage, identity) if identity is not None else None
    if main:
        _remove_finished(paths, but=folder)
    if identity is None or folder is None:
        yield Claim(lineage.new_key(view.stage), None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), view.stage, worker_wait_seconds if launch.is_worker() else -1):
        folder.mkdir(exist_ok=True)  # another stage may have removed it
        (folder / FINISHED).unlink(missing_ok=True)
        run = folder / "run"
        if not (run.exists() and any(folder.glob("*/step-*"))):
            _show_others(folder, identity, view.stage, config.load(paths.params).launch.precision == "auto")
            atomic.write_text(run, lineage.new_key(view.stage))
        yield Claim(run.read_text(encoding="utf-8"), folder)


def _remove_finished(paths: Paths, but: Path | None) -> None:
    """Remove the snapshots of finished stages, but for those of this stage, whose outs DVC has not stored."""
    for marker in states(paths).glob(f"*/*/{FINISHED}"):
        if marker.parent != but:
            shutil.rmtree(marker.parent, ignore_errors=True)


@contextmanager
def _locked(path: Path, stage: str, wait_seconds: float) -> Iterator[None]:
    lock = FileLock(path)
    if not _acquired(lock):
        console.say(
            f"{stage}: another process trains with the same parameters, code and inputs; waiting for its end"
        )
        try:
            lock.acquire(timeout=wait_seconds, poll_interval=0.5)
        except Timeout:
            raise UserError(
                f"another process trains {stage} with the same parameters, code and inputs (it holds "
                f"{path}); run this one after its end, or stop it"
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


def _show_others(folder: Path, identity: Mapping[str, Any], stage: str, is_auto: bool) -> None:
    """Print why unfinished runs with other parameters, code or inputs are not resumed.

    Raises:
        UserError: if only the precision differs, which `auto` stands for here and stood for there.
    """
    for other in sorted(folder.parent.iterdir()):
        lock = FileLock(other.with_suffix(".lock"))
        if other == folder or not other.is_dir() or not _acquired(lock):
            continue  # this run's folder, or that of a running process
        manifest = next(filter(None, map(read_manifest, other.glob("*/step-*"))), None)
        lock.release()
        old = {} if manifest is None else manifest["identity"]
        if is_auto and {**old, PRECISION: identity.get(PRECISION)} == identity:
            raise UserError(
                f"{PRECISION}: auto is {identity[PRECISION]} on this machine, and an unfinished run of "
                f"{stage} computed in {old[PRECISION]} (it is in {other}); set {PRECISION} to "
                f"{old[PRECISION]} to resume it, or to {identity[PRECISION]} to start from the beginning"
            )
        if manifest is not None:
            console.say(
                f"{stage} starts from the beginning. The snapshots of an unfinished run differ in "
                f"{differences(manifest['identity'], identity)}; if you do not need them, remove {other}"
            )

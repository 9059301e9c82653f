"""Saves and loads the last snapshots of one training loop; a damaged one is reported and removed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_tasks import config, console
from rlhf_tasks.config import StageView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, disk, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import launch
from rlhf_tasks.training.resume.manifests import MANIFEST, differences, read_manifest, state_folder
from rlhf_tasks.training.resume.signals import Signals
from rlhf_tasks.training.state import Files, State

if TYPE_CHECKING:
    from rlhf_tasks.training.runtime import Runtime

FILES = "files"  # in a stored state, the key of the name of a folder of `Files`


class Loop(Protocol):
    """The snapshots of one training loop."""

    def load(self) -> State | None:
        """The newest whole state, each process its own part; None to begin at the beginning.

        Raises:
            UserError: if it was saved with other processes, parameters or inputs.
        """

    def due(self) -> bool:
        """True if a snapshot is due after this step; all processes call it and get the same result."""

    def save(self, step: int, state: State) -> None:
        """Save the state after a step; ends the stage if it has received a signal.

        Raises:
            DiskFullError: if it does not fit on the disk; the snapshots before it stand.
        """


@contextmanager
def open(rt: Runtime, paths: Paths, view: StageView, name: str) -> Iterator[Loop]:
    """The snapshots of the loop `name` of a stage, within the block; outside a project none are saved.

    Raises:
        KeyboardInterrupt: (or what SIGTERM raises) at the end of the block, if a signal came too late for
            a snapshot.
    """
    identity = rt.from_main(lineage.identity(paths, view.stage, view.declared) if rt.is_main else None)
    if identity is None:
        yield Nothing()
        return
    folder = rt.from_main(state_folder(paths, view.stage, identity) / name if rt.is_main else None)
    made_by = {
        "launch.num_processes": rt.world_size,
        "launch.parallelism": view.launch.parallelism,
        "launch.offload": view.launch.offload,
        "launch.precision": "fp32" if rt.is_float32 else "bf16",
        "device": rt.device.type,
    }
    with Signals() as signals:
        yield Snapshots(rt, folder, identity, made_by, view.resume, signals)


class Nothing:
    """Saves no snapshots: every run starts from the beginning."""

    def load(self) -> State | None:
        return None

    def due(self) -> bool:
        return False

    def save(self, step: int, state: State) -> None:
        pass


class Snapshots:
    """The last K snapshots of a training loop, in one folder."""

    def __init__(
        self,
        rt: Runtime,
        folder: Path,
        identity: Mapping[str, Any],
        made_by: Mapping[str, Any],
        settings: config.Resume,
        signals: Signals,
    ) -> None:
        self._rt, self.folder, self._settings, self._signals = rt, folder, settings, signals
        self._identity, self._made_by = identity, made_by
        self._saved_at = time.monotonic()

    # ----------------------------------------------------------------------------------- reading

    def load(self) -> State | None:
        import torch

        snapshot = self._rt.from_main(self._newest() if self._rt.is_main else None)
        if snapshot is None:
            return None
        manifest = read_manifest(snapshot)
        if manifest is None:
            raise UserError(
                f"process {self._rt.rank} cannot read {snapshot}; snapshots must be on a disk that all "
                "machines share: set RLHF_STATE_DIR to a folder there"
            )
        self._check(manifest, snapshot)
        own = torch.load(snapshot / f"rank-{self._rt.rank}.pt", map_location="cpu", weights_only=True)
        shared = torch.load(snapshot / "shared.pt", map_location="cpu", weights_only=True)
        console.say(f"{self.folder.name}: resumed from the snapshot after step {manifest['step']}")
        self._saved_at = time.monotonic()
        loaded: State = _with_folders(own | {"shared": shared}, snapshot)
        return loaded

    def _newest(self) -> Path | None:
        """The newest complete snapshot; damaged ones are reported and removed."""
        for snapshot in sorted(self.folder.glob("step-*"), reverse=True):
            damage = _damage(snapshot)
            if damage is None:
                return snapshot
            console.say(
                f"{self.folder.name}: {snapshot} is damaged ({damage}) and is removed; the one before is used"
            )
            shutil.rmtree(snapshot)
        return None

    def _check(self, manifest: Mapping[str, Any], snapshot: Path) -> None:
        old = {**manifest["identity"], **manifest["made_by"]}
        new = {**self._identity, **self._made_by}
        if old != new:
            raise UserError(
                f"cannot resume from {snapshot}: it differs in {differences(old, new)}; undo this change, or "
                f"remove {self.folder.parent} to start from the beginning"
            )
        if manifest["threads"] != _threads():
            console.say(
                f"{self.folder.name}: resumed with {_threads()} threads instead of {manifest['threads']}; "
                "the last bits of the result will differ (OMP_NUM_THREADS sets the number)"
            )

    # ----------------------------------------------------------------------------------- writing

    def due(self) -> bool:
        if launch.is_orphan():
            self._signals.received = signal.SIGTERM
        late = time.monotonic() - self._saved_at >= self._settings.every_seconds
        agreed = self._rt.max(2 * self._signals.received + late)
        self._signals.received = agreed // 2
        return agreed > 0

    def save(self, step: int, state: State) -> None:
        rt, snapshot = self._rt, self.folder / f"step-{step:09d}"
        partial = self.folder / f".{snapshot.name}.partial"
        if rt.is_main:
            for stale in self.folder.glob(".step-*"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True)
        rt.barrier()
        blind = rt.max(
            0 if partial.exists() else rt.rank + 1
        )  # none may write, and fail, before all have looked
        if blind:
            raise UserError(
                f"process {blind - 1} cannot read {partial}; snapshots must be on a disk that all machines "
                "share: set RLHF_STATE_DIR to a folder there"
            )
        try:
            with disk.room(self.folder, lambda: _num_bytes(state)):
                self._write(state, partial)
                rt.barrier()
                if rt.is_main:
                    self._seal(step, partial, snapshot)
        except disk.DiskFullError:
            self._give_back(partial)  # or nothing else could be written
            raise
        rt.barrier()
        self._saved_at = time.monotonic()
        if self._signals.received:
            console.say(
                f"{self.folder.name}: saved a snapshot after step {step}; the same command resumes from it"
            )
            self._signals.act()

    def _give_back(self, partial: Path) -> None:
        """The room of a snapshot that does not fit; with several processes, others may be writing."""
        if self._rt.world_size == 1:
            shutil.rmtree(partial, ignore_errors=True)
        for path in partial.rglob("*"):
            if path.is_file():
                with suppress(OSError):
                    os.truncate(path, 0)

    def _write(self, state: State, partial: Path) -> None:
        """This process's part of the state, and from the first one what all of them share."""
        import torch

        own = _with_files_written(state, partial)
        shared = own.pop("shared", {})
        parts = {f"rank-{self._rt.rank}.pt": own} | ({"shared.pt": shared} if self._rt.is_main else {})
        for name, part in parts.items():
            torch.save(part, partial / name)
            atomic.fsync(partial / name)  # another machine cannot do it for this one

    def _seal(self, step: int, partial: Path, snapshot: Path) -> None:
        manifest = {
            "step": step,
            "made_by": self._made_by,
            "threads": _threads(),
            "identity": self._identity,
            "files": _sums(partial),
        }
        atomic.write_json(partial / MANIFEST, manifest)
        atomic.finish(partial, snapshot)
        for old in sorted(self.folder.glob("step-*"), reverse=True)[self._settings.keep :]:
            shutil.rmtree(old)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _damage(snapshot: Path) -> str | None:
    """The damage of a snapshot; None if its files are as they were written."""
    manifest = read_manifest(snapshot)
    if manifest is None:
        return f"no readable {MANIFEST}"
    sums = _sums(snapshot)
    wrong = [name for name, digest in manifest["files"].items() if sums.get(name) != digest]
    return f"{', '.join(wrong)} changed or missing" if wrong else None


def _sums(folder: Path) -> dict[str, str]:
    """sha256 of every file but the manifest, by relative path."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _num_bytes(part: Any) -> int:
    """The bytes of the tensors in a state."""
    if isinstance(part, Mapping | list | tuple):
        return sum(map(_num_bytes, part.values() if isinstance(part, Mapping) else part))
    return int(getattr(part, "nbytes", 0))


def _with_files_written(state: State, folder: Path) -> State:
    """The state with each `Files` written to a folder and replaced by the folder's name."""
    written = 0

    def stored(part: Any) -> Any:
        nonlocal written
        if isinstance(part, Files):
            name = f"{FILES}-{written}"
            written += 1
            (folder / name).mkdir(exist_ok=True)
            part.write(folder / name)
            return {FILES: name}
        return {key: stored(value) for key, value in part.items()} if type(part) is dict else part

    result: State = stored(state)
    return result


def _with_folders(part: Any, folder: Path) -> Any:
    """The inverse of `_with_files_written`: replaces each name by its folder."""
    if type(part) is not dict:
        return part
    if part.keys() == {FILES}:
        return folder / part[FILES]
    return {key: _with_folders(value, folder) for key, value in part.items()}

"""Exact resume: after a kill, the same command continues from the last snapshot of a training loop.

    $RLHF_STATE_DIR/STAGE/DIGEST/        by default under .rlhf/state of the main checkout
      run                                the key of the run that is resumed
      earlier_seconds                    what its parts before this one took; written when this one began
      LOOP/step-000000120/               a snapshot: fsynced, then renamed; the last K are kept
        manifest.json                    the sha256 of every file, and the settings of the run
        shared.pt  rank-0.pt  training/  the state that all ranks share, that of each, and sharded weights

What a loop keeps is its state (`PpoState`, or `TrainState` of `training/supervised.py`) and the tracker's
curves: weights, moments, generators, the position in the data, the best weights, and for PPO coefficients,
guards and scaling. `resume.keep` says how many, and `resume.every_seconds` how often. One process copies the
state in memory, and trains on while a thread writes the copy. Several processes wait for the disk, as does
one without room for the copy, and save less often. A stage says how much work a kill can lose.

The digest covers all that decides what the stage writes (`lineage.fingerprint`). So a changed value, input or
line of code never resumes from another's snapshots, and all worktrees share the folder under one lock. It
is outside the outs, which DVC deletes before a stage runs. The next stage that starts in the same worktree
removes it: until then, DVC may be killed before it has stored the complete outs. With several machines it
must be on a disk that all of them share. No torch at import.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.filesize import decimal

from rlhf_tasks import config, console
from rlhf_tasks.config import VIEWS, StageView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, disk, hashing, inputs, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context
from rlhf_tasks.training import auto, signals

if TYPE_CHECKING:
    from rlhf_tasks.training.distributed import Distributed

State = dict[str, Any]
"""Nested: tensors, numbers, strings, lists, None. What is under `shared` is equal on all ranks, and written
once; `training` is a `Distributed.training_state`."""
FINISHED, MANIFEST, TRAINING = "finished", "manifest.json", "training"
WAIT_SHARE = 0.02  # the most of the time that training may wait for snapshots to be on the disk,
COPY_SHARE = 0.1  # … and for their copies in memory: 60 seconds suffice for one of six
SHARE_A_DISK = "snapshots must be on a disk that all machines share: set RLHF_STATE_DIR to a folder there"


# ------------------------------------------------------------------------------------ the folder of a stage


def states(paths: Paths) -> Path:
    """The folder of all snapshots: $RLHF_STATE_DIR, by default .rlhf/state."""
    given = os.environ.get("RLHF_STATE_DIR")
    return Path(given).absolute() if given else paths.home / "state"


def state_folder(paths: Paths, stage: str, identity: Mapping[str, Any]) -> Path:
    """The folder of a stage's snapshots, by the digest of all that decides what the stage writes."""
    return states(paths) / stage / hashing.json_sha256(identity)[:32]


def point(paths: Paths, stage: str) -> str | None:
    """Where a run of the stage resumes, such as `rollout 12`, by its newest snapshot; None without one."""
    if stage not in auto.TRAINED or not any(states(paths).glob(f"{stage}/*/*/step-*")):
        return None
    view = VIEWS[stage]
    settings = auto.resolve_for(paths, view.stage, config.load(paths.params), check=False)
    identity = lineage.fingerprint(paths, stage, view.of(settings).declared).flat()
    newest = _newest(state_folder(paths, stage, identity)) if identity else None
    return None if newest is None else newest[0]


def _newest(folder: Path) -> tuple[str, float] | None:
    """The newest snapshot of a stage, as `rollout 12` or `step 7 of LOOP`, and its age in seconds."""
    snapshot = max(folder.glob("*/step-*"), key=lambda path: path.stat().st_mtime, default=None)
    manifest = None if snapshot is None else read_manifest(snapshot)
    if snapshot is None or manifest is None:
        return None
    stage, loop = folder.parent.name, snapshot.parent.name
    name = f"{'rollout' if stage == 'ppo' else 'step'} {manifest['step']}" + f" of {loop}" * (loop != stage)
    return name, time.time() - snapshot.stat().st_mtime


def read_manifest(snapshot: Path) -> dict[str, Any] | None:
    """The content of its manifest; None if it cannot be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads((snapshot / MANIFEST).read_text(encoding="utf-8")))
    return None


# ------------------------------------------------------------------------------------------------ the claim


@dataclass(frozen=True)
class Claim:
    """The locked snapshots of a stage; `key` names the run, which is the earlier one if it is resumed."""

    key: str
    folder: Path | None = None
    root: Path = Path()
    earlier_seconds: float = 0.0
    """The time of the parts of this run before it was stopped and resumed, each up to its last snapshot."""

    def finish(self) -> None:
        """Let this worktree's next stage remove the snapshots: only then has DVC stored the complete outs."""
        if self.folder is not None:
            (self.folder / FINISHED).write_text(str(self.root.resolve()), encoding="utf-8")

    def next_run(self) -> str:
        """What a run begins with that follows on one which ends now."""
        with suppress(OSError):  # a snapshot was removed for a newer one meanwhile
            newest = None if self.folder is None else _newest(self.folder)
            if newest is None:
                return "; without a snapshot the next run starts it from the beginning"
            return f"; the next run resumes from {newest[0]} (saved {console.duration(newest[1])} ago)"
        return ""


@contextmanager
def claim(paths: Paths, view: StageView, *, main: bool) -> Iterator[Claim]:
    """Lock the stage's snapshots within the block; waits for another process that holds them.

    Only the first rank of a training stage locks them.
    """
    stage, holds = view.stage, main and view.stage in auto.TRAINED
    identity = lineage.fingerprint(paths, stage, view.declared).flat() if holds else {}
    folder = state_folder(paths, stage, identity) if identity else None
    if main:
        _remove_finished(paths, besides=folder)  # DVC has not stored the outs of this one
    if folder is None:
        yield Claim(lineage.new_key(stage))
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        console.say(
            f"{stage}: another process trains with the same parameters, code and inputs; waiting for its end"
        )
        held = lock.acquire(poll_interval=0.5)
    with held:
        folder.mkdir(exist_ok=True)  # another stage may have removed it
        (folder / FINISHED).unlink(missing_ok=True)
        run, earlier, seconds = folder / "run", folder / "earlier_seconds", 0.0
        saved = [snapshot.stat().st_mtime for snapshot in folder.glob("*/step-*")]
        if run.exists() and saved:
            began = earlier.stat().st_mtime  # by the clock of the disk, as the times of the snapshots
            seconds = float(earlier.read_text(encoding="utf-8")) + max(0.0, max(saved) - began)
        else:
            _show_others(folder, identity, auto.keys(config.load(paths.params)))
            atomic.write_text(run, lineage.new_key(stage))
        atomic.write_text(earlier, str(seconds))
        yield Claim(run.read_text(encoding="utf-8"), folder, paths.root, seconds)


def _remove_finished(paths: Paths, besides: Path | None) -> None:
    """Remove the finished snapshots of this worktree, and of those that are gone, that nobody resumes."""
    for marker in states(paths).glob(f"*/*/{FINISHED}"):
        folder = marker.parent
        with suppress(Timeout, OSError), FileLock(folder.with_suffix(".lock"), timeout=0):
            root = Path(marker.read_text(encoding="utf-8"))  # read under the lock: who resumes removes it
            if folder != besides and (root == paths.root.resolve() or not root.exists()):
                shutil.rmtree(folder, ignore_errors=True)


def _show_others(folder: Path, identity: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Print why unfinished runs with other parameters, code or inputs are not resumed.

    Raises:
        UserError: if only parameters differ that are `auto`, which stood for something else there.
    """
    stage, here = folder.parent.name, {key: identity[key] for key in keys if key in identity}
    for other in sorted(path for path in folder.parent.iterdir() if path.is_dir() and path != folder):
        with suppress(Timeout), FileLock(other.with_suffix(".lock"), timeout=0):  # none trains there now
            manifest = next(filter(None, map(read_manifest, other.glob("*/step-*"))), None)
            if manifest is None:
                continue
            old = manifest["identity"]
            differing = inputs.differences(old, identity)
            if {**old, **here} == identity:
                raise UserError(
                    f"an unfinished run of {stage} (in {other}) had other values for `auto`: {differing}. "
                    "Set the former in params.yaml to resume that run, or the latter to begin anew"
                )
            console.say(
                f"{stage} starts from the beginning. The snapshots of an unfinished run differ in "
                f"{differing}; if you do not need them, remove {other}"
            )


# -------------------------------------------------------------------------------------------- the snapshots


@contextmanager
def open_snapshots(dist: Distributed, paths: Paths, view: StageView, name: str) -> Iterator[Snapshots]:
    """The snapshots of the loop `name` of a stage, within the block; outside a project none are saved.

    Raises:
        Stopped: at the end of the block, if a signal came too late for a snapshot.
    """
    identity = lineage.fingerprint(paths, view.stage, view.declared).flat() if dist.is_main else {}
    if not (identity := dist.broadcast_object(identity)):
        yield Snapshots()
        return
    folder = dist.broadcast_object(state_folder(paths, view.stage, identity) / name)
    with signals.listening(view.stage) as listener:
        snapshots = SavedSnapshots(dist, folder, paths.models, identity, view, listener)
        with snapshots.writer, listener.deferring(snapshots.plan):
            yield snapshots
            snapshots.wait()


class Snapshots:
    """The snapshots of one training loop. This class saves none: every run starts from the beginning."""

    def reserve(self, weights: int, state: int) -> None:
        """Say how much disk the loop needs: the bytes of the checkpoint at its end, and of each snapshot.

        Raises:
            DiskFullError: if that does not fit.
        """

    def load(self) -> State | None:
        """The newest whole state, each rank its own part; None to begin at the beginning.

        Raises:
            UserError: if it was saved with other ranks, parameters or inputs.
        """
        return None

    def due(self) -> bool:
        """True if a snapshot is due after this step: by the time, or because a signal ends the stage."""
        return False

    def save(self, step: int, state: State) -> None:
        """Save the state after a step; ends the stage if it has received a signal.

        Raises:
            DiskFullError: if it does not fit on the disk, or the last one did not; those before it stand.
            UserError: if the machines do not share a disk.
            Stopped: after a signal.
        """

    def wait(self) -> None:
        """Wait until the last snapshot is written, and raise what its writing has raised."""


class SavedSnapshots(Snapshots):
    """The last K snapshots of one training loop, in one folder. All ranks call each method."""

    def __init__(
        self,
        dist: Distributed,
        folder: Path,
        models: Path,
        identity: Mapping[str, Any],
        view: StageView,
        listener: signals.Listener,
    ) -> None:
        self._dist, self.folder, self._models, self._identity = dist, folder, models, identity
        self._settings, self._listener = view.resume, listener
        self._made_by = {  # to the last bit, results depend on these too
            "launch.num_processes": dist.world_size,
            "launch.parallelism": view.launch.parallelism,
            "launch.offload": view.launch.offload,
            "launch.precision": "fp32" if dist.is_float32 else "bf16",
            "device": dist.device.type,
            "side by side": context.is_worker()
            and dist.world_size == 1,  # else a loop has both models' curves
        }
        if view.launch.parallelism == "hsdp":  # they decide which shards a rank has
            self._made_by["launch.num_machines"] = view.launch.num_machines
        self._saved_at = self._step_began_at = time.monotonic()
        self._step_seconds = self._save_seconds = 0.0  # what the last ones took
        self._longest_step = 0.0
        self._every_seconds: float = view.resume.every_seconds  # longer where saving takes much of the time
        self._bound = 0.0  # the seconds of work that a kill can lose, as last said
        self.writer = ThreadPoolExecutor(1, "snapshots")
        self._writing: Future[float] | None = None
        self._ended_by = 0  # the signal that all ranks have agreed on

    def reserve(self, weights: int, state: int) -> None:
        if not self._dist.is_main:
            return
        count = self._settings.keep + 1  # the oldest is removed once the newest is whole
        parts = f"{decimal(weights)} of weights, {count} snapshots of {decimal(state)}"
        size, free = decimal(weights + count * state), decimal(disk.free(self.folder))
        console.say(f"{self.folder.name}: needs up to {size} of disk ({parts}); {free} free")
        console.say(
            f"{self.folder.name}: a kill loses at most {console.duration(self._every_seconds)} of work, and "
            "the step and the snapshot in progress"
        )
        left = max(0, count * state - disk.size(self.folder))  # a resumed run has some
        disk.reserve({self._models: weights, self.folder: left})

    def load(self) -> State | None:
        import torch

        self.wait()
        with console.part("checking the snapshots"):
            snapshot = self._dist.broadcast_object(self._newest_whole() if self._dist.is_main else None)
        if snapshot is None:
            return None
        manifest = read_manifest(snapshot)
        if manifest is None:
            raise UserError(f"rank {self._dist.rank} cannot read {snapshot}; {SHARE_A_DISK}")
        old, new = {**manifest["identity"], **manifest["made_by"]}, {**self._identity, **self._made_by}
        if old != new:
            raise UserError(
                f"cannot resume from {snapshot}: it differs in {inputs.differences(old, new)}; undo this "
                f"change, or remove {self.folder.parent} to start from the beginning"
            )
        if (threads := torch.get_num_threads()) != manifest["threads"]:
            console.say(
                f"{self.folder.name}: resumed with {threads} threads instead of {manifest['threads']}; the "
                "last bits of the result will differ (OMP_NUM_THREADS sets the number)"
            )
        own, together = (
            torch.load(snapshot / f"{name}.pt", map_location="cpu", mmap=True, weights_only=True)
            for name in (f"rank-{self._dist.rank}", "shared")
        )
        console.say(f"{self.folder.name}: resumed from the snapshot after step {manifest['step']}")
        self._saved_at = self._step_began_at = time.monotonic()
        folder = snapshot / TRAINING
        state: State = own | together | ({TRAINING: folder} if folder.exists() else {})
        return state

    def _newest_whole(self) -> Path | None:
        """The newest snapshot whose files are as they were written; damaged ones are reported and removed."""
        for snapshot in sorted(self.folder.glob("step-*"), reverse=True):
            manifest, damage = read_manifest(snapshot), f"no readable {MANIFEST}"
            if manifest is not None:
                sums = hashing.sha256_of_files(snapshot)
                wrong = [name for name, digest in manifest["files"].items() if sums.get(name) != digest]
                if not wrong:
                    return snapshot
                damage = f"{', '.join(wrong)} changed or missing"
            console.say(
                f"{self.folder.name}: {snapshot} is damaged ({damage}) and is removed; the one before is used"
            )
            shutil.rmtree(snapshot)
        return None

    def due(self) -> bool:
        """The time is `resume.every_seconds`, or longer until the last snapshot is written, and so that
        training waits no more than `COPY_SHARE` of it for a copy, or `WAIT_SHARE` for the disk.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        now = time.monotonic()
        self._step_seconds, self._step_began_at = now - self._step_began_at, now
        self._longest_step = max(self._longest_step, self._step_seconds)
        is_late = self._writing is None and now - self._saved_at >= self._every_seconds
        agreed = self._dist.max(2 * self._listener.received + is_late)  # one rank may have the signal first
        self._ended_by = agreed // 2
        return agreed > 0

    @console.part("saving a snapshot")
    def save(self, step: int, state: State) -> None:
        """One process copies it in memory, and a thread writes the copy while it trains on."""
        import torch

        from rlhf_tasks.models.tensors import copy_to_cpu

        torch.serialization.set_crc32_options(False)  # the manifest has a sha256 of each file
        dist, snapshot, began_at = self._dist, self.folder / f"step-{step:09d}", time.monotonic()
        partial = self.folder / f".{snapshot.name}.partial"
        self.wait()
        if dist.is_main:
            for stale in self.folder.glob(".step-*"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True)
        dist.barrier()
        # all have looked before one writes and fails
        if blind := dist.max(0 if partial.exists() else dist.rank + 1):
            raise UserError(f"rank {blind - 1} cannot read {partial}; {SHARE_A_DISK}")
        together = {key: state[key] for key in ("shared", TRAINING) if key in state}
        own = {key: value for key, value in state.items() if key not in together}
        made = {"made_by": self._made_by, "threads": torch.get_num_threads()}
        manifest = {"step": step, **made, "identity": self._identity}
        size = _num_bytes(state)
        if is_sharded := callable(write := together.get(TRAINING)):
            with self._room(partial, size):
                (partial / TRAINING).mkdir(exist_ok=True)
                write(partial / TRAINING)
            del together[TRAINING]
        parts = {f"rank-{dist.rank}.pt": own} | ({"shared.pt": together} if dist.is_main else {})
        is_beside = dist.world_size == 1 and not is_sharded and 2 * size < auto.free_memory()
        if is_beside:
            parts = copy_to_cpu(parts)
            self._writing = self.writer.submit(self._write, parts, partial, snapshot, manifest, size)
        else:
            self._write(parts, partial, snapshot, manifest, size)
        dist.barrier()
        self._saved_at, self._step_began_at = began_at, time.monotonic()
        self._save_seconds = self._step_began_at - began_at
        share = COPY_SHARE if is_beside else WAIT_SHARE
        self._every_seconds = max(self._settings.every_seconds, self._save_seconds / share)
        if not is_beside:
            self._say_bound()
        if self._ended_by:
            self.wait()
            console.say(
                f"{self.folder.name}: saved a snapshot after step {step}; the same command resumes from it"
            )
            self._listener.act(self._ended_by)

    def _write(
        self,
        parts: Mapping[str, State],
        partial: Path,
        snapshot: Path,
        manifest: Mapping[str, Any],
        size: int,
    ) -> float:
        """Write this rank's files of a snapshot, maybe in the thread; returns the seconds that it took.

        When all ranks have, the first one writes the manifest, gives the snapshot its name, and removes the
        oldest one.
        """
        import torch

        began_at = time.monotonic()
        with self._room(partial, size):
            for name, part in parts.items():
                torch.save(part, partial / name)
                atomic.fsync(partial / name)  # another machine cannot do it for this one
            self._dist.barrier()  # of one process, in the thread, it is nothing
            names = self._dist.broadcast_object(hashing.files_in(partial) if self._dist.is_main else None)
            own = hashing.sha256_of_files(partial, self._dist.shard_rows(names))  # each rank some of them
            sums = {name: sha for part in self._dist.all_gather_object(own) for name, sha in part.items()}
            if self._dist.is_main:
                atomic.write_json(partial / MANIFEST, {**manifest, "files": sums})
                atomic.finish(partial, snapshot)
                for old in sorted(self.folder.glob("step-*"), reverse=True)[self._settings.keep :]:
                    shutil.rmtree(old, ignore_errors=True)  # NFS keeps a file that is mapped
        return time.monotonic() - began_at

    @contextmanager
    def _room(self, partial: Path, size: int) -> Iterator[None]:
        """`disk.room` for the files of a snapshot, which give their room back if they do not fit."""
        try:
            with disk.room(self.folder, lambda: size):
                yield
        except disk.DiskFullError:
            for file in filter(Path.is_file, partial.rglob("*")):  # others may still be writing there
                with suppress(OSError):
                    os.truncate(file, 0)  # or nothing else could be written
            raise

    def wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._save_seconds += writing.result()
            self._say_bound()

    def _say_bound(self) -> None:
        """Say how much work a kill can lose from now on, if that is more than was said."""
        step, save = self._longest_step, self._save_seconds
        every = max(self._every_seconds, save)
        bound = every + step + save  # killed just before the next snapshot is whole
        if self._dist.is_main and not self._ended_by and bound > 1.2 * self._bound:
            self._bound = bound
            shown = [console.duration(seconds) for seconds in (bound, every, step, save)]
            text = "a kill loses at most about {} of work: a snapshot every {}, steps of {}, {} to save one"
            console.say(f"{self.folder.name}: {text.format(*shown)}")

    def plan(self) -> str:
        """What a signal is answered with, and how long it takes by the last step and the last snapshot."""
        left = max(0.0, self._step_began_at + self._step_seconds - time.monotonic())
        seconds = math.ceil(left + self._save_seconds)
        about = f" (about {console.duration(seconds)})" if self._step_seconds else ""
        return f"finishing this step and saving a snapshot{about}"


def _num_bytes(part: Any) -> int:
    """The bytes of the tensors in a state."""
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        return sum(map(_num_bytes, part))
    return int(getattr(part, "nbytes", 0))

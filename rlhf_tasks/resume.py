"""Exact resume: the last states of a training loop, from which the same command goes on after a kill.

    $RLHF_STATE_DIR/STAGE/DIGEST/        by default under .rlhf/state of the main checkout
      run                                the key of the run that goes on
      LOOP/step-000000120/               a snapshot: written beside, fsynced, renamed; the last K are kept
        manifest.json                    the sha256 of every file, and what the snapshot was made by
        shared.pt  rank-0.pt  files-0/   what is the same on all processes, each one's own part, DeepSpeed's

The digest is of all that decides what the stage writes (`lineage.identity`), so that a changed value,
input or line of code never meets another's state; and so that worktrees share it, under one lock. It
lies outside the outs, which DVC deletes before a stage runs, and is cleared when they are whole.
With several machines the folder must be on a disk that all of them see.

SIGTERM and SIGINT wait for the end of the step, when a snapshot is taken; a second one does not wait. A
worker whose launcher was killed ends in the same way.
No torch at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

from rlhf_tasks import checkpoint, config, console, launch, lineage
from rlhf_tasks.config import StageView, UserError

if TYPE_CHECKING:
    from rlhf_tasks.runtime import Runtime

State = dict[str, Any]
"""Nested: tensors, numbers, strings, lists, None, and `Files`. What stands under `shared` is the same on
all processes and is written once."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MANIFEST = "manifest.json"
FILES = "files"  # the key of what stands for a folder of `Files` in a stored state
WORKER_WAIT_SECONDS = 10.0  # for the lock: the other processes of the stage wait meanwhile
SHOWN_DIFFERENCES = 8
HASH = re.compile(r"[0-9a-f]{32}(\.dir)?")


@dataclass(frozen=True)
class Files:
    """A part of a state that writes files of its own; all processes call it. Loaded, it is their folder."""

    write: Callable[[Path], Any]


class Loop(Protocol):
    """The snapshots of one training loop."""

    def load(self) -> State | None:
        """The newest whole state, each process its own part; None to begin at the beginning.

        Raises:
            UserError: if it was made by other processes, parameters or inputs.
        """

    def due(self) -> bool:
        """True at the end of a step after which to save; all processes ask, and agree."""

    def save(self, step: int, state: State) -> None:
        """Keep the state after a step; ends the stage if a signal has asked for that."""


# ------------------------------------------------------------------------------------ the stage


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
def claim(view: StageView, *, main: bool) -> Iterator[Claim]:
    """Hold the stage's state, so that nobody trains the very same thing at the same time; waits for it.

    For the first process of a training stage; for others, and other stages, nothing is held.

    Raises:
        UserError: in a launched worker, whose fellows cannot wait for long.
    """
    holds = main and view.stage in launch.TRAINING
    identity = lineage.identity(view.stage, view.declared()) if holds else None
    if identity is None:
        yield Claim(lineage.new_key(view.stage), None)
        return
    folder = _folder(view.stage, identity)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), view.stage):
        folder.mkdir(exist_ok=True)  # whoever was waited for has cleared it
        run = folder / "run"
        if not (run.exists() and any(folder.glob("*/step-*"))):
            _tell_others(folder, identity, view.stage)
            checkpoint.write_text(run, lineage.new_key(view.stage))
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


def _folder(stage: str, identity: Mapping[str, Any]) -> Path:
    root = os.environ.get("RLHF_STATE_DIR")
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return (Path(root).absolute() if root else lineage.home() / "state") / stage / digest


def _tell_others(folder: Path, identity: Mapping[str, Any], stage: str) -> None:
    """Unfinished runs of other parameters or inputs are not gone on with: say what differs."""
    for other in sorted(folder.parent.iterdir()):
        lock = FileLock(other.with_suffix(".lock"))
        if other == folder or not other.is_dir() or not _acquired(lock):
            continue  # not another's, or another's that is running
        manifest = next(filter(None, map(_manifest, other.glob("*/step-*"))), None)
        lock.release()
        if manifest is not None:
            console.say(
                f"{stage} begins anew: the state of an unfinished run differs in "
                f"{_differences(manifest['identity'], identity)} (it is kept; if it is of no use, remove "
                f"{other})"
            )


def _manifest(snapshot: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((snapshot / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """`sft.learning_rate (0.1 → 0.2), data/sft`: values for parameters, names for files."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    hashed = {name for name in names if HASH.fullmatch(str(old.get(name) or new.get(name)))}
    shown = [
        name if name in hashed else f"{name} ({old.get(name)!r} → {new.get(name)!r})"
        for name in names[:SHOWN_DIFFERENCES]
    ]
    return ", ".join([*shown, *([f"{len(names) - len(shown)} more"] if len(names) > len(shown) else [])])


# ------------------------------------------------------------------------------------- the loop


@contextmanager
def open(rt: Runtime, view: StageView, name: str) -> Iterator[Loop]:
    """The snapshots of the loop `name` of a stage, while it runs; none are kept outside a project.

    Raises:
        KeyboardInterrupt: (or what SIGTERM raised before) at its end, if a signal came too late for a
            snapshot.
    """
    identity = rt.from_main(lineage.identity(view.stage, view.declared()) if rt.is_main else None)
    if identity is None:
        yield Nothing()
        return
    folder = rt.from_main(_folder(view.stage, identity) / name if rt.is_main else None)
    made_by = {
        "launch.num_processes": rt.world_size,
        "launch.deepspeed": view.launch.deepspeed,
        "launch.mixed_precision": view.launch.mixed_precision,
        "device": rt.device.type,
    }
    with Signals() as signals:
        yield Snapshots(rt, folder, identity, made_by, view.resume, signals)


class Nothing:
    """No snapshots: every run begins at the beginning."""

    def load(self) -> State | None:
        return None

    def due(self) -> bool:
        return False

    def save(self, step: int, state: State) -> None:
        pass


class Snapshots:
    """The last K states of a training loop, in a folder of their own."""

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
        manifest = _manifest(snapshot)
        if manifest is None:
            raise UserError(
                f"{snapshot} is not seen by process {self._rt.rank}: the state must be on a disk that all "
                "machines see; set RLHF_STATE_DIR to a folder on one"
            )
        self._check(manifest, snapshot)
        own = torch.load(snapshot / f"rank-{self._rt.rank}.pt", map_location="cpu", weights_only=True)
        shared = torch.load(snapshot / "shared.pt", map_location="cpu", weights_only=True)
        console.say(f"{self.folder.name}: goes on after step {manifest['step']}")
        self._saved_at = time.monotonic()
        loaded: State = _with_folders(own | {"shared": shared}, snapshot)
        return loaded

    def _newest(self) -> Path | None:
        """The newest whole snapshot; torn ones are told and removed."""
        for snapshot in sorted(self.folder.glob("step-*"), reverse=True):
            wrong = _torn(snapshot)
            if wrong is None:
                return snapshot
            console.say(f"{self.folder.name}: {snapshot} is torn ({wrong}); the one before it is used")
            shutil.rmtree(snapshot)
        return None

    def _check(self, manifest: Mapping[str, Any], snapshot: Path) -> None:
        old = {**manifest["identity"], **manifest["made_by"]}
        new = {**self._identity, **self._made_by}
        if old != new:
            raise UserError(
                f"the state in {snapshot} cannot be gone on from, it differs in {_differences(old, new)}; "
                f"set this back, or remove {self.folder.parent} to begin anew"
            )
        if manifest["threads"] != _threads():
            console.say(
                f"{self.folder.name}: {_threads()} threads where there were {manifest['threads']}: it goes "
                "on, but not to the same last bits (OMP_NUM_THREADS sets them)"
            )

    # ----------------------------------------------------------------------------------- writing

    def due(self) -> bool:
        if launch.is_orphan():
            self._signals.asked = signal.SIGTERM
        late = time.monotonic() - self._saved_at >= self._settings.every_seconds
        agreed = self._rt.max(2 * self._signals.asked + late)
        self._signals.asked = agreed // 2
        return agreed > 0

    def save(self, step: int, state: State) -> None:
        import torch

        rt, snapshot = self._rt, self.folder / f"step-{step:09d}"
        partial = self.folder / f".{snapshot.name}.partial"
        if rt.is_main:
            for stale in self.folder.glob(".step-*"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True)
        rt.barrier()
        if not partial.exists():
            raise UserError(
                f"{partial} is not seen by process {rt.rank}: the state must be on a disk that all machines "
                "see; set RLHF_STATE_DIR to a folder on one"
            )
        own = _with_files_written(state, partial)
        shared = own.pop("shared", {})
        parts = {f"rank-{rt.rank}.pt": own} | ({"shared.pt": shared} if rt.is_main else {})
        for name, part in parts.items():
            torch.save(part, partial / name)
            checkpoint.fsync(partial / name)  # here: another machine cannot do it for this one
        rt.barrier()
        if rt.is_main:
            self._seal(step, partial, snapshot)
        rt.barrier()
        self._saved_at = time.monotonic()
        if self._signals.asked:
            console.say(f"{self.folder.name}: the state after step {step} is kept; the same command goes on")
            self._signals.act()

    def _seal(self, step: int, partial: Path, snapshot: Path) -> None:
        manifest = {
            "step": step,
            "made_by": self._made_by,
            "threads": _threads(),
            "identity": self._identity,
            "files": _sums(partial),
        }
        checkpoint.write_json(partial / MANIFEST, manifest)
        checkpoint.finish(partial, snapshot)
        for old in sorted(self.folder.glob("step-*"), reverse=True)[self._settings.keep :]:
            shutil.rmtree(old)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _torn(snapshot: Path) -> str | None:
    """What is wrong with a snapshot; None if it is as it was written."""
    manifest = _manifest(snapshot)
    if manifest is None:
        return f"no readable {MANIFEST}"
    found = _sums(snapshot)
    wrong = [name for name, digest in manifest["files"].items() if found.get(name) != digest]
    return f"{', '.join(wrong)} not as written" if wrong else None


def _sums(folder: Path) -> dict[str, str]:
    """sha256 of every file but the manifest, by relative path."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _with_files_written(state: State, folder: Path) -> State:
    """The state with each `Files` written to a folder of its own, whose name stands in its place."""
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
    """`_with_files_written` undone: the folder in the place of its name."""
    if type(part) is not dict:
        return part
    if part.keys() == {FILES}:
        return folder / part[FILES]
    return {key: _with_folders(value, folder) for key, value in part.items()}


# ------------------------------------------------------------------------------------- signals


class Signals:
    """SIGTERM and SIGINT noted in `asked` while it lasts, and acted on as before by `act`.

    The second one acts at once; not in a launched worker, which gets the same signal from the terminal
    and from its launcher. Nor does it wait when another worker has failed: no step would end.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._restore()
        if kind is None and self.asked:
            signal.raise_signal(self.asked)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.asked) and not launch.is_worker()
        self.asked = number
        if again or launch.reported() is not None:
            self.act()

    def act(self) -> None:
        """End as the signal would have ended the stage without snapshots."""
        number = self.asked
        self.asked = 0
        self._restore()
        signal.raise_signal(number)

"""The uploader: one process per machine that delivers the outbox to MLflow. No torch; MLflow only inside it.

A stage or a flow starts the uploader if none is running. The uploader lives until all its runs are over, and
the dvc processes and flows that they belong to. Its name is in `uploader@HOST.pid` meanwhile. A run first
begins its record and then reads that file. The uploader first removes the file and then reads the outbox once
more, so no run is missed. The machine is part of the name because a process can be seen only there.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlhf_tasks import console
from rlhf_tasks.project import atomic
from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.delivery import Delivery, describe, known_errors
from rlhf_tasks.tracking.outbox import DamagedRecordError, Outbox, Record

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import Store

POLL_SECONDS, WAIT_POLL_SECONDS = 0.1, 0.05
IDLE_SECONDS = 1.0  # between two checks of runs that log nothing: whether their processes live
RETRY_SECONDS = 20.0
SYNC_LOCK_SECONDS = 60.0


class Uploader:
    """Delivers the runs of this machine, until they are over and nothing that may start another one lives."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._sizes = dict[str, int]()
        """Of each record that was examined: it is examined again when it has grown."""
        self._open = dict[str, Delivery]()
        self._due = 0.0
        """When live runs may be tried again after a failure, by the monotonic clock."""
        self._store: Store | None = None
        self._owners = set[str]()
        """The dvc processes of the runs: they may start more stages."""

    def serve(self) -> None:
        """Deliver until there is nothing to do; return at once if another uploader runs on this machine."""
        file = pid_file(self._outbox)
        while True:
            with self._outbox.lock():
                if is_running(self._outbox):
                    return
                atomic.write_text(file, context.process_name(psutil.Process()))
            self._attend()
            file.unlink(missing_ok=True)
            self._scan()  # a run may have begun just now, and have read the file
            if not self._open:
                return

    def _attend(self) -> None:
        while True:
            known = self._outbox.sizes()
            self.step()
            if not self._open and not any(map(context.is_alive, self._owners)):
                break
            self._wait(known)
        if self._store is not None:
            with suppress(*known_errors()), self._outbox.lock():
                self._store.close_left_parents()

    def _wait(self, known: Mapping[str, int]) -> None:
        """Wait until a record has another size than `known`, but no longer than runs need that are over."""
        seconds = POLL_SECONDS if any(delivery.over for delivery in self._open.values()) else IDLE_SECONDS
        deadline = time.monotonic() + seconds
        while True:
            time.sleep(POLL_SECONDS)
            if time.monotonic() >= deadline or self._outbox.sizes() != known:
                return

    def step(self) -> None:
        """Send what there is of each run, and draw the figure of at most one."""
        self._scan()
        figures = [d for d in self._open.values() if d.record.state().ended]
        for delivery in [d for d in self._open.values() if d not in figures] + figures[:1]:
            with self._outbox.lock():
                self._advance(delivery)

    def _scan(self) -> None:
        """Add the new runs of this machine, except those whose delivery failed: `rlhf sync` delivers them."""
        for key, size in self._outbox.sizes().items():
            if key in self._open or self._sizes.get(key) == size:
                continue
            self._sizes[key] = size
            record = self._outbox.record(key)
            try:
                state = record.state()
                if state.closed or state.failed:
                    continue
                header = record.header()
            except (DamagedRecordError, FileNotFoundError):
                continue  # `rlhf sync` reports it; or the user has removed it
            if header is None or not context.is_local(header["process"]):
                continue
            self._open[key] = Delivery(record, header)
            if header["parent"].get("owner") == "dvc":
                self._owners.add(header["parent"]["process"])

    def _advance(self, delivery: Delivery) -> None:
        """Send what there is of one run. Its failure must not end the delivery of the others."""
        record = delivery.record
        try:
            if time.monotonic() < self._due and not delivery.is_over():
                return  # a silent server costs seconds, which the end of another run must not wait for
            is_done = delivery.step().closed
        except Exception as error:
            if not isinstance(error, known_errors()):
                traceback.print_exc()
            self._due = time.monotonic() + RETRY_SECONDS
            # Not by the state, which a full disk may not have taken; the user may have removed the record.
            is_done = delivery.over or not record.file.exists()
        self._store = delivery.store or self._store
        if is_done:
            del self._open[record.key]
            self._sizes[record.key] = self._outbox.sizes().get(record.key, 0)


def sync(home: Path) -> tuple[int, dict[str, str]]:
    """Deliver the runs that are over: how many were delivered, and why others were not, by key."""
    outbox, delivered, failed = Outbox.of(home), 0, dict[str, str]()
    for record in outbox.pending():
        before = record.state().rejected
        try:
            with outbox.lock(SYNC_LOCK_SECONDS):
                delivered += deliver(record)
        except Exception as error:  # the other runs are delivered all the same
            if not isinstance(error, known_errors()):
                traceback.print_exc()
            failed[record.key] = describe(error)
        report_rejected(record, before)
    return delivered, failed


def deliver(record: Record) -> bool:
    """Deliver a run, with the outbox's lock held; False if it is not over, or was delivered before.

    Raises:
        Exception: if that failed.
    """
    header = record.header()
    if header is None or record.state().closed:
        return False
    delivery = Delivery(record, header)
    if not delivery.is_over():
        return False
    while not delivery.step().closed:
        pass
    return True


def report_rejected(record: Record, before: Mapping[str, str]) -> None:
    """Print how many traces of a run MLflow has rejected, apart from those `before`."""
    reasons = [reason for number, reason in record.state().rejected.items() if number not in before]
    if reasons:
        console.say(
            f"MLflow rejected {len(reasons)} trace(s) of {record.key} ({reasons[0]}). They will not be sent "
            f"again; {record.file} keeps them"
        )


# ------------------------------------------------------------------------------ for stages and flows


def pid_file(outbox: Outbox) -> Path:
    """Names the uploader of this machine while it runs."""
    return outbox.folder / f"uploader@{platform.node()}.pid"


def log_file(outbox: Outbox) -> Path:
    """What uploaders of this machine print; it is removed when everything is delivered."""
    return outbox.folder / f"uploader@{platform.node()}.log"


def is_running(outbox: Outbox) -> bool:
    try:
        name = pid_file(outbox).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return context.is_local(name) and context.is_alive(name)


def start(outbox: Outbox) -> subprocess.Popen[bytes] | None:
    """Start the uploader after a record has begun; None if it is running.

    It gets a session of its own, so that Ctrl-C for the stage leaves it time to report the stage's end.

    Raises:
        OSError: if that fails.
    """
    if is_running(outbox):
        return None
    command = [sys.executable, "-m", "rlhf_tasks.tracking.uploader", str(outbox.folder)]
    with log_file(outbox).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=context.uploader_environment(os.environ),
        )


def start_or_report(outbox: Outbox, report: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    """Start the uploader; a failure, such as a folder of another user, is reported and ends nothing."""
    try:
        return start(outbox)
    except OSError as error:
        report(f"no uploader could be started: {error}")
        return None


def wait(
    outbox: Outbox, is_done: Callable[[], bool], process: subprocess.Popen[bytes] | None, seconds: float
) -> bool:
    """Wait until `is_done`, at most so long; False if it is known that no uploader runs.

    `process` is what `start` returned. If no uploader runs any more, another one is started, once.
    True if the time is over while an uploader runs: it continues by itself.
    """
    deadline, is_second = time.monotonic() + seconds, False
    try:
        while time.monotonic() < deadline:
            running = is_running(outbox)  # before `is_done`: an uploader delivers first and then ends
            if is_done():
                return True
            if not running and (process is None or process.poll() is not None):
                if is_second:
                    return False
                process, is_second = start(outbox), True
            time.sleep(WAIT_POLL_SECONDS)
    except OSError:
        return False
    finally:
        if process is not None and process.poll() is None:
            process.returncode = 0  # so that the interpreter does not warn about a running child
    return True


def main(arguments: list[str]) -> int:
    outbox = Outbox(Path(arguments[0]))
    Uploader(outbox).serve()
    if not outbox.pending():
        log_file(outbox).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # without the seconds that Python needs to take MLflow's modules apart

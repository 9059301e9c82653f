"""Delivery of local records to MLflow, by a thread of the run or by `sync`. MLflow loads at first use."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.record import DamagedRecordError, Event, Record, pending

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import Delivery

BATCH_SECONDS = 1.0  # between two deliveries of a live run
RETRY_SECONDS = 20.0  # after a failure
LOCK_SECONDS = 60.0  # for the outbox, which one process at a time delivers
WAIT_SECONDS = 60.0  # for the delivery, after a run's end: the first one also creates the database
KILLED_WAIT_SECONDS = 3.0
MAX_REASON = 500  # characters


class Sender(threading.Thread):
    """Delivers a run's record while it grows. It never raises: what it could not deliver stays for `sync`."""

    def __init__(self, delivery: Delivery) -> None:
        self.record = record = delivery.record
        super().__init__(name=f"deliver {record.key}", daemon=True)
        self._delivery = delivery
        self.error: str | None = None  # why the last attempt failed; None if it succeeded
        self.has_tried = threading.Event()
        self.also = list[Record]()  # records that are over, to be delivered after this one's end
        self._size = record.file.stat().st_size  # now: what is logged before the thread runs is new
        self._is_over = threading.Event()
        self._has_reported = False

    @console.part("waiting for MLflow")
    def close(self, seconds: float) -> None:
        """Flush, waiting at most `seconds`."""
        self._is_over.set()
        self.join(seconds)
        if self.is_alive():
            self._report(f"no answer within {seconds:.0f} seconds")

    def run(self) -> None:
        due = due_left = 0.0
        while not self._is_over.wait(BATCH_SECONDS):
            now, size = time.monotonic(), self.record.file.stat().st_size if self.record.file.exists() else 0
            if now >= due and (size != self._size or self.error is not None):
                self._size = size
                self._attempt()
                due = now + (RETRY_SECONDS if self.error else 0.0)
                if self.error is None and now >= due_left:  # what killed processes left
                    due_left = now + RETRY_SECONDS
                    for record in pending(self.record.home):
                        if record != self.record and not self._is_over.is_set():
                            attempt(new_delivery(record), only_over=True)
        self._attempt()
        for record in self.also:
            attempt(new_delivery(record), only_over=True)

    def _attempt(self) -> None:
        self.error = attempt(self._delivery)
        self.has_tried.set()
        if self.error is not None:
            self._report(self.error)

    def _report(self, reason: str) -> None:
        """Print once that MLflow does not receive what is logged."""
        if not self._has_reported:
            self._has_reported = True
            console.say(
                f"MLflow does not receive this run ({reason}). Training continues, and metrics are kept "
                f"in {self.record.file}. What MLflow lacks at the end is sent by `rlhf sync`"
            )


def new_delivery(record: Record) -> Delivery:
    context.bound_requests()
    from rlhf_tasks.tracking.store import Delivery

    return Delivery(record)


def attempt(delivery: Delivery, *, only_over: bool = False) -> str | None:
    """Try to deliver a run; return the error or None. Only a mistake in the code prints more."""
    from rlhf_tasks.tracking.store import NO_ANSWER

    record, reason = delivery.record, None
    try:
        with FileLock(record.home / "outbox/sync.lock", timeout=LOCK_SECONDS):
            delivery.step(only_over=only_over)
    except Exception as error:  # it must end neither training nor the delivery of other runs
        if not isinstance(error, (*NO_ANSWER, UserError, DamagedRecordError)):
            traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
    with suppress(OSError, UserError):  # a disk that takes no state
        if reason != record.state()["last_error"]:
            record.write_state(last_error=reason)
    return reason


def sync(home: Path) -> tuple[int, dict[str, str]]:
    """Deliver the runs that are over: how many were delivered, and why others were not, by key."""
    delivered, failed = 0, dict[str, str]()
    for record in pending(home):
        reason = attempt(new_delivery(record), only_over=True)
        if reason is not None:
            failed[record.key] = reason
        else:
            delivered += record.state()["closed"]
    return delivered, failed


@contextmanager
def deliver_run(record: Record, header: Event) -> Iterator[Sender]:
    """A run that a thread delivers: FINISHED when the block ends, FAILED on an error, KILLED on a signal."""
    with console.part("loading MLflow"):  # before the thread exists: two that import it see half of it
        delivery = new_delivery(record)
    record.begin(header)
    sender, status, reason = Sender(delivery), "FINISHED", ""
    sender.start()
    try:
        yield sender
    except BaseException as error:
        status, reason = "FAILED", f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = f"the process ended with exit status {error}"
        elif not isinstance(error, Exception):
            status, reason = "KILLED", str(error) or "interrupted"
        raise
    finally:
        record.append("end", status=status, reason=reason)
        # A launcher ends the other processes of a failed stage without waiting long.
        sender.close(KILLED_WAIT_SECONDS if status == "KILLED" else WAIT_SECONDS)

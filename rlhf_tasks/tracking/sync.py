"""Delivery of local records to MLflow, by a thread of the run or by `sync`. MLflow loads at first use."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks import console
from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.events import End, Header
from rlhf_tasks.tracking.outbox import DamagedRecordError, Outbox, Record, State

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import RemoteRun

BATCH_SECONDS = 1.0  # between two deliveries of a live run
RETRY_SECONDS = 20.0  # after a failure
SYNC_LOCK_SECONDS = 60.0
MAX_REASON = 300  # characters
VANISHED = "the process vanished without an error (killed? out of memory?)"


class Delivery:
    """One run on its way to MLflow. After a failure, the next attempt sends only what MLflow lacks."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._run: RemoteRun | None = None
        self._delivered = 0  # bytes that MLflow had when `_run` was last used

    def step(self, *, only_over: bool = False) -> State:
        """Send what there is, with the outbox's lock held; returns the new state.

        `only_over`: send nothing of a run that may still log something.

        Raises:
            Exception: after the reason was written to the state.
        """
        try:
            return self._send(only_over=only_over)
        except Exception as error:
            rejected = self._run.rejected if self._run is not None else {}
            self._run, state = None, self.record.state()
            state = replace(state, size=self.record.size(), last_error=describe(error))
            self.record.write_state(replace(state, rejected={**state.rejected, **rejected}))
            raise

    def _send(self, *, only_over: bool) -> State:
        header, state = self.record.header(), self.record.state()
        if header is None or state.closed:
            return state
        has_vanished = not context.is_alive(header["process"])  # before the last lines are read
        events, offset = self.record.read(state.delivered)
        has_end = bool(events) and events[-1]["kind"] == "end"
        over = has_end or has_vanished
        if only_over and not over:
            return state
        owner = header["parent"].get("process", header["process"])
        is_live = context.is_alive(owner) and (context.is_local(owner) or not has_end)
        # A run that was resumed after its end is not over.
        events = [e for i, e in enumerate(events, 1) if e["kind"] != "end" or i == len(events)]
        if over and not has_end:
            last = round(self.record.file.stat().st_mtime * 1000)
            end = End(kind="end", time=last, status="FAILED", reason=VANISHED, device="unknown", outs={})
            events.append(end)
        if self._run is None or state.delivered != self._delivered:
            self._run = self._connect(header, state, live=is_live)
        self._run.send(events, self.record.files)
        self._delivered = offset
        # Over: a last torn line is never completed.
        size = self.record.size() if over else offset
        state = State(delivered=offset, size=size, closed=over, rejected=self._run.rejected)
        self.record.write_state(state)
        if over:
            shutil.rmtree(self.record.files, ignore_errors=True)
            if not is_live:
                self._run.store.close_left_parents()
        return state

    def _connect(self, header: Header, state: State, *, live: bool) -> RemoteRun:
        """Create the run in MLflow, or find it and note what it has already."""
        context.bound_requests()
        from rlhf_tasks.tracking.store import Store

        run = Store.open(header).run(header, live=live)
        run.resume(self.record.read(0, state.delivered)[0], state.rejected)
        return run


class Sender(threading.Thread):
    """Delivers a run's record while it grows. It never raises: what it could not deliver stays for `sync`.

    It imports MLflow only after the first event: two threads that import large packages at once may each see
    a half-imported module.
    """

    def __init__(self, outbox: Outbox, record: Record) -> None:
        super().__init__(name=f"deliver {record.key}", daemon=True)
        self.error: str | None = None
        """Why the last attempt failed; None if it succeeded."""
        self._outbox, self._delivery = outbox, Delivery(record)
        self._size = record.size()  # now: what is logged before the thread runs is new
        self._is_over, self._has_tried = threading.Event(), threading.Event()

    def close(self, seconds: float) -> bool:
        """Deliver the rest, at most so long; whether MLflow has all of the run."""
        self._is_over.set()
        if self.is_alive():
            self._has_tried.wait(seconds)
        return self._delivery.record.state().closed

    def run(self) -> None:
        due = due_left = 0.0
        while not self._is_over.wait(BATCH_SECONDS):
            now, grown = time.monotonic(), self._delivery.record.size()
            if now >= due and (grown != self._size or self.error is not None):
                self._size = grown
                self.error = attempt(self._outbox, self._delivery)
                due = now + (RETRY_SECONDS if self.error else 0.0)
                if self.error is None and now >= due_left:  # what killed processes left
                    due_left = now + RETRY_SECONDS
                    for record in self._outbox.pending():
                        if not self._is_over.is_set() and record != self._delivery.record:
                            attempt(self._outbox, Delivery(record), only_over=True)
        self.error = attempt(self._outbox, self._delivery)
        self._has_tried.set()


def attempt(outbox: Outbox, delivery: Delivery, *, only_over: bool = False) -> str | None:
    """Deliver what there is of a run; why that failed, or None. Only a mistake in the code prints more."""
    before = delivery.record.state().rejected
    try:
        with outbox.lock(SYNC_LOCK_SECONDS):
            delivery.step(only_over=only_over)
    except Exception as error:  # it must end neither training nor the delivery of other runs
        if not isinstance(error, _known_errors()):
            traceback.print_exc()
        return describe(error)
    finally:
        with suppress(OSError):
            _report_rejected(delivery.record, before)
    return None


def describe(error: Exception) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]


def sync(home: Path) -> tuple[int, dict[str, str]]:
    """Deliver the runs that are over: how many were delivered, and why others were not, by key."""
    outbox, delivered, failed = Outbox.of(home), 0, dict[str, str]()
    for record in outbox.pending():
        reason = attempt(outbox, Delivery(record), only_over=True)
        if reason is not None:
            failed[record.key] = reason
        else:
            delivered += record.state().closed
    return delivered, failed


def _known_errors() -> tuple[type[Exception], ...]:
    """What MLflow, its database and the disk raise; anything else is a mistake in the code."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError, DamagedRecordError


def _report_rejected(record: Record, before: Mapping[str, str]) -> None:
    """Print how many traces of a run MLflow has rejected, apart from those `before`."""
    reasons = [reason for number, reason in record.state().rejected.items() if number not in before]
    if reasons:
        console.say(
            f"MLflow rejected {len(reasons)} trace(s) of {record.key} ({reasons[0]}). They will not be sent "
            f"again; {record.file} keeps them"
        )

"""Delivers spools to MLflow: those of one parent as they grow (this module run), or all later (`sync`).

One thread, one run after the other, again and again: MLflow's traces know one address at a time, and runs of
one parent have one server, so that what holds up one would hold up the others anyway. Figures are drawn
when everything else has been sent.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool, pending, tell_refused

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import PipelineRun, StageRun, Store

POLL_SECONDS = 0.1
RETRY_SECONDS = 20.0
MAX_REASON = 300  # characters
UNANSWERED = re.compile("API request to .* failed with (timeout )?exception")  # MLflow's words
TAKE_SECONDS = 1.0  # who only looks whether the courier lives holds its lock for a moment
VANISHED = "the process vanished without a word (killed? out of memory?)"


class Delivery:
    """One run on its way to MLflow: what there is of it is sent until its end, and then its figures.

    After a failure all of it is tried anew; such a try sends only what MLflow lacks.
    """

    def __init__(self, spool: Spool, header: Mapping[str, Any]) -> None:
        self.spool, self.header = spool, header
        self.due = 0.0
        """By the monotonic clock, when a run that goes on is to be tried again."""
        self.store: Store | None = None
        self.is_sent = False
        """Whether MLflow has the run to its end, but perhaps for figures."""
        self._run: StageRun | PipelineRun | None = None
        self._is_live = False
        self._offset = 0  # bytes of the spool that this try has read
        self._unsent: list[dict[str, Any]] = []  # records among them that are to be sent
        self._figures: list[dict[str, Any]] = []  # those to be drawn
        self._has_end = False
        self._last_sign = int(header["time"])  # of life, in milliseconds since 1970

    def is_over(self) -> bool:
        """Whether nothing more will be logged."""
        alive = context.is_alive(self.header["process"])  # asked first: all that a process wrote is then read
        self._read()
        return self._has_end or not alive

    def _read(self) -> None:
        records, self._offset = self.spool.read(self._offset)
        self._unsent += records
        self._has_end |= any(record["kind"] == "end" for record in records)

    def step(self) -> bool:
        """Send what there is, or a figure once MLflow has all else; True once nothing is missing.

        Raises:
            Exception: one of `_troubles`, or whatever else is wrong; then all is tried anew the next time.
        """
        try:
            if not self.is_sent:
                self._send_records()
            elif self._figures:
                self._send_figure()
        except Exception:
            self._run, self.is_sent = None, False
            raise
        if self.is_sent and not self._figures:
            self.spool.close()
            return True
        self.spool.trouble.unlink(missing_ok=True)
        if self.is_sent:
            self.spool.sent.touch()
        return False

    def _send_records(self) -> None:
        run = self._run or self._begin()
        alive = context.is_alive(self.header["process"])
        self._read()
        if not self._unsent and alive:
            self._last_sign = round(time.time() * 1000)
            return
        if not self._unsent:
            end = {"status": "FAILED", "reason": VANISHED, "device": "unknown", "outs": {}}
            self.spool.append("end", **end, time=self._last_sign)
            self._read()
        self.is_sent = run.send(self._unsent, self.spool.files, last=self.spool.is_last)
        self._last_sign = self._unsent[-1]["time"]
        self._figures += [record for record in self._unsent if record["kind"] == "figure"]
        self._unsent = []
        if self.is_sent and not self._is_live and self.store is not None:
            self.store.close_left_parents()

    def _begin(self) -> StageRun | PipelineRun:
        """The run, made in MLflow or found again; all is to be sent of which MLflow lacks anything."""
        from rlhf_tasks.tracking.store import Store

        self._offset, self._unsent, self._figures = 0, [], []
        self._read()
        self._is_live = self._belongs_to_what_goes_on()
        self.store = Store.open(self.header)
        self._run = self.store.run(self.header, last=self.spool.is_last, live=self._is_live)
        return self._run

    def _belongs_to_what_goes_on(self) -> bool:
        """A dvc process, or else the run's own; of one on another machine only the run's end tells."""
        owner = self.header["parent"].get("process", self.header["process"])
        is_known = context.is_local(owner) or not self._has_end
        return self.spool.is_last and is_known and context.is_alive(owner)

    def _send_figure(self) -> None:
        from rlhf_tasks.tracking.store import send_figure

        assert self._run is not None
        send_figure(self._run, self._figures[0], self.spool.files)
        del self._figures[0]


def _troubles() -> tuple[type[Exception], ...]:
    """What MLflow, its database and the disk raise."""
    context.bound_requests()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]


class Courier:
    """Delivers the runs of one parent on this machine, until it is over and they are delivered or left."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._known = set[str]()
        """Spools that need no look any more: others', and those that are at hand or done."""
        self._open = dict[str, Delivery]()
        self._locks = dict[str, FileLock]()
        self._dvc: str | None = None
        self._store: Store | None = None

    def serve(self) -> bool:
        """Until there is nothing to do; False if another courier is at it."""
        while True:
            try:
                with FileLock(self._post.lock, timeout=TAKE_SECONDS):
                    self._attend()
            except Timeout:
                return False
            # A run that began meanwhile, and saw the lock held, starts nobody.
            self._look()
            if not self._open:
                return True

    def _attend(self) -> None:
        while True:
            self._look()
            self._round()
            if not self._open and not (self._dvc and context.is_alive(self._dvc)):
                break
            time.sleep(POLL_SECONDS)
        if self._dvc and self._store:
            with suppress(*_troubles()):
                self._store.close_left_parents()

    def _look(self) -> None:
        """Find the spools that have begun; not those that a courier has left for `sync`."""
        if all(file.stem in self._known for file in self._post.folder.glob("*.jsonl")):
            return
        for spool in pending(self._post.folder):
            if spool.name in self._known or (header := spool.header()) is None:
                continue
            self._known.add(spool.name)
            if not self._post.delivers(header):
                continue
            if header["parent"].get("owner") == "dvc":
                self._dvc = header["parent"]["process"]
            if not spool.is_left:
                self._open[spool.name] = Delivery(spool, header)

    def _round(self) -> None:
        """A step of each run, and then at most one figure."""
        drawing = [delivery for delivery in self._open.values() if delivery.is_sent]
        sending = [delivery for delivery in self._open.values() if not delivery.is_sent]
        for delivery in [*sending, *drawing[:1]]:
            self._advance(delivery)

    def _advance(self, delivery: Delivery) -> None:
        spool = delivery.spool
        if not self._takes(spool):
            return
        # Moved aside: by `rlhf sync`, before the lock was this courier's.
        is_done = spool.is_closed or self._step(delivery)
        self._store = delivery.store or self._store
        if is_done:
            del self._open[spool.name]
            self._locks.pop(spool.name).release()

    def _step(self, delivery: Delivery) -> bool:
        """What is to be done for the run now; True once it is delivered, or left for `sync`."""
        over = not context.is_alive(delivery.header["process"])
        try:
            over = delivery.is_over()
            if not over and time.monotonic() < delivery.due:
                return False
            return delivery.step()
        except Exception as error:  # a fault in the delivery of one run is not to end that of all others
            reason = _in_a_line(error)
            if not isinstance(error, _troubles()):
                traceback.print_exc()
                reason += f"; see {self._post.log}"
            delivery.spool.tell_trouble(reason, left=over)
            delivery.due = time.monotonic() + RETRY_SECONDS
            if UNANSWERED.search(reason):
                self._postpone([other for other in self._open.values() if other is not delivery], reason)
            return over

    def _postpone(self, others: Sequence[Delivery], reason: str) -> None:
        """A server that does not answer costs a timeout a try: runs that go on wait for another one too."""
        for delivery in others:
            if self._takes(delivery.spool) and not (delivery.is_sent or delivery.spool.is_closed):
                delivery.due = time.monotonic() + RETRY_SECONDS
                delivery.spool.tell_trouble(reason, left=False)

    def _takes(self, spool: Spool) -> bool:
        """Whether the run is this courier's to deliver now: another may be at it, or at its part before."""
        if spool.name not in self._locks:
            spool.lock.parent.mkdir(exist_ok=True)
            lock = FileLock(spool.lock)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            self._locks[spool.name] = lock
        return True


def sync(home: Path) -> tuple[int, dict[str, str]]:
    """Deliver the runs that are over and not wholly in MLflow: how many were, and why others were not."""
    delivered, failed = 0, {}
    for spool in pending(home / "spool"):
        try:
            if spool.is_damaged:
                reason: str | None = f"the first line of {spool.file} is damaged: mend it, or remove the file"
            elif (header := spool.header()) is None or not Delivery(spool, header).is_over():
                continue
            else:
                reason = deliver(spool)
        except Timeout:
            continue  # a courier is at it
        except Exception as error:  # a fault in the delivery of one run is not to end that of all others
            traceback.print_exc()
            reason = _in_a_line(error)
        if reason is None:
            delivered += 1
        else:
            failed[spool.name] = reason
    tell_refused(home / "spool")
    return delivered, failed


def deliver(spool: Spool) -> str | None:
    """Deliver a run that is over; None, or why that failed.

    Raises:
        Timeout: if somebody else is at it.
    """
    spool.lock.parent.mkdir(exist_ok=True)
    with FileLock(spool.lock, timeout=0):
        header = spool.header()
        if header is None:
            return None  # somebody else has delivered it meanwhile
        delivery = Delivery(spool, header)
        try:
            while not delivery.step():
                pass
        except _troubles() as error:
            return _in_a_line(error)
        return None


def main(arguments: list[str]) -> int:
    post = Post(Path(arguments[0]), arguments[1])
    if Courier(post).serve() and not post.runs():
        post.log.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # no time for taking MLflow's modules apart

"""Delivers spools to MLflow: those of one parent as they grow (this module run), or all later (`sync`).

One thread, one run after the other, again and again: MLflow's traces know one address at a time, and runs of
one parent have one server, so that what holds up one would hold up the others anyway. Figures are drawn
when everything else has been sent.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlhf_tasks.tracking import context, rendezvous
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool, pending, tell_refused

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import PipelineRun, StageRun, Store

POLL_SECONDS = 0.1
RETRY_SECONDS = 20.0
TAKE_SECONDS = 1.0  # who only looks whether the courier lives holds its lock for a moment
VANISHED = "the process vanished without a word (killed? out of memory?)"


class Delivery:
    """One run on its way to MLflow: what there is of it is sent again and again until its end.

    After a failure all of it is tried anew every so often, and a last time at the run's end; each later
    try sends only what MLflow lacks.
    """

    def __init__(self, spool: Spool, header: Mapping[str, Any]) -> None:
        self.spool, self.header = spool, header
        self.store: Store | None = None
        self._run: StageRun | PipelineRun | None = None
        self._live = False
        self._sent = self._seen = 0  # bytes: what MLflow has of this try; what was looked at for the end
        self._has_end = self._is_told = False  # told: MLflow has the end
        self._heard = int(header["time"])
        self._figures: list[dict[str, Any]] = []
        self._due = 0.0

    def is_over(self) -> bool:
        """Whether nothing more will be logged."""
        alive = context.is_alive(self.header["process"])
        records, self._seen = self.spool.read(self._seen)
        self._has_end |= any(record["kind"] == "end" for record in records)
        return self._has_end or not alive

    @property
    def is_drawing(self) -> bool:
        """Whether only the figure is missing."""
        return self._is_told

    def advance(self) -> bool:
        """Send what there is, if it is time to; True once the run is delivered, or left for `sync`."""
        if not self.spool.file.exists():
            return True  # somebody has taken it away
        over = self.is_over()
        if self._run is None and not over and time.monotonic() < self._due:
            return False
        reason = self.send()
        if reason is not None:
            self.spool.tell_trouble(reason, left=over)
            self._due = time.monotonic() + RETRY_SECONDS
            return over
        if not self._is_told:
            self.spool.trouble.unlink(missing_ok=True)
            return False
        if self._figures:
            self.spool.sent.touch()
            return False
        self.spool.close()
        return True

    def send(self) -> str | None:
        """What there is, or a figure once the rest is sent; None, or why that failed."""
        try:
            if self._is_told and self._figures:
                self._send_figure()
            else:
                self._send_records()
        except _troubles() as error:
            self._run, self._is_told = None, False
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return None

    def send_all(self) -> str | None:
        """All of a run that is over; None, or why that failed."""
        while not self._is_told or self._figures:
            reason = self.send()
            if reason is not None:
                return reason
        self.spool.close()
        return None

    def _send_records(self) -> None:
        run = self._run or self._begin()
        alive = context.is_alive(self.header["process"])
        records, offset = self.spool.read(self._sent)
        if records:
            self._heard = records[-1]["time"]
        elif alive:
            self._heard = round(time.time() * 1000)
            return
        else:
            told = {"status": "FAILED", "reason": VANISHED, "device": "unknown", "outs": {}}
            self.spool.append("end", **told, time=self._heard)
            records, offset = self.spool.read(self._sent)
        self._is_told = run.send(records, self.spool.files, last=self.spool.is_last)
        self._sent = offset
        self._figures += [record for record in records if record["kind"] == "figure"]
        if self._is_told and not self._live and self.store is not None:
            self.store.close_left_parents()

    def _begin(self) -> StageRun | PipelineRun:
        """The run, made in MLflow or found again; all is to be sent of which MLflow lacks anything."""
        from rlhf_tasks.tracking.store import Store

        self._sent, self._figures = 0, []
        self._live = self._is_live()
        self.store = Store.open(self.header)
        self._run = self.store.run(self.header, last=self.spool.is_last, live=self._live)
        return self._run

    def _is_live(self) -> bool:
        """Whether what the run belongs to goes on: a dvc process, or else the run's own.

        Of a process on another machine only the run's own end tells.
        """
        self.is_over()
        owner = self.header["parent"].get("process", self.header["process"])
        told = context.is_local(owner) or not self._has_end
        return self.spool.is_last and told and context.is_alive(owner)

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
            if rendezvous.parent_of(header) != self._post.parent or not context.is_local(header["process"]):
                continue
            if header["parent"].get("owner") == "dvc":
                self._dvc = header["parent"]["process"]
            if not spool.is_left:
                self._open[spool.name] = Delivery(spool, header)

    def _round(self) -> None:
        """A step of each run, and then at most one figure."""
        drawing = [delivery for delivery in self._open.values() if delivery.is_drawing]
        sending = [delivery for delivery in self._open.values() if not delivery.is_drawing]
        for delivery in [*sending, *drawing[:1]]:
            self._advance(delivery)

    def _advance(self, delivery: Delivery) -> None:
        spool = delivery.spool
        if not self._takes(spool):
            return
        try:
            over = delivery.advance()
        except Exception as error:  # a fault in the delivery of one run is not to end that of all others
            traceback.print_exc()
            spool.tell_trouble(f"{type(error).__name__}: {error}; see {self._post.log}", left=True)
            over = True
        self._store = delivery.store or self._store
        if over:
            del self._open[spool.name]
            self._locks.pop(spool.name).release()

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
        header = spool.header()
        if header is None or not Delivery(spool, header).is_over():
            continue
        try:
            reason = deliver(spool)
        except Timeout:
            continue  # a courier is at it
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
        return None if header is None else Delivery(spool, header).send_all()


def main(arguments: list[str]) -> int:
    post = Post(Path(arguments[0]), arguments[1])
    if Courier(post).serve() and not any(
        rendezvous.parent_of(header) == post.parent
        for spool in pending(post.folder)
        if (header := spool.header()) is not None
    ):
        post.log.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # no time for taking MLflow's modules apart

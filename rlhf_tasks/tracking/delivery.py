"""Delivers one run's record to MLflow. No torch; MLflow is imported at the first use."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.events import End, Event, Header, now
from rlhf_tasks.tracking.outbox import DamagedRecordError, Record, State

if TYPE_CHECKING:
    from rlhf_tasks.tracking.store import RemoteRun, Store

MAX_REASON = 300  # characters
VANISHED = "the process vanished without an error (killed? out of memory?)"


class Delivery:
    """One run on its way to MLflow. After a failure, the next attempt sends only what MLflow lacks.

    The methods need the outbox's lock. Another process may deliver the same run between two calls.
    """

    def __init__(self, record: Record, header: Header) -> None:
        self.record, self.header = record, header
        self.store: Store | None = None
        self.over = False
        """Whether nothing more will be logged, by the last check."""
        self._run: RemoteRun | None = None
        self._delivered = 0  # bytes that MLflow had when the lines below were read
        self._offset = 0  # bytes that were read
        self._unsent: list[Event] = []
        self._has_end = False
        self._has_figure = False
        """Whether the latest process has ordered a figure, perhaps in lines that MLflow has already."""
        self._last_sign = header["time"]  # when the process was last known to live

    def is_over(self) -> bool:
        """Whether nothing more will be logged.

        Raises:
            DamagedRecordError: if a line of the record is not JSON.
        """
        process = self.header["process"]
        ended = not context.is_alive(process)  # before reading, so that the last lines are read
        self._read()
        is_resumed = self.header["process"] != process
        self.over = self._has_end or (ended and not is_resumed)
        return self.over

    def _read(self) -> None:
        events, self._offset = self.record.read(self._offset)
        self._unsent += events
        for event in events:
            if event["kind"] == "run":  # a process has started the run, or resumed it
                self.header, self._has_end, self._has_figure, self._run = event, False, False, None
            elif event["kind"] == "end":
                self._has_end = True
            elif event["kind"] == "figure":
                self._has_figure = True

    def step(self) -> State:
        """Send what there is, or the figure once MLflow has everything else; returns the run's new state.

        Raises:
            Exception: after the failure was written to the state.
        """
        self.over = not context.is_alive(self.header["process"])
        try:
            over, state = self.is_over(), self.record.state()
            if state.closed:  # another process was faster
                return state
            if self._run is None or state.delivered != self._delivered:
                self._connect(state)
            state = self._send_figure(state) if state.ended else self._send_events(state, over=over)
        except Exception as error:
            rejected = self._run.rejected if self._run is not None else {}
            self._run, state, reason = None, self.record.state(), describe(error)
            state = replace(state, size=self.record.size(), failed=self.over, last_error=reason)
            self.record.write_state(replace(state, rejected={**state.rejected, **rejected}))
            raise
        return state

    def _connect(self, state: State) -> None:
        """Create the run in MLflow or find it, and read again what MLflow may lack."""
        context.bound_requests()
        from rlhf_tasks.tracking.store import Store

        history, self._offset = self.record.read(0, state.delivered)
        self._delivered, self._unsent = state.delivered, []
        self._read()
        is_live = self._is_pipeline_live()
        self.store = Store.open(self.header)
        self._run = self.store.run(self.header, reopen=not state.ended, live=is_live)
        self._run.resume(history, state.rejected)

    def _is_pipeline_live(self) -> bool:
        """Whether the dvc process lives, or else the run's own; on another machine, the run's end decides."""
        owner = self.header["parent"].get("process", self.header["process"])
        return context.is_alive(owner) and (context.is_local(owner) or not self._has_end)

    def _send_events(self, state: State, *, over: bool) -> State:
        assert self._run is not None
        if not self._unsent and not over:
            self._last_sign = now()
            return self._written(replace(state, last_error=None), state)
        if self._unsent:
            self._last_sign = max(self._last_sign, self._unsent[-1]["time"])
        # A run that was resumed after its end is not over.
        events = [e for i, e in enumerate(self._unsent, 1) if e["kind"] != "end" or i == len(self._unsent)]
        if over and not self._has_end:
            events.append(_vanished(self._last_sign))
        self._run.send(events, self.record.files)
        self._delivered, self._unsent = self._offset, []
        sent = State(
            delivered=self._offset,
            size=self.record.size() if over else self._offset,  # over: a last torn line is never completed
            ended=over,
            closed=over and not self._has_figure,
            rejected=self._run.rejected,
        )
        if over and self.store is not None and not self._is_pipeline_live():
            self.store.close_left_parents()
        return self._written(sent, state)

    def _send_figure(self, state: State) -> State:
        assert self._run is not None
        events, _ = self.record.read()
        figure = next(event for event in reversed(events) if event["kind"] == "figure")
        self._run.send_figure(figure, self.record.files)
        return self._written(replace(state, closed=True, failed=False, last_error=None), state)

    def _written(self, state: State, before: State) -> State:
        if state != before:
            self.record.write_state(state)
        if state.closed:
            shutil.rmtree(self.record.files, ignore_errors=True)
        return state


def _vanished(time: int) -> End:
    return End(kind="end", time=time, status="FAILED", reason=VANISHED, device="unknown", outs={})


def describe(error: Exception) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]


def known_errors() -> tuple[type[Exception], ...]:
    """What MLflow, its database and the disk raise; anything else is a mistake in the code."""
    context.bound_requests()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError, DamagedRecordError

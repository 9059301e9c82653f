"""A run per stage: metrics, sample tables, traces and artifacts, shown in MLflow. No torch or MLflow here.

A stage writes what it logs to a local record (`outbox`), a JSONL file, which is the truth. A daemon thread of
the stage reads the file as it grows and delivers it to MLflow in batches (`sync`). A server that does not
answer costs training nothing. What was not delivered is delivered by a later run of the project, or by
`rlhf sync`, which also closes the run of a vanished process as FAILED.

At its end, a stage waits until MLflow has its run, at most a minute, because its container may end with it.

A stage's final metrics keep their names. If a curve has the same name and ends at another value, the final
value is logged as `final/NAME`.

A stage that is resumed after it was killed continues its run, by the same key: its curves are those of the
snapshot, and MLflow receives the points that it lacks.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import Stage, StageView
from rlhf_tasks.project import atomic, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves, pipeline
from rlhf_tasks.tracking.events import (
    Artifact,
    Assessment,
    Figure,
    Headlines,
    Metrics,
    Notice,
    Trace,
    ending,
    now,
)
from rlhf_tasks.tracking.outbox import Outbox, Record, table_json
from rlhf_tasks.tracking.sync import Sender

WAIT_SECONDS = 60.0  # for the delivery, after a stage's end: the first one also creates the database
KILLED_WAIT_SECONDS = 3.0
MAX_SHOWN_ERROR = 120  # characters


class History:
    """Points by step; values that are logged separately for one step share a row."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self._rows: dict[int, dict[str, float]] = {}

    def replace(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._rows = {int(row[self.axis]): dict(row) for row in rows}

    def add(self, values: Mapping[str, float], step: int) -> None:
        row = self._rows.setdefault(step, {self.axis: step})
        row.update({name: value for name, value in values.items() if name != self.axis})

    def rows(self) -> list[dict[str, float]]:
        return [dict(self._rows[step]) for step in sorted(self._rows)]

    def last(self) -> dict[str, float]:
        latest: dict[str, float] = {}
        for row in self.rows():
            latest |= row
        return latest


class Tracker:
    """What a stage logs. This base keeps the curves and logs nothing else."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._history = History(curves.axis(stage))

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Add one point to each curve; `step` counts optimiser steps, in PPO episodes."""
        self._history.add({name: float(value) for name, value in values.items()}, step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the sample table `name`."""

    def event(self, name: str, text: str, *, step: int) -> None:
        """Log something that a person should see: a tag of that name, and a row of the table `events`."""

    def trace(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        start: int,
        end: int,
        assessments: Sequence[Assessment] = (),
    ) -> None:
        """Log a call of a model, with times in milliseconds since 1970. An output `failure` marks it.

        `assessments` are what a judge and people say of the reply.
        """

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run. Checkpoints do not belong here: DVC keeps them."""

    def final(self, values: Mapping[str, float]) -> None:
        """Log the stage's results, by which runs are compared."""

    def history(self) -> list[dict[str, float]]:
        """The curves so far: a dict per step, with the x axis (`step` or `episode`) first."""
        return self._history.rows()

    def state_dict(self) -> dict[str, Any]:
        """The curves and tables so far, in plain types."""
        return {"history": self.history(), "tables": "{}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these curves and tables; what was logged after them is dropped."""
        self._history.replace(state["history"])


class NullTracker(Tracker):
    """For all ranks but the first, and for `tracking.enabled: false`."""


class RecordTracker(Tracker):
    """Writes the run's local record, which a thread delivers."""

    def __init__(self, stage: Stage, record: Record) -> None:
        super().__init__(stage)
        self._stage, self._record = stage, record
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._has_reported = False
        self.sender: Sender | None = None
        """None until the record has begun."""

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        super().metrics(values, step=step)
        point = {name: float(value) for name, value in values.items()}
        self._record.append(Metrics(kind="metrics", time=now(), step=step, values=point))
        shown = {name: point[name] for name in curves.HEADLINES if name in point}
        if shown and self._stage == "ppo":
            self._record.append(Headlines(kind="headlines", time=now(), step=step, values=shown))
        self.report_error()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tables.setdefault(name, []).extend(dict(row) for row in rows)
        self._keep_table(name)

    def _keep_table(self, name: str) -> None:
        file = f"tables/{name}.json"
        atomic.write_text(self._record.files / file, table_json(self._tables[name]))
        self._append_artifact(file, "tables", table=True)

    def _append_artifact(self, file: str, folder: str | None, *, table: bool) -> None:
        artifact = Artifact(kind="artifact", time=now(), file=file, folder=folder, table=table)
        self._record.append(artifact)

    def event(self, name: str, text: str, *, step: int) -> None:
        self._record.append(Notice(kind="event", time=now(), name=name, text=text, step=step))
        self.table("events", [{self._history.axis: step, "event": name, "text": text}])

    def trace(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        start: int,
        end: int,
        assessments: Sequence[Assessment] = (),
    ) -> None:
        trace = Trace(
            kind="trace", time=now(), name=name, number=secrets.token_hex(6), inputs=dict(inputs),
            outputs=dict(outputs), start=start, end=end, assessments=list(assessments),
        )  # fmt: skip
        self._record.append(trace)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        file = self._record.copy(path, folder)
        self._append_artifact(file, folder, table=False)

    def final(self, values: Mapping[str, float]) -> None:
        latest = self._history.last()
        step = int(latest.get(self._history.axis, 0))
        point = {
            name if name not in latest else f"final/{name}": value
            for name, value in values.items()
            if latest.get(name) != value
        }
        self._record.append(Metrics(kind="metrics", time=now(), step=step, values=point))
        shown = curves.results(self._stage, values)
        self._record.append(Headlines(kind="headlines", time=now(), step=None, values=shown))

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history(), "tables": json.dumps(self._tables, default=str)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._tables = json.loads(state["tables"])
        for name in self._tables:
            self._keep_table(name)

    def keep_curves(self) -> None:
        """Keep the curves as CSV, and order one figure of them: MLflow's charts have no preset layout."""
        rows = self.history()
        if not rows:
            return
        axis, file = self._history.axis, f"{self._stage}.csv"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / file).write_text(curves.csv_text(rows, axis), encoding="utf-8")
            self.artifact(Path(folder) / file, "plots")
        table = f"plots/{file}"
        figure = Figure(kind="figure", time=now(), file="curves.png", table=table, stage=self._stage)
        self._record.append(figure)

    def report_error(self, reason: str | None = None) -> None:
        """Print once that MLflow does not receive what is logged: the last error, or `reason`."""
        if self._has_reported:
            return
        reason = (self.sender.error if self.sender else None) or reason
        if reason is not None:
            self._has_reported = True
            console.say(
                f"MLflow cannot be reached ({reason[:MAX_SHOWN_ERROR]}). Training continues, and metrics are "
                f"kept in {self._record.file}. What MLflow lacks at the end is sent by `rlhf sync`"
            )


@contextmanager
def open_run(paths: Paths, stage: Stage, view: StageView, *, key: str | None = None) -> Iterator[Tracker]:
    """A stage's run: FINISHED when the block ends, FAILED with the reason on an error, KILLED on Ctrl-C.

    `key` names the run (tag `rlhf.run`), by default a new one; an existing run of that key is continued.
    """
    if not view.tracking.enabled or not context.is_main_rank():
        yield NullTracker(stage)
        return
    key = key or lineage.new_key(stage)
    outbox = Outbox.of(paths.home)
    record = outbox.record(key)
    header = context.header(paths, stage, view, key)
    record.begin(header)
    tracker = RecordTracker(stage, record)
    tracker.sender = Sender(outbox, record)
    tracker.sender.start()
    error, outs, repro = None, dict[str, str](), None
    try:
        yield tracker
        tracker.keep_curves()
        outs = lineage.out_hashes(paths, stage)
        if header["last"] and header["parent"]["owner"] in ("dvc", "stage"):
            repro = Sender(outbox, pipeline.log_repro(paths, outbox, header))
            repro.start()
    except BaseException as raised:
        error = raised
        raise
    finally:
        # At once: the launcher of a failed stage ends its other processes without waiting long.
        end = ending(error, device=context.device(), outs=outs)
        record.append(end)
        seconds = KILLED_WAIT_SECONDS if end["status"] == "KILLED" else WAIT_SECONDS
        for sender in filter(None, (tracker.sender, repro)):
            if not sender.close(seconds):
                tracker.report_error(sender.error or f"no answer within {seconds:.0f} seconds")

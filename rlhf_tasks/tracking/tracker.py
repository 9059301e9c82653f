"""A run per stage: metrics, sample tables and artifacts, shown in MLflow. No torch or MLflow here.

A stage writes what it logs to a local record (`record`), a JSONL file, the source of truth for logging. A
daemon thread of the stage reads the file as it grows and delivers it to MLflow in batches (`sync`). An
unreachable server does not slow training. What was not delivered is delivered by a later run of the project,
or by `rlhf sync`, which also closes the run of a vanished process as FAILED.

At its end, a stage waits until MLflow has its run, at most a minute, because its container may end with it.

A stage's final metrics keep their names. If a curve has the same name and ends at another value, the final
value is logged as `final/NAME`.

A stage that is resumed after it was killed continues its run, by the same key: its curves are those of the
snapshot, and MLflow receives the points that it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_tasks.config import STAGES, Stage, StageView
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves, pipeline
from rlhf_tasks.tracking.record import NullRecord, Record, as_text
from rlhf_tasks.tracking.sync import deliver_run


class Tracker:
    """What a stage logs: the curves and tables so far, and the record that MLflow gets."""

    def __init__(self, stage: Stage, record: Record) -> None:
        self._stage, self._record, self._axis = stage, record, curves.axis(stage)
        self._rows: dict[int, dict[str, float]] = {}
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self.facts: Mapping[str, str] = {}  # of the whole pipeline, which stage report knows

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Add one point to each curve; `step` counts optimizer steps, in PPO episodes.

        Values that are logged separately for one step share a row.
        """
        point = {name: float(value) for name, value in values.items()}
        row = self._rows.setdefault(step, {self._axis: step})
        row.update({name: value for name, value in point.items() if name != self._axis})
        self._record.append("metrics", step=step, values=point)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the sample table `name`, which MLflow shows as a table and as text."""
        self._tables.setdefault(name, []).extend(dict(row) for row in rows)
        self._keep_table(name)

    def _keep_table(self, name: str) -> None:
        rows = self._tables[name]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = [[row.get(column) for column in columns] for row in rows]  # null: the row has no such value
        text = json.dumps({"columns": columns, "data": data}, default=str, ensure_ascii=False)
        self._record.keep(f"tables/{name}.json", text, table=True)
        self._record.keep(f"tables/{name}.txt", as_text(rows))

    def event(self, name: str, text: str, *, step: int) -> None:
        """Log something that a person should see: a tag of that name, and a row of the table `events`."""
        self._record.append("event", name=name, text=text, step=step)
        self.table("events", [{self._axis: step, "event": name, "text": text}])

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file with the run. Checkpoints do not belong here: DVC keeps them."""
        self._record.keep(path.name, path)

    def final(self, values: Mapping[str, float]) -> None:
        """Log the stage's results, by which runs are compared."""
        latest: dict[str, float] = {}
        for row in self.history():
            latest |= row
        point = {
            name if name not in latest else f"final/{name}": value
            for name, value in values.items()
            if latest.get(name) != value
        }
        self._record.append("metrics", step=0, values=point)
        self._record.append("results", values=curves.results(self._stage, values))

    def history(self) -> list[dict[str, float]]:
        """The curves so far: a dict per step, with the x axis (`step` or `episode`) first."""
        return [dict(self._rows[step]) for step in sorted(self._rows)]

    def state_dict(self) -> dict[str, Any]:
        """The curves and tables so far, in plain types."""
        return {"history": self.history(), "tables": json.dumps(self._tables, default=str)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these curves and tables; what was logged after them is dropped."""
        self._rows = {int(row[self._axis]): dict(row) for row in state["history"]}
        self._tables = json.loads(state["tables"])
        for name in self._tables:
            self._keep_table(name)


class NullTracker(Tracker):
    """For all ranks but the first, and for `tracking.enabled: false`: it keeps the curves."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, NullRecord(Path(), ""))


@contextmanager
def open_run(paths: Paths, stage: Stage, view: StageView, *, key: str) -> Iterator[Tracker]:
    """A stage's run: FINISHED when the block ends, FAILED with the reason on an error, KILLED on Ctrl-C.

    `key` names the run (tag `rlhf.run`); an existing run of that key is continued.
    """
    if not view.tracking.enabled or not context.is_main_rank():
        yield NullTracker(stage)
        return
    record = Record(paths.home, key)
    header = context.header(paths, stage, view, record.key)
    with deliver_run(record, header) as sender:
        tracker = Tracker(stage, record)
        try:
            yield tracker
        finally:
            record.append("tags", values={"device": context.device()})  # only now is torch loaded
        if rows := tracker.history():
            record.keep(f"plots/{stage}.csv", curves.csv_text(rows, curves.axis(stage)))
        if (file := paths.lineage(stage)).exists():
            record.keep("lineage.json", file)
        if stage == STAGES[-1] and header["parent"]["owner"] != "flow":
            sender.also.append(pipeline.log_repro(paths, header, tracker.facts))

"""A run per stage: metrics, sample tables and artifacts, seen in MLflow. No torch here, nor MLflow.

What a stage logs goes to a local spool first (`.rlhf/spool/KEY.jsonl`), which is the truth. A courier,
a process of its own, reads the spool as it grows and delivers it to MLflow, so that neither MLflow's
import nor a server that is gone costs training anything; what was not delivered stays in the spool
for `rlhf sync`. A trainer that vanishes is noticed by its courier, and its run shown as FAILED.

All stages of one flow, or of one dvc process, have one courier, which lives as long as that (`rendezvous`):
MLflow is imported once. A stage waits at its end until MLflow has its run, with the figure of its curves,
which the courier draws from their table (`courier`): the container may go with the stage. In a flow, which
waits for all figures at its own end, a stage does not wait for its figure.

A stage's final metrics are logged under their own names, unless that name already has a curve: then
nothing is added if the curve ends at the same value, and else the final one is `final/NAME`.

A stage that goes on after it was killed goes on with its run, by the same key: the curves are as they
were at the snapshot, the spool is another part (`KEY.2.jsonl`), and MLflow gets the points it lacks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlhf_tasks import console
from rlhf_tasks.config import Stage, StageView
from rlhf_tasks.project import atomic, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves, rendezvous
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool, table_json, tell_refused

WAIT_SECONDS = 60.0  # for the courier, after a stage's end: a first delivery also makes the database
KILLED_WAIT_SECONDS = 3.0  # a killed run's courier finishes by itself
SHOWN_REASON = 120  # characters

HEADLINES: Mapping[str, tuple[str, ...]] = {
    "sft": ("perplexity",),
    "reward": ("accuracy",),
    "ppo": ("objective/kl", "objective/scores", "selected_episode"),
    "judge": ("/win_rate",),
    "verdict": ("gate/passed",),
}  # final metrics that the pipeline's own run shows too; with a slash in front: all that end so


class Tracker(Protocol):
    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """One point of each curve; `step` counts optimiser steps, in PPO episodes."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the sample table `name`."""

    def event(self, name: str, text: str, *, step: int) -> None:
        """Something to be seen at once: a tag of that name, and a row of the table `events`."""

    def trace(
        self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, start: int, end: int
    ) -> None:
        """A call of a model, with times in milliseconds since 1970; an output `failure` marks one."""

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run; not for checkpoints, which DVC keeps."""

    def final(self, values: Mapping[str, float]) -> None:
        """The stage's results, by which runs are compared."""

    def history(self) -> list[dict[str, float]]:
        """The curves so far: a dict per step, its x axis (`step` or `episode`) first."""

    def state_dict(self) -> dict[str, Any]:
        """The curves and tables so far, in plain types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to these: what was logged after them is forgotten."""


class History:
    """Points by step; values logged apart for one step share a row."""

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


class NullTracker:
    """Keeps the curves and sends nothing: for ranks but the first, and `tracking.enabled: false`."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._history = History(curves.axis(stage))

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._history.add({name: float(value) for name, value in values.items()}, step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def event(self, name: str, text: str, *, step: int) -> None:
        pass

    def trace(
        self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, start: int, end: int
    ) -> None:
        pass

    def artifact(self, path: Path, folder: str | None = None) -> None:
        pass

    def final(self, values: Mapping[str, float]) -> None:
        pass

    def history(self) -> list[dict[str, float]]:
        return self._history.rows()

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history(), "tables": "{}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.replace(state["history"])


class SpoolTracker:
    """Writes the spool; see `courier` for what becomes of it."""

    def __init__(self, stage: Stage, spool: Spool) -> None:
        self._stage, self._spool = stage, spool
        self._history = History(curves.axis(stage))
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._num_traces = 0
        self._told = False

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        point = {name: float(value) for name, value in values.items()}
        self._history.add(point, step)
        self._spool.append("metrics", step=step, values=point)
        self.tell_trouble()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tables.setdefault(name, []).extend(dict(row) for row in rows)
        self._keep_table(name)

    def _keep_table(self, name: str) -> None:
        kept = self._spool.files / "tables" / f"{name}.json"
        atomic.write_text(kept, table_json(self._tables[name]))
        self._spool.append("artifact", file=f"tables/{name}.json", folder="tables", table=True)

    def event(self, name: str, text: str, *, step: int) -> None:
        self._spool.append("event", name=name, text=text, step=step)
        self.table("events", [{self._history.axis: step, "event": name, "text": text}])

    def trace(
        self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, start: int, end: int
    ) -> None:
        self._spool.append(
            "trace",
            name=name,
            number=self._num_traces,
            inputs=dict(inputs),
            outputs=dict(outputs),
            start=start,
            end=end,
        )
        self._num_traces += 1

    def artifact(self, path: Path, folder: str | None = None) -> None:
        name = f"{folder}/{path.name}" if folder else path.name
        kept = self._spool.files / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        self._spool.append("artifact", file=name, folder=folder, table=False)

    def final(self, values: Mapping[str, float]) -> None:
        latest = self._history.last()
        step = int(latest.get(self._history.axis, 0))
        point = {
            name if name not in latest else f"final/{name}": value
            for name, value in values.items()
            if latest.get(name) != value
        }
        self._spool.append("metrics", step=step, values=point)
        wanted = HEADLINES.get(self._stage, ())
        headlines = {
            name if "/" in name else f"{self._stage}/{name}": value
            for name, value in values.items()
            if name in wanted or name.endswith(tuple(w for w in wanted if w.startswith("/")))
        }
        self._spool.append("headlines", values=headlines)

    def history(self) -> list[dict[str, float]]:
        return self._history.rows()

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history(), "tables": json.dumps(self._tables, default=str)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.replace(state["history"])
        self._tables = json.loads(state["tables"])
        for name in self._tables:
            self._keep_table(name)

    def keep_curves(self) -> None:
        """The curves as CSV, and as one figure to be drawn: MLflow's charts cannot be laid out from here."""
        rows = self.history()
        if not rows:
            return
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / f"{self._stage}.csv"
            table.write_text(curves.csv_text(rows, self._history.axis), encoding="utf-8")
            self.artifact(table, "plots")
        self._spool.append(
            "figure",
            file="curves.png",
            table=f"plots/{self._stage}.csv",
            title=self._stage,
            axis=self._history.axis,
        )

    def tell_trouble(self, fault: str | None = None) -> None:
        """Say once that MLflow does not take what is logged, or by what `fault` no courier delivers it."""
        if self._told:
            return
        reason = self._spool.reason
        if reason is not None or fault is not None:
            self._told = True
            told = reason[:SHOWN_REASON] if reason is not None else fault
            console.say(
                f"MLflow cannot be reached ({told}); training goes on, metrics are kept in "
                f"{self._spool.file}; what is missing at the end is sent by `rlhf sync`"
            )


@contextmanager
def open_run(stage: Stage, view: StageView, *, key: str | None = None) -> Iterator[Tracker]:
    """A stage's run: FINISHED when the block ends, FAILED with the reason on an error, KILLED on Ctrl-C.

    `key` names the run (tag `rlhf.run`), by default a new one; a run of that key is gone on with.
    """
    if not view.tracking.enabled or not context.is_main_rank():
        yield NullTracker(stage)
        return
    key = key or lineage.new_key(stage)
    spool = Spool.next_part(Paths().home / "spool", key)
    header = context.header(stage, view, key)
    spool.append("run", **header)
    post = Post.of(spool)
    tracker = SpoolTracker(stage, spool)
    courier = _start_courier(post, tracker)
    status, reason, outs = "FINISHED", "", dict[str, str]()
    try:
        yield tracker
        tracker.keep_curves()
        outs = lineage.out_hashes(Paths(), stage)
    except KeyboardInterrupt as error:
        status, reason = "KILLED", str(error) or "interrupted"
        raise
    except BaseException as error:
        status, reason = "FAILED", f"{type(error).__name__}: {error}"
        raise
    finally:
        # At once: the launcher of a failed stage ends its other processes without waiting long.
        spool.append("end", status=status, reason=reason, device=context.device(), outs=outs)
        seconds = KILLED_WAIT_SECONDS if status == "KILLED" else WAIT_SECONDS
        in_flow = header["parent"].get("owner") == "flow"
        is_done = partial(_is_delivered_or_left, spool, with_figure=not in_flow)
        delivered = rendezvous.await_delivery(is_done, post, courier, seconds)
        tracker.tell_trouble(None if delivered and not spool.is_left else f"see {post.log}")
        tell_refused(spool.folder)


def _start_courier(post: Post, tracker: SpoolTracker) -> subprocess.Popen[bytes] | None:
    try:
        return rendezvous.start_courier(post)
    except OSError as error:  # the disk knows no locks, or the folder is another user's
        tracker.tell_trouble(f"no courier could be started: {error}")
        return None


def _is_delivered_or_left(spool: Spool, *, with_figure: bool) -> bool:
    return spool.is_left or (spool.is_closed if with_figure else spool.is_sent)

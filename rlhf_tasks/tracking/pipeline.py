"""The run of a whole pipeline, under which MLflow shows its stages. No torch or MLflow here.

A flow's pipeline has a record of its own, as a stage has, and a thread that delivers it. Under a plain
`dvc repro`, stage `report` writes that record at the end: only the curves of DPO and PPO are sent before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks import config
from rlhf_tasks.config import STAGES, Tracking
from rlhf_tasks.project import git, processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves
from rlhf_tasks.tracking.record import (
    PIPELINE,
    REPORT,
    SAMPLES,
    DamagedRecordError,
    NullRecord,
    Record,
    as_text,
    pending,
)
from rlhf_tasks.tracking.sync import Sender, attempt, deliver_run, new_delivery

NAME, NOTE = "mlflow.runName", "mlflow.note.content"
NUM_SAMPLES = 20
LINKS_SECONDS = 10.0  # until MLflow has the flow's run


class Pipeline:
    """What a flow logs."""

    def __init__(self, record: Record, settings: Tracking, parent: str, sender: Sender | None) -> None:
        self._record, self._settings, self._parent, self._sender = record, settings, parent, sender

    def tags(self, values: Mapping[str, str]) -> None:
        self._record.append("tags", values=dict(values))

    def results(self, paths: Paths) -> None:
        """Log what the folder holds: the policy's curves, the stages' results, samples, verdict, report."""
        for stage in STAGES:
            names, file = curves.HEADLINES.get(stage, {}), paths.curves(stage)
            if names and file.exists() and (rows := curves.read_csv(file.read_text(encoding="utf-8"))):
                for row in rows:
                    if values := {there: row[name] for name, there in names.items() if name in row}:
                        self._record.append("metrics", step=int(row[curves.axis(stage)]), values=values)
                self._record.keep(f"plots/{stage}.csv", file)  # the last one's figure is shown
            if (file := paths.metrics(stage)).exists():
                metrics = config.flatten(json.loads(file.read_text(encoding="utf-8")))
                self._record.append("results", values=curves.results(stage, metrics))
        if paths.judged_responses.exists():
            import pyarrow.parquet as pq

            table = pq.read_table(paths.judged_responses).slice(0, NUM_SAMPLES)
            read = [name for name in table.column_names if name.rpartition("/")[2] not in ("index", "base")]
            self._record.keep(SAMPLES, as_text(table.select(read).to_pylist()))
        self.tags(gate(paths))
        if (report := paths.reports / "index.html").exists():
            self._record.keep(REPORT, report)

    def last_error(self) -> str | None:
        """Why MLflow does not receive the run or one of its stages; None if it receives all of them."""
        for record in _pending_of(self._record.home, self._parent) if self._sender else ():
            if (reason := record.state()["last_error"]) is not None:
                return str(reason)
            if record != self._record:
                return f"{record.key} is not delivered"
        return None

    def pages(self, keys: Mapping[str, str]) -> dict[str, str]:
        """`{stage: address}` of the pages of the runs with these keys, `pipeline` for this run, and REPORT.

        The result is empty if no server is known, or it does not answer: a missing link must not fail a run.
        """
        uri = context.uri(self._settings)
        server = os.environ.get(context.MLFLOW_URL) or (uri if uri and uri.startswith("http") else None)
        if server is None or self._sender is None or not self._sender.has_tried.wait(LINKS_SECONDS):
            return {}
        from rlhf_tasks.tracking import runs

        tags = {stage: ("rlhf.run", key) for stage, key in keys.items()}
        named = {**tags, PIPELINE: ("rlhf.pipeline", self._parent)}
        found = runs.pages(uri, self._record.home, self._settings.experiment, server, named)
        if PIPELINE in found:
            found[REPORT] = found[PIPELINE].replace("?", f"/artifacts/{REPORT}?")
        return found


def _pending_of(home: Path, parent: str) -> Iterator[Record]:
    """The records of a pipeline, its own and its stages', that MLflow does not have completely."""
    for record in pending(home):
        with suppress(DamagedRecordError, FileNotFoundError):
            if record.header().get("parent", {}).get("key") == parent:
                yield record


def close_killed(home: Path, flow_run: str) -> None:
    """Deliver what a killed flow run and its stages could not deliver, and their end."""
    for record in _pending_of(home, key(flow_run)):
        attempt(new_delivery(record), only_over=True)


def note(facts: Mapping[str, str | None]) -> str:
    """The description of a run in MLflow, of which pages show three lines at first."""
    return "\n".join(f"- **{name}:** {text}" for name, text in facts.items() if text)


def gate(paths: Paths) -> dict[str, str]:
    """The gate's verdict as a tag, if there is one."""
    file = paths.metrics("verdict")
    passed = json.loads(file.read_text(encoding="utf-8")).get("gate/passed") if file.exists() else None
    return {} if passed is None else {"verdict": "passed" if passed else "refused"}


def log_repro(paths: Paths, header: Mapping[str, Any], facts: Mapping[str, str]) -> Record:
    """The record of the pipeline of a `dvc repro`, by the header of its last stage and what that knows."""
    record, settings = Record(paths.home, f"{header['key']}-{PIPELINE}"), config.load(paths.params)
    own = {"key": record.key, "stage": PIPELINE, "parameters": {}, "inputs": {}}
    record.begin({**header, **own})
    pipeline = Pipeline(record, settings.tracking, header["parent"]["key"], None)
    pipeline.results(paths)
    pipeline.tags({NOTE: note({**facts, "DVC experiment": header["parent"].get("dvc.exp")})})
    record.append("end", status="FINISHED", reason="")
    return record


def key(flow_run: str) -> str:
    """The name by which stages find their pipeline (`RLHF_PARENT_RUN`, tag `rlhf.pipeline`)."""
    return f"prefect-{flow_run}"


@contextmanager
def open_run(paths: Paths, flow_run: str, settings: Tracking, tags: Mapping[str, str]) -> Iterator[Pipeline]:
    """FINISHED when the block ends, FAILED with the reason on an error, KILLED on a signal."""
    if not settings.enabled:
        yield Pipeline(NullRecord(paths.home, ""), settings, "", None)
        return
    record = Record(paths.home, f"flow-{flow_run}")
    header = {
        "key": record.key,
        "stage": PIPELINE,
        "uri": context.uri(settings),
        "experiment": settings.experiment,
        "process": processes.name_of(psutil.Process()),
        "parent": {"key": key(flow_run), "owner": "flow", "prefect.flow_run_id": flow_run},
        "parameters": {},
        "inputs": {},
        "tags": {"git.rev": git.commit(paths.root) or "none"},
    }
    with deliver_run(record, header) as sender:
        pipeline = Pipeline(record, settings, key(flow_run), sender)
        pipeline.tags(tags)
        yield pipeline

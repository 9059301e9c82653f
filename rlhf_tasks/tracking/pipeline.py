"""The run of a whole pipeline, under which MLflow shows its stages. No torch or MLflow here.

A flow's pipeline has a record of its own, as a stage has, and a thread that delivers it. Under a plain
`dvc repro`, stage `report` writes that record at the end: only the curves of PPO are sent before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil

from rlhf_tasks import config
from rlhf_tasks.config import STAGES, Tracking
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves
from rlhf_tasks.tracking.events import (
    PIPELINE,
    REPORT_PAGE,
    Artifact,
    Figure,
    Header,
    Headlines,
    Tags,
    ending,
    now,
)
from rlhf_tasks.tracking.outbox import DamagedRecordError, Outbox, Record
from rlhf_tasks.tracking.sync import Sender

NAME, NOTE = "mlflow.runName", "mlflow.note.content"
WAIT_SECONDS, KILLED_WAIT_SECONDS = 10.0, 1.0  # for the delivery, at the flow's end


class Pipeline:
    """What a flow logs. This base logs nothing, for `tracking.enabled: false`."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Tag the run."""

    def results(self, paths: Paths) -> None:
        """Log what the folder holds: PPO's curves, the results of all stages, the report."""

    def last_error(self) -> str | None:
        """Why MLflow does not receive the run or one of its stages; None if it receives all of them."""
        return None


class RecordPipeline(Pipeline):
    """Writes the flow's local record, which a thread delivers."""

    def __init__(self, outbox: Outbox, record: Record, parent: str) -> None:
        self._outbox, self._record, self._parent = outbox, record, parent

    def tags(self, values: Mapping[str, str]) -> None:
        self._record.append(Tags(kind="tags", time=now(), values=dict(values)))

    def _artifact(self, path: Path, folder: str | None = None) -> None:
        file = self._record.copy(path, folder)
        artifact = Artifact(kind="artifact", time=now(), file=file, folder=folder, table=False)
        self._record.append(artifact)

    def results(self, paths: Paths) -> None:
        if (table := paths.curves("ppo")).exists():
            for row in curves.read_csv(table.read_text(encoding="utf-8")):
                values = {name: row[name] for name in curves.HEADLINES if name in row}
                self._headlines(int(row[curves.axis("ppo")]), values)
            self._artifact(table, "plots")
            figure = Figure(
                kind="figure", time=now(), file="curves.png", table=f"plots/{table.name}", stage="ppo"
            )
            self._record.append(figure)
        for stage in STAGES:
            if (file := paths.metrics(stage)).exists():
                values = config.flatten(json.loads(file.read_text(encoding="utf-8")))
                self._headlines(None, curves.results(stage, values))
        if (report := paths.reports / "index.html").exists():
            self._artifact(report, "report")

    def _headlines(self, step: int | None, values: Mapping[str, float]) -> None:
        if values:
            self._record.append(Headlines(kind="headlines", time=now(), step=step, values=dict(values)))

    def last_error(self) -> str | None:
        for record in self._outbox.pending():
            if _parent_of(record) == self._parent:
                if (reason := record.state().last_error) is not None:
                    return reason
                if record != self._record:
                    return f"{record.key} is not delivered"
        return None


def note(facts: Mapping[str, str | None], *, has_report: bool = False) -> str:
    """The description of a run in MLflow: what it is, and where the rest of it is found."""
    report = {"report": f"[open the report]({REPORT_PAGE})"} if has_report else {}
    lines = [f"- **{name}:** {text}" for name, text in {**facts, **report}.items() if text]
    return "\n".join(["One run of the pipeline: SFT, reward model, PPO, judge.\n", *lines])


def log_repro(paths: Paths, outbox: Outbox, header: Header) -> Record:
    """The record of the pipeline of a `dvc repro`, by the header of its last stage."""
    record = outbox.record(f"{header['key']}-{PIPELINE}")
    own = {"key": record.key, "stage": PIPELINE, "parameters": {}, "inputs": {}}
    record.begin(cast("Header", header | own))
    pipeline = RecordPipeline(outbox, record, header["parent"]["key"])
    pipeline.results(paths)
    commit, is_changed = header["tags"]["git.rev"], header["tags"]["git.dirty"] == "true"
    verdict = paths.metrics("verdict")
    passed = json.loads(verdict.read_text(encoding="utf-8")).get("gate/passed") if verdict.exists() else None
    facts = {
        "seed": str(config.load(paths.params).seed),
        "commit": f"{commit}, with uncommitted changes" if is_changed else commit,
        "DVC experiment": header["parent"].get("dvc.exp"),
        "verdict": None if passed is None else f"the gate {'accepts' if passed else 'refuses'} the policy",
    }
    pipeline.tags({NOTE: note(facts, has_report=True)})
    record.append(ending(None))
    return record


def _parent_of(record: Record) -> str | None:
    try:
        header = record.header()
    except DamagedRecordError:
        return None
    return None if header is None else header["parent"].get("key")


def key(flow_run: str) -> str:
    """The name by which stages find their pipeline (`RLHF_PARENT_RUN`, tag `rlhf.pipeline`)."""
    return f"prefect-{flow_run}"


@contextmanager
def open_run(paths: Paths, flow_run: str, settings: Tracking, tags: Mapping[str, str]) -> Iterator[Pipeline]:
    """FINISHED when the block ends, FAILED with the reason on an error, KILLED on a signal."""
    if not settings.enabled:
        yield Pipeline()
        return
    outbox = Outbox.of(paths.home)
    record = outbox.record(f"flow-{flow_run}")
    record.begin(_header(paths, flow_run, settings))
    sender = Sender(outbox, record)
    sender.start()
    pipeline = RecordPipeline(outbox, record, key(flow_run))
    pipeline.tags(tags)
    error = None
    try:
        yield pipeline
    except BaseException as raised:
        error = raised
        raise
    finally:
        end = ending(error)
        record.append(end)
        seconds = KILLED_WAIT_SECONDS if end["status"] == "KILLED" else WAIT_SECONDS
        sender.close(seconds)


def _header(paths: Paths, flow_run: str, settings: Tracking) -> Header:
    return Header(
        kind="run",
        time=now(),
        key=f"flow-{flow_run}",
        stage=PIPELINE,
        last=True,
        home=str(paths.home),
        uri=context.uri(settings),
        experiment=settings.experiment,
        process=context.process_name(psutil.Process()),
        parent={"key": key(flow_run), "owner": "flow", "prefect.flow_run_id": flow_run},
        parameters={},
        inputs={},
        tags={"git.rev": git.revision(paths.root) or "none"},
    )

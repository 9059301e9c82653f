"""The run of a whole flow, under which MLflow shows its stages. No torch or MLflow here.

It has a record of its own, as a stage has. The flow starts the uploader, so that MLflow is imported early. At
its end, the flow waits until its runs are delivered or have failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from rlhf_tasks import console
from rlhf_tasks.config import Tracking
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, uploader
from rlhf_tasks.tracking.events import PIPELINE, Artifact, Header, Tags, ending, now
from rlhf_tasks.tracking.outbox import DamagedRecordError, Outbox, Record

WAIT_SECONDS, KILLED_WAIT_SECONDS = 10.0, 1.0  # for the delivery, at the flow's end


class Pipeline:
    """What a flow logs. This base logs nothing, for `tracking.enabled: false`."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Tag the run."""

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run."""

    def last_error(self) -> str | None:
        """Why MLflow does not receive the run or one of its stages; None if it receives all of them."""
        return None


class RecordPipeline(Pipeline):
    """Writes the flow's local record, which the uploader delivers."""

    def __init__(self, outbox: Outbox, record: Record, parent: str) -> None:
        self._outbox, self._record, self._parent = outbox, record, parent

    def tags(self, values: Mapping[str, str]) -> None:
        self._record.append(Tags(kind="tags", time=now(), values=dict(values)))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        file = self._record.copy(path, None)
        artifact = Artifact(kind="artifact", time=now(), file=file, folder=folder, table=False)
        self._record.append(artifact)

    def last_error(self) -> str | None:
        is_running = uploader.is_running(self._outbox)
        for record in self.pending():
            if (reason := record.state().last_error) is not None:
                return reason
            if not is_running and record != self._record:
                return f"no uploader runs, and {record.key} is not delivered"
        return None

    def pending(self) -> list[Record]:
        """The records of the run and of its stages that MLflow does not have completely."""
        return [record for record in self._outbox.pending() if _parent_of(record) == self._parent]


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
    process = uploader.start_or_report(outbox, _report)
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
        states = [record.state for record in pipeline.pending()]
        uploader.wait(outbox, lambda: all(s().closed or s().failed for s in states), process, seconds)


def _report(reason: str) -> None:
    console.say(f"MLflow receives nothing before `rlhf sync`: {reason}")


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

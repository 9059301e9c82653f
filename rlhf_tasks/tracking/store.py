"""MLflow, seen from the courier: one run per stage, under one run per pipeline. Imports MLflow; no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME

from rlhf_tasks.tracking import context, curves, refusals
from rlhf_tasks.tracking.spool import Spool

BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's limits for one request
MAX_PARAM, MAX_TAG = 6000, 5000  # characters
MAX_DIGEST = 36  # `….dir` just fits
PIPELINE = "pipeline"  # stands for the stage in the spool of a flow
REASON = "rlhf.reason"  # why a run was killed or failed
EXPERIMENT = "dvc.exp"
TRACE_TAG, MAX_TRACES = "rlhf.trace", 500  # a trace's number in its run; MLflow's limit for one page
REFUSED_TAG = "rlhf.refused_traces"
FIGURE_TAG = "rlhf.figure"  # why a run has none
TABLES_TAG = "mlflow.loggedArtifacts"  # by it the dashboard finds sample tables


def embedded_uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@dataclass(frozen=True)
class Store:
    client: MlflowClient
    experiment: str
    lock: FileLock  # over whatever two stages that start at once would both create

    @classmethod
    def open(cls, header: Mapping[str, Any]) -> Store:
        """Connect; the embedded database and the experiment are made the first time."""
        home = Path(header["home"])
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / "mlflow.lock")
        with lock:
            client = MlflowClient(header["uri"] or embedded_uri(home))
            known = client.get_experiment_by_name(header["experiment"])
            if known is not None:
                experiment = known.experiment_id
            else:
                location = None if header["uri"] else (home / "mlartifacts").as_uri()
                experiment = client.create_experiment(header["experiment"], artifact_location=location)
        store = cls(client, str(experiment), lock)
        store.close_left_parents()
        return store

    def find(self, tag: str, value: str) -> str | None:
        found = self.client.search_runs([self.experiment], f"tags.`{tag}` = '{value}'", max_results=1)
        return found[0].info.run_id if found else None

    def run(self, header: Mapping[str, Any], *, last: bool, live: bool) -> StageRun | PipelineRun:
        """Whose spool it is: a stage's, or a flow's. `last` and `live` as for a stage."""
        if header["stage"] != PIPELINE:
            return self.stage_run(header, last=last, live=live)
        with self.lock:
            return PipelineRun(self.client, self._parent(header, live=live))

    def stage_run(self, header: Mapping[str, Any], *, last: bool, live: bool) -> StageRun:
        """The stage's run, made, with parameters, tags and inputs; or found again.

        `last`: False for what is delivered late of a run that has gone on since; its status stays.
        `live`: False for what is delivered late of a pipeline that is over: that stays over.
        """
        with self.lock:
            known = self.find("rlhf.run", header["key"])
            anew = last or known is None
            parent = self._parent(header, live=live) if anew else self._parent_of(str(known))
            if known is not None and last:
                self._reopen(known)
                self.client.set_tag(known, MLFLOW_PARENT_RUN_ID, parent)
            run = known or self._create(header, parent)
        given = header["parent"].get("owner") == "given"
        return StageRun(self.client, run, parent, header, owns_parent=not given, replay=known is not None)

    def _parent_of(self, run: str) -> str:
        return str(self.client.get_run(run).data.tags[MLFLOW_PARENT_RUN_ID])

    def _reopen(self, run: str) -> None:
        """RUNNING (again), and no longer why it was not."""
        known = self.client.get_run(run)
        if known.info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        _untag(self.client, run, REASON)

    def _create(self, header: Mapping[str, Any], parent: str) -> str:
        tags = {**header["tags"], MLFLOW_PARENT_RUN_ID: parent, MLFLOW_RUN_NAME: header["stage"]}
        run = self.client.create_run(self.experiment, start_time=header["time"], tags=tags)
        identity = str(run.info.run_id)
        self._log_params(identity, header["parameters"])
        if header["inputs"]:
            self.client.log_inputs(identity, [_dataset(p, md5) for p, md5 in header["inputs"].items()])
        return identity

    def _parent(self, header: Mapping[str, Any], *, live: bool) -> str:
        """The pipeline's run, made or found, with the stage's parameters added; RUNNING (again) if `live`."""
        parent = header["parent"]
        if "id" in parent:
            return str(parent["id"])
        identity = self.find("rlhf.pipeline", parent["key"])
        if identity is None:
            kept = ("process", EXPERIMENT, "prefect.flow_run_id")
            tags = {("rlhf.process" if k == "process" else k): parent[k] for k in kept if k in parent}
            tags |= {"rlhf.pipeline": parent["key"], "git.rev": header["tags"]["git.rev"]}
            tags[MLFLOW_RUN_NAME] = time.strftime(
                "pipeline-%Y%m%d-%H%M%S", time.localtime(header["time"] / 1000)
            )
            run = self.client.create_run(self.experiment, start_time=header["time"], tags=tags)
            identity = str(run.info.run_id)
        if live:
            self._reopen(identity)
        known = self.client.get_run(identity).data.params
        self._log_params(identity, {k: v for k, v in header["parameters"].items() if k not in known})
        return identity

    def _log_params(self, run: str, values: Mapping[str, Any]) -> None:
        params = [
            Param(k, (v if isinstance(v, str) else json.dumps(v))[:MAX_PARAM]) for k, v in values.items()
        ]
        for start in range(0, len(params), BATCH_PARAMS):
            self.client.log_batch(run, params=params[start : start + BATCH_PARAMS])

    def close_left_parents(self) -> None:
        """Pipelines whose dvc process is gone without a `report` stage (it was cached, or not asked for).

        Their end is that of their last stage: one that is delivered later may tell of a later one.
        """
        running = "attributes.status = 'RUNNING' and tags.`rlhf.pipeline` LIKE '%'"
        for run in self.client.search_runs([self.experiment], running):
            process = run.data.tags.get("rlhf.process")
            if process and not context.is_alive(process):
                end = self._last_end(run.info.run_id) or run.info.start_time
                self.client.set_terminated(run.info.run_id, "FINISHED", end_time=end)

    def _last_end(self, parent: str) -> int | None:
        """In milliseconds, of its stages; None if none has ended."""
        wanted = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
        stages = self.client.search_runs([self.experiment], wanted)
        return max((stage.info.end_time for stage in stages if stage.info.end_time), default=None)


@dataclass
class PipelineRun:
    """A flow's run as an addressee of spool records; sending one twice changes nothing."""

    client: MlflowClient
    run: str

    def send(self, records: Sequence[Mapping[str, Any]], files: Path, *, last: bool = True) -> bool:
        """Deliver in order; True once the run's end is among the records. `last` as for a stage."""
        for record in records:
            if record["kind"] == "tags":
                tags = [RunTag(k, str(v)[:MAX_TAG]) for k, v in record["values"].items()]
                self.client.log_batch(self.run, tags=tags)
            elif record["kind"] == "artifact":
                self.client.log_artifact(self.run, str(files / record["file"]), record["folder"])
            elif record["kind"] == "end":
                if last:
                    _terminate(self.client, self.run, record, record["reason"])
                return True
        return False


def _terminate(client: MlflowClient, run: str, record: Mapping[str, Any], reason: str) -> None:
    """Close a pipeline's run as a spool's end tells, and with no other reason than that one."""
    if reason:
        client.set_tag(run, REASON, reason[:MAX_TAG])
    else:
        _untag(client, run, REASON)
    client.set_terminated(run, record["status"], end_time=record["time"])


def _untag(client: MlflowClient, run: str, tag: str) -> None:
    if tag in client.get_run(run).data.tags:
        client.delete_tag(run, tag)


def send_figure(addressee: StageRun | PipelineRun, record: Mapping[str, Any], files: Path) -> None:
    """Draw the curves of a table that is among the artifacts, and deliver the figure.

    Of curves that cannot be drawn there is none: the run's tag `rlhf.figure` says why.
    """
    rows = curves.read_csv((files / record["table"]).read_text(encoding="utf-8"))
    try:
        curves.draw(rows, record["title"], files / record["file"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # matplotlib's
        told = f"{record['file']} cannot be drawn: {type(error).__name__}: {error}"
        print(f"{record['title']}: {told}")
        addressee.client.set_tag(addressee.run, FIGURE_TAG, told[:MAX_TAG])
        return
    addressee.client.log_artifact(addressee.run, str(files / record["file"]))


def _dataset(path: str, md5: str) -> DatasetInput:
    source = json.dumps({"path": path, "md5": md5})
    dataset = Dataset(name=path, digest=md5[:MAX_DIGEST], source_type="dvc", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "input")])


@dataclass
class StageRun:
    """One stage's run as an addressee of spool records."""

    client: MlflowClient
    run: str
    parent: str
    header: Mapping[str, Any]
    owns_parent: bool
    replay: bool  # True: some was delivered before; ask for the steps MLflow has, and send the others
    _held: dict[str, set[int]] = field(default_factory=dict)
    _tables: list[str] = field(default_factory=list)
    _traced: set[str] = field(default_factory=set)

    def send(self, records: Sequence[Mapping[str, Any]], files: Path, *, last: bool = True) -> bool:
        """Deliver in order, `files` holding the artifacts; True once the run's end is among the records.

        Figures are for `send_figure`.

        `last`: False once the run has gone on elsewhere: this was not its end.

        Traces that MLflow refuses for good are set aside in the spool, and never sent again.

        Raises:
            MlflowException: at the end, if MLflow lacks other traces; all else is delivered by then.
        """
        spool = Spool(files.parent, files.name)
        self._send_metrics([r for r in records if r["kind"] == "metrics"])
        self._send_traces([r for r in records if r["kind"] == "trace"], spool)
        for name, record in {r["file"]: r for r in records if r["kind"] == "artifact"}.items():
            self.client.log_artifact(self.run, str(files / name), record["folder"])
            if record["table"] and name not in self._tables:
                self._tables.append(name)
        for record in records:
            if record["kind"] == "headlines":
                metrics = [Metric(k, v, record["time"], 0) for k, v in record["values"].items()]
                self.client.log_batch(self.parent, metrics=metrics)
            elif record["kind"] == "event":
                self.client.set_tag(
                    self.run, record["name"], f"at {record['step']}: {record['text']}"[:MAX_TAG]
                )
            elif record["kind"] == "end":
                if last:
                    self._end(record)
                self._check_traces(spool.refusals())
                return True
        return False

    def _send_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        metrics = [
            Metric(name, value, record["time"], record["step"])
            for record in records
            for name, value in record["values"].items()
            if not (self.replay and record["step"] in self._steps(name))
        ]
        for start in range(0, len(metrics), BATCH_METRICS):
            self.client.log_batch(self.run, metrics=metrics[start : start + BATCH_METRICS])

    def _send_traces(self, records: Sequence[Mapping[str, Any]], spool: Spool) -> None:
        """Calls of models into the run's experiment."""
        if not records:
            return
        mlflow.set_tracking_uri(self.client.tracking_uri)  # the exporter of traces asks for it globally
        experiment = self._experiment()
        done = {*spool.refusals(), *(self._traces() if self.replay else ())}
        for record in records:
            number = str(record["number"])
            self._traced.add(number)
            if number in done:
                continue
            with refusals.heard() as errors:
                self._send_trace(record, experiment)
            if reason := next(filter(None, map(refusals.reason, errors)), None):
                spool.refuse(number, reason)

    def _send_trace(self, record: Mapping[str, Any], experiment: str) -> None:
        """MLflow raises nothing where it does not take it: see `refusals` and `_check_traces`."""
        span = self.client.start_trace(
            record["name"],
            span_type="LLM",
            inputs=record["inputs"],
            tags={TRACE_TAG: str(record["number"])},
            experiment_id=experiment,
            start_time_ns=record["start"] * 1_000_000,
            run_id=self.run,
        )
        self.client.end_trace(
            span.trace_id,
            outputs=record["outputs"],
            status="ERROR" if record["outputs"].get("failure") else "OK",
            end_time_ns=record["end"] * 1_000_000,
        )

    def _check_traces(self, refused: Mapping[str, str]) -> None:
        if refused:
            told = f"{len(refused)} of {len(self._traced)}, such as {next(iter(refused.values()))}"
            self.client.set_tag(self.run, REFUSED_TAG, told[:MAX_TAG])
        lost = len(self._traced - self._traces() - set(refused)) if self._traced else 0
        if lost:
            raise MlflowException(
                f"MLflow has not taken {lost} of {len(self._traced)} traces; the courier's log says why"
            )

    def _experiment(self) -> str:
        return str(self.client.get_run(self.run).info.experiment_id)

    def _traces(self) -> set[str]:
        """The numbers of those that MLflow has."""
        found, token, experiment = set[str](), None, self._experiment()
        while True:
            page = self.client.search_traces(
                locations=[experiment],
                run_id=self.run,
                max_results=MAX_TRACES,
                include_spans=False,
                page_token=token,
            )
            found |= {trace.info.tags[TRACE_TAG] for trace in page if TRACE_TAG in trace.info.tags}
            token = page.token
            if not token:
                return found

    def _steps(self, name: str) -> set[int]:
        if name not in self._held:
            self._held[name] = {point.step for point in self.client.get_metric_history(self.run, name)}
        return self._held[name]

    def _end(self, record: Mapping[str, Any]) -> None:
        tags = {"device": record["device"], **{f"dvc.out.{p}": md5 for p, md5 in record["outs"].items()}}
        if record["reason"]:
            tags[REASON] = record["reason"]
        if self._tables:
            tags[TABLES_TAG] = json.dumps([{"path": path, "type": "table"} for path in self._tables])
        self.client.log_batch(self.run, tags=[RunTag(k, v[:MAX_TAG]) for k, v in tags.items()])
        self.client.set_terminated(self.run, record["status"], end_time=record["time"])
        if not self.owns_parent or self._is_of_the_past(record):
            return
        if record["status"] != "FINISHED":
            reason = f"{self.header['stage']}: {record['reason']}"
            _terminate(self.client, self.parent, record, reason)
            if self.header["parent"]["owner"] == "dvc":
                _untag(self.client, self.parent, EXPERIMENT)  # `dvc exp run` saves none of what failed
        elif self.header["last"] or self.header["parent"]["owner"] == "stage":
            _terminate(self.client, self.parent, record, "")

    def _is_of_the_past(self, record: Mapping[str, Any]) -> bool:
        """Whether the pipeline came to its end after this: then it is not this that tells how."""
        parent = self.client.get_run(self.parent).info
        return parent.status != "RUNNING" and bool((parent.end_time or 0) > record["time"])

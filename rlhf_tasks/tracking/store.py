"""All calls of MLflow that write runs: one run per stage, under one run per pipeline. No torch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mlflow.entities import (
    Assessment,
    AssessmentError,
    AssessmentSource,
    Dataset,
    DatasetInput,
    Expectation,
    Feedback,
    InputTag,
    Metric,
    Param,
    RunTag,
    Span,
    TraceData,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import (
    TRACE_SCHEMA_VERSION,
    TRACE_SCHEMA_VERSION_KEY,
    AssessmentMetadataKey,
    SpanAttributeKey,
    TraceMetadataKey,
    TraceTagKey,
)
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME

from rlhf_tasks import console
from rlhf_tasks.config import Stage
from rlhf_tasks.project import processes
from rlhf_tasks.tracking import curves, view
from rlhf_tasks.tracking.record import PIPELINE, Event, Record

BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's limits for one request
MAX_PARAM, MAX_TAG, MAX_PREVIEW, MAX_REASON = 6000, 5000, 1000, 300  # characters
MAX_DIGEST = 36  # characters, as many as `….dir` has
NO_PREFERENCE = "NO_PREFERENCE"  # the code of the error of a reply that states no preference
REASON = "rlhf.reason"  # why a run was killed or failed
VANISHED = "the process vanished without an error (killed? out of memory?)"
EXPERIMENT = "dvc.exp"
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's viewer finds sample tables by it
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"  # or MLflow shows prompts and traces
UNDRAWABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # matplotlib's errors
LATER = (401, 403, 408, 425, 429)  # of 4xx, those that another key or a later try can fix


def embedded_uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


def open_experiment(client: MlflowClient, name: str, location: str | None) -> str:
    """The id of the experiment, which is created if there is none; its page of runs has our view."""
    tags = {KIND_TAG: KIND, view.TAG: view.text(curves.HEADLINES)}
    known = client.get_experiment_by_name(name)
    if known is None:
        return str(client.create_experiment(name, location, tags))
    for tag in tags.keys() - known.tags.keys():
        client.set_experiment_tag(known.experiment_id, tag, tags[tag])
    return str(known.experiment_id)


class Delivery:
    """One record on its way to MLflow.

    MLflow gets every point and trace once, however often a process is killed and another one begins anew: of
    points, only steps that MLflow lacks are sent, and a trace has the same id each time.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._offset = 0  # bytes that MLflow has for certain
        self._header: Event = {}
        self._run = ""  # MLflow's id; empty until the run was found or created, and after a failure
        self._tables = list[str]()
        self._rejected = dict[str, str]()  # why MLflow will never accept a trace, by its number

    def step(self, *, only_over: bool = False) -> None:
        """Send what there is, with the outbox's lock held.

        `only_over`: send nothing of a run that may still log something.

        Raises:
            MlflowException, SQLAlchemyError, OSError: if MLflow or its database does not answer.
            DamagedRecordError: if the record cannot be read.
        """
        self._header = self._header or self.record.header()
        if not self._header:
            return  # a process writes the first line just now, or was killed then
        is_gone = not processes.is_alive(self._header["process"])  # before the last lines are read
        events, offset = self.record.read(self._offset)
        has_end = bool(events) and events[-1]["kind"] == "end"
        is_over = has_end or is_gone
        if only_over and not is_over:
            return
        if is_over and not has_end:
            last = round(self.record.file.stat().st_mtime * 1000)
            events.append({"kind": "end", "time": last, "status": "FAILED", "reason": VANISHED})
        try:
            if not self._run:
                self._connect(is_live=not is_over)
            self._send(events)
        except BaseException:
            self._run = ""
            raise
        self._offset = offset
        if is_over:
            self.record.write_state(closed=True)
            shutil.rmtree(self.record.files, ignore_errors=True)

    # ------------------------------------------------------------------------------ runs

    def _connect(self, *, is_live: bool) -> None:
        """Find or create the run, with its parameters and inputs; RUNNING, as its pipeline if it is live."""
        header, home = self._header, Path(self._header["home"])
        self._client = MlflowClient(header["uri"] or embedded_uri(home))
        location = None if header["uri"] else (home / "mlartifacts").as_uri()
        self._experiment = open_experiment(self._client, header["experiment"], location)
        parent, stage = header["parent"], header["stage"]
        start = time.localtime(header["time"] / 1000)
        named = parent.get(EXPERIMENT) or parent.get("name") or time.strftime("repro-%m%d-%H%M%S", start)
        tags = {key: parent[key] for key in (EXPERIMENT, "prefect.flow_run_id") if key in parent}
        tags |= {"rlhf.pipeline": parent["key"], "git.rev": header["tags"]["git.rev"], MLFLOW_RUN_NAME: named}
        self._parent, _ = self._find_or_create("rlhf.pipeline", parent["key"], tags)
        known = self._client.get_run(self._parent).data.params
        self._log_params(self._parent, {k: v for k, v in header["parameters"].items() if k not in known})
        if is_live:
            self._set_running(self._parent)
        # Steps of the points that MLflow has, by run and metric.
        self._steps = dict[tuple[str, str], set[int]]()
        self._is_new = False
        if stage == PIPELINE:
            self._run = self._parent
            return
        tags = {**header["tags"], MLFLOW_PARENT_RUN_ID: self._parent, MLFLOW_RUN_NAME: stage}
        run, self._is_new = self._find_or_create("rlhf.run", header["key"], tags)
        if self._is_new:
            self._log_params(run, header["parameters"])
            if header["inputs"]:
                self._client.log_inputs(run, [_dataset(p, md5) for p, md5 in header["inputs"].items()])
        else:
            self._set_running(run)
            self._client.set_tag(run, MLFLOW_PARENT_RUN_ID, self._parent)
        self._run = run

    def _find_or_create(self, tag: str, value: str, tags: Mapping[str, str]) -> tuple[str, bool]:
        """The id of the run with this tag, and whether it was created just now."""
        found = self._client.search_runs([self._experiment], f"tags.`{tag}` = '{value}'", max_results=1)
        if found:
            return str(found[0].info.run_id), False
        run = self._client.create_run(self._experiment, start_time=self._header["time"], tags=dict(tags))
        return str(run.info.run_id), True

    def _log_params(self, run: str, values: Mapping[str, Any]) -> None:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        params = [Param(name, text[:MAX_PARAM]) for name, text in texts.items()]
        for start in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(run, params=params[start : start + BATCH_PARAMS])

    def _set_running(self, run: str) -> None:
        if self._client.get_run(run).info.status != "RUNNING":
            self._client.update_run(run, status="RUNNING")
        self._remove_tag(run, REASON)

    def _remove_tag(self, run: str, tag: str) -> None:
        if tag in self._client.get_run(run).data.tags:
            self._client.delete_tag(run, tag)

    def _end(self, run: str, end: Event, reason: str) -> None:
        if reason:
            self._client.set_tag(run, REASON, reason[:MAX_TAG])
        else:
            self._remove_tag(run, REASON)
        self._client.set_terminated(run, end["status"], end_time=end["time"])

    def _end_parent(self, end: Event) -> None:
        """A pipeline is what the last of its stages is; but a flow decides itself when it has finished."""
        info, by_flow = self._client.get_run(self._parent).info, self._header["parent"]["owner"] == "flow"
        is_finished = end["status"] == "FINISHED"
        if (is_finished and by_flow) or (info.status != "RUNNING" and (info.end_time or 0) > end["time"]):
            return
        self._end(self._parent, end, "" if is_finished else f"{self._header['stage']}: {end['reason']}")
        if not is_finished and not by_flow:
            self._remove_tag(self._parent, EXPERIMENT)  # `dvc exp run` saves none if a stage fails

    # ---------------------------------------------------------------------------- events

    def _send(self, events: Sequence[Event]) -> None:
        """Send these events; traces last: one that MLflow does not accept holds nothing else up."""
        points = [event for event in events if event["kind"] == "metrics"]
        self._send_points(self._run, points)
        if self._header["stage"] == "ppo":
            self._send_points(self._parent, points, only=curves.HEADLINES)
        tags = dict[str, str]()
        for event in events:
            if event["kind"] == "results":
                self._send_results(event)
            elif event["kind"] == "tags":
                tags |= event["values"]
            elif event["kind"] == "event":
                tags[event["name"]] = f"at {event['step']}: {event['text']}"
        latest = {event["file"]: event for event in events if event["kind"] == "artifact"}
        tags |= self._send_artifacts(latest)
        if tags:
            self._set_tags(tags)
        if events and events[-1]["kind"] == "end":
            end = events[-1]
            self._end(self._run, end, end["reason"])
            if self._run == self._parent:
                names = self._client.get_run(self._parent).data.metrics
                self._client.set_experiment_tag(self._experiment, view.TAG, view.text(names))
            else:
                self._end_parent(end)
        self._send_traces([event for event in events if event["kind"] == "trace"])

    def _send_points(self, run: str, points: Sequence[Event], only: Sequence[str] | None = None) -> None:
        """Send one point per metric and step: a resumed stage logs some of them again."""
        metrics = list[Metric]()
        for point in points:
            for name, value in point["values"].items():
                if only is not None and name not in only:
                    continue
                steps = self._steps.get((run, name))
                if steps is None:
                    is_new = self._is_new and run == self._run
                    history = [] if is_new else self._client.get_metric_history(run, name)
                    steps = self._steps[run, name] = {point.step for point in history}
                if point["step"] not in steps:
                    metrics.append(Metric(name, value, point["time"], point["step"]))
                    steps.add(point["step"])
        for start in range(0, len(metrics), BATCH_METRICS):
            self._client.log_batch(run, metrics=metrics[start : start + BATCH_METRICS])

    def _send_results(self, results: Event) -> None:
        """Send a stage's results to the pipeline's run, which may have them from another process."""
        held = self._client.get_run(self._parent).data.metrics
        new = {name: value for name, value in results["values"].items() if held.get(name) != value}
        metrics = [Metric(name, value, results["time"], 0) for name, value in new.items()]
        self._client.log_batch(self._parent, metrics=metrics)

    def _send_artifacts(self, artifacts: Mapping[str, Event]) -> dict[str, str]:
        """Send copies of files, with a figure of each CSV file of curves; returns tags that describe them."""
        tags = dict[str, str]()
        for name, artifact in artifacts.items():
            if artifact["table"]:
                self._tables = list(dict.fromkeys([*self._tables, name]))
                tags[TABLES_TAG] = json.dumps([{"path": path, "type": "table"} for path in self._tables])
            file = self.record.files / name
            if not file.exists():  # MLflow got it before the run was resumed
                continue
            self._client.log_artifact(self._run, str(file), artifact["folder"])
            if artifact["folder"] == "plots":  # MLflow's charts have no preset layout
                figure, rows = self.record.files / "curves.png", curves.read_csv(file.read_text("utf-8"))
                try:
                    curves.draw(rows, cast("Stage", file.stem), figure)
                except UNDRAWABLE as error:
                    tags["rlhf.figure"] = f"{figure.name} cannot be drawn: {type(error).__name__}: {error}"
                else:
                    self._client.log_artifact(self._run, str(figure))
        return tags

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self._run, tags=[RunTag(name, text[:MAX_TAG]) for name, text in tags.items()])

    # ---------------------------------------------------------------------------- traces

    def _send_traces(self, traces: Sequence[Event]) -> None:
        """Send calls of models. One that MLflow rejects is reported, and not sent again.

        Raises:
            MlflowException: at the end, if MLflow may accept later what it has not accepted now.
        """
        client, errors, before = TracingClient(self._client.tracking_uri), list[str](), len(self._rejected)
        for trace in [trace for trace in traces if trace["number"] not in self._rejected]:
            try:
                self._send_trace(client, trace)
            except MlflowException as error:
                if reason := rejection(error):
                    self._rejected[trace["number"]] = reason
                else:
                    errors.append(str(error))
        if len(self._rejected) > before:
            reason = next(iter(self._rejected.values()))
            self._set_tags({"rlhf.rejected_traces": f"{len(self._rejected)}, such as {reason}"})
            console.say(
                f"MLflow rejected {len(self._rejected)} trace(s) of {self.record.key} ({reason}). They will "
                f"not be sent again; {self.record.file} keeps them"
            )
        if errors:
            raise MlflowException(
                f"MLflow has not accepted {len(errors)} of {len(traces)} traces: {errors[0]}"
            )

    def _send_trace(self, client: TracingClient, trace: Event) -> None:
        """Send one call of a model, as MLflow's own exporter does, which would log its errors only."""
        number = hashlib.md5(f"{self.record.key} {trace['number']}".encode()).hexdigest()
        identity, failed = f"tr-{number}", bool(trace["outputs"].get("failure"))
        inputs, outputs = json.dumps(trace["inputs"]), json.dumps(trace["outputs"])
        span = Span.from_dict(
            {
                "trace_id": identity,
                "span_id": number[:16],
                "parent_span_id": None,
                "name": trace["name"],
                "start_time_unix_nano": trace["start"] * 1_000_000,
                "end_time_unix_nano": trace["end"] * 1_000_000,
                "status": {"code": "ERROR" if failed else "OK"},
                "attributes": {
                    SpanAttributeKey.REQUEST_ID: json.dumps(identity),
                    SpanAttributeKey.SPAN_TYPE: json.dumps("LLM"),
                    SpanAttributeKey.INPUTS: inputs,
                    SpanAttributeKey.OUTPUTS: outputs,
                },
            }
        )
        info = TraceInfo(
            identity,
            TraceLocation.from_experiment_id(self._experiment),
            trace["start"],
            TraceState.ERROR if failed else TraceState.OK,
            request_preview=inputs[:MAX_PREVIEW],
            response_preview=outputs[:MAX_PREVIEW],
            execution_duration=trace["end"] - trace["start"],
            trace_metadata={
                TraceMetadataKey.SOURCE_RUN: self._run,
                TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION),
            },
            tags={TraceTagKey.TRACE_NAME: trace["name"]},
            # They travel in the trace's own request: a killed process leaves both or neither.
            assessments=[
                _assessment(one, f"a-{number}{place}", identity, self._run)
                for place, one in enumerate(trace.get("assessments", ()))
            ],
        )
        made = client.start_trace(info)
        client._upload_trace_data(made, TraceData([span]))


def rejection(error: MlflowException) -> str | None:
    """Why the server will never accept what it was sent; None if it may later, or did not answer."""
    code = re.search(r"failed with error code (\d{3})", str(error))  # MLflow knows a few codes only
    status = int(code[1]) if code else error.get_http_status_code()  # type: ignore[no-untyped-call]
    of_database = error.error_code == "BAD_REQUEST"  # MLflow's code for every error of its database
    if not 400 <= status < 500 or status in LATER or of_database:
        return None
    return " ".join(f"status {status}: {type(error).__name__}: {error}".split())[:MAX_REASON]


def _dataset(path: str, md5: str) -> DatasetInput:
    source = json.dumps({"path": path, "md5": md5})
    dataset = Dataset(name=path, digest=md5[:MAX_DIGEST], source_type="dvc", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "input")])


def _assessment(one: Mapping[str, Any], identity: str, trace: str, run: str) -> Assessment:
    common: dict[str, Any] = {
        "name": one["name"],
        "source": AssessmentSource(one["source"], one["by"]),
        "trace_id": trace,
        "metadata": {**one["metadata"], AssessmentMetadataKey.SOURCE_RUN_ID: run},
        "create_time_ms": one["time"],
        "last_update_time_ms": one["time"],
    }
    if one["kind"] == "expectation":
        made: Assessment = Expectation(value=one["value"], **common)
    else:
        error = AssessmentError(NO_PREFERENCE, one["error"]) if one["error"] else None
        made = Feedback(value=one["value"], error=error, rationale=one["rationale"] or None, **common)
    made.assessment_id = identity
    return made

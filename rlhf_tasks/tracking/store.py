"""All calls of MLflow that write runs: one run per stage, under one run per pipeline. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME

from rlhf_tasks.tracking import context, curves, view
from rlhf_tasks.tracking.events import (
    PIPELINE,
    REPORT_PAGE,
    End,
    Event,
    Figure,
    Header,
    Headlines,
    Metrics,
)
from rlhf_tasks.tracking.traces import MAX_TAG, Traces

BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's limits for one request
MAX_PARAM = 6000  # characters
MAX_DIGEST = 36  # characters, as many as `….dir` has
REASON = "rlhf.reason"  # why a run was killed or failed
EXPERIMENT = "dvc.exp"
FIGURE_TAG = "rlhf.figure"  # why a run has no figure
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's viewer finds sample tables by it
KIND_TAG, KIND = (
    "mlflow.experimentKind",
    "custom_model_development",
)  # or else MLflow shows prompts and traces


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


@dataclass(frozen=True)
class Store:
    client: MlflowClient
    experiment: str

    @classmethod
    def open(cls, header: Header) -> Store:
        """Connect; the first connection creates the embedded database and the experiment."""
        home = Path(header["home"])
        client = MlflowClient(header["uri"] or embedded_uri(home))
        location = None if header["uri"] else (home / "mlartifacts").as_uri()
        store = cls(client, open_experiment(client, header["experiment"], location))
        store.close_left_parents()
        return store

    def run(self, header: Header, *, live: bool) -> RemoteRun:
        """The run in MLflow, RUNNING. If there is none, it is created with its parameters, tags and inputs.

        `live`: set its pipeline to RUNNING too; False for a pipeline that is over.
        """
        parent = self._parent(header, live=live)
        if header["stage"] == PIPELINE:
            return RemoteRun(self, parent, parent, header, may_have_points=False)
        run = known = self._find("rlhf.run", header["key"])
        if run is None:
            run = self._create(header, parent)
        else:
            self._reopen(run)
            self.client.set_tag(run, MLFLOW_PARENT_RUN_ID, parent)
        return RemoteRun(self, run, parent, header, may_have_points=known is not None)

    def _find(self, tag: str, value: str) -> str | None:
        runs = self.client.search_runs([self.experiment], f"tags.`{tag}` = '{value}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _reopen(self, run: str) -> None:
        """Set a run to RUNNING, and remove the reason why it was not."""
        if self.client.get_run(run).info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        _untag(self.client, run, REASON)

    def _create(self, header: Header, parent: str) -> str:
        tags = {**header["tags"], MLFLOW_PARENT_RUN_ID: parent, MLFLOW_RUN_NAME: header["stage"]}
        run = self.client.create_run(self.experiment, start_time=header["time"], tags=tags)
        identity = str(run.info.run_id)
        self._log_params(identity, header["parameters"])
        if header["inputs"]:
            self.client.log_inputs(identity, [_dataset(p, md5) for p, md5 in header["inputs"].items()])
        return identity

    def _parent(self, header: Header, *, live: bool) -> str:
        """The pipeline's run, created if there is none, with the stage's parameters added."""
        parent = header["parent"]
        if "id" in parent:
            return parent["id"]
        identity = self._find("rlhf.pipeline", parent["key"]) or self._create_parent(header)
        if live:
            self._reopen(identity)
        known = self.client.get_run(identity).data.params
        self._log_params(identity, {k: v for k, v in header["parameters"].items() if k not in known})
        return identity

    def _create_parent(self, header: Header) -> str:
        parent = header["parent"]
        names = {
            "process": "rlhf.process",
            EXPERIMENT: EXPERIMENT,
            "prefect.flow_run_id": "prefect.flow_run_id",
        }
        tags = {name: parent[key] for key, name in names.items() if key in parent}
        tags |= {"rlhf.pipeline": parent["key"], "git.rev": header["tags"]["git.rev"]}
        start = time.localtime(header["time"] / 1000)
        tags[MLFLOW_RUN_NAME] = parent.get(EXPERIMENT) or time.strftime("repro-%m%d-%H%M%S", start)
        run = self.client.create_run(self.experiment, start_time=header["time"], tags=tags)
        return str(run.info.run_id)

    def _log_params(self, run: str, values: Mapping[str, Any]) -> None:
        params = [
            Param(k, (v if isinstance(v, str) else json.dumps(v))[:MAX_PARAM]) for k, v in values.items()
        ]
        for start in range(0, len(params), BATCH_PARAMS):
            self.client.log_batch(run, params=params[start : start + BATCH_PARAMS])

    def close_left_parents(self) -> None:
        """Set pipelines to FINISHED whose dvc process ended without a stage `report`.

        They end when their last stage ended: a stage that is delivered later may have ended later.
        """
        running = "attributes.status = 'RUNNING' and tags.`rlhf.pipeline` LIKE '%'"
        for run in self.client.search_runs([self.experiment], running):
            process = run.data.tags.get("rlhf.process")
            if process and not context.is_alive(process):
                end = self._last_end(run.info.run_id) or run.info.start_time
                self.client.set_terminated(run.info.run_id, "FINISHED", end_time=end)

    def _last_end(self, parent: str) -> int | None:
        """When the last of the pipeline's stages ended, in milliseconds; None if none has."""
        condition = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
        stages = self.client.search_runs([self.experiment], condition)
        return max((stage.info.end_time for stage in stages if stage.info.end_time), default=None)


def _terminate(client: MlflowClient, run: str, end: End, reason: str) -> None:
    if reason:
        client.set_tag(run, REASON, reason[:MAX_TAG])
    else:
        _untag(client, run, REASON)
    client.set_terminated(run, end["status"], end_time=end["time"])


def _untag(client: MlflowClient, run: str, tag: str) -> None:
    if tag in client.get_run(run).data.tags:
        client.delete_tag(run, tag)


def _dataset(path: str, md5: str) -> DatasetInput:
    source = json.dumps({"path": path, "md5": md5})
    dataset = Dataset(name=path, digest=md5[:MAX_DIGEST], source_type="dvc", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "input")])


@dataclass
class RemoteRun:
    """The run of a stage or of a pipeline in MLflow."""

    store: Store
    run: str
    parent: str
    header: Header
    may_have_points: bool
    """True if points may have been sent before: only points are sent whose steps MLflow lacks."""
    _steps: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    _tables: list[str] = field(default_factory=list)
    _traces: Traces = field(init=False)

    def __post_init__(self) -> None:
        self._traces = Traces(self.client, self.run, may_be_held=self.may_have_points)

    @property
    def client(self) -> MlflowClient:
        """The store's client."""
        return self.store.client

    @property
    def rejected(self) -> dict[str, str]:
        """Why MLflow will never accept a trace, by its number."""
        return self._traces.rejected

    def resume(self, history: Sequence[Event], rejected: Mapping[str, str]) -> None:
        """Continue after these events were sent, and these traces were rejected."""
        self._traces.rejected = dict(rejected)
        self._note(history)

    def _note(self, events: Sequence[Event]) -> None:
        self._traces.note([event for event in events if event["kind"] == "trace"])
        tables = [event["file"] for event in events if event["kind"] == "artifact" and event["table"]]
        self._tables = list(dict.fromkeys([*self._tables, *tables]))

    def send(self, events: Sequence[Event], files: Path) -> None:
        """Deliver these events; `files` holds the artifacts.

        Raises:
            MlflowException: at the end, if MLflow lacks traces that it has not rejected.
        """
        self._send_points(self.run, [event for event in events if event["kind"] == "metrics"])
        self._send_headlines([event for event in events if event["kind"] == "headlines"])
        self._note(events)
        self._traces.send()
        latest = {event["file"]: event for event in events if event["kind"] == "artifact"}
        for name, artifact in latest.items():
            self.client.log_artifact(self.run, str(files / name), artifact["folder"])
        for event in events:
            if event["kind"] == "event":
                self.client.set_tag(self.run, event["name"], f"at {event['step']}: {event['text']}"[:MAX_TAG])
            elif event["kind"] == "tags":
                self._set_tags(event["values"])
            elif event["kind"] == "figure":
                self._send_figure(event, files)
            elif event["kind"] == "end":
                self._end(event)
                self._traces.check()
        if events and events[-1]["kind"] == "end" and self.header["last"]:
            self._show_columns()

    def _send_figure(self, figure: Figure, files: Path) -> None:
        """Draw the curves of a CSV table and deliver the figure. A tag gives the reason if that fails."""
        rows = curves.read_csv((files / figure["table"]).read_text(encoding="utf-8"))
        try:
            curves.draw(rows, figure["stage"], files / figure["file"])
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # matplotlib's
            self._set_tags({FIGURE_TAG: f"{figure['file']} cannot be drawn: {type(error).__name__}: {error}"})
            return
        self.client.log_artifact(self.run, str(files / figure["file"]))

    def _send_points(self, run: str, events: Sequence[Metrics | Headlines]) -> None:
        """Send one point per metric and step: a resumed stage logs some of them again."""
        metrics = list[Metric]()
        for event in events:
            for name, value in event["values"].items():
                step = event["step"]
                if step is not None and step not in self._held_steps(run, name):
                    metrics.append(Metric(name, value, event["time"], step))
                    self._steps[run, name].add(step)
        for start in range(0, len(metrics), BATCH_METRICS):
            self.client.log_batch(run, metrics=metrics[start : start + BATCH_METRICS])

    def _held_steps(self, run: str, name: str) -> set[int]:
        if (run, name) not in self._steps:
            is_new = run == self.run and not self.may_have_points
            history = [] if is_new else self.client.get_metric_history(run, name)
            self._steps[run, name] = {point.step for point in history}
        return self._steps[run, name]

    def _send_headlines(self, events: Sequence[Headlines]) -> None:
        """Send curves and results to the pipeline's run, which may have them from another process."""
        self._send_points(self.parent, [event for event in events if event["step"] is not None])
        results = [event for event in events if event["step"] is None]
        held = self.client.get_run(self.parent).data.metrics if results else {}
        for event in results:
            new = [Metric(k, v, event["time"], 0) for k, v in event["values"].items() if held.get(k) != v]
            self.client.log_batch(self.parent, metrics=new)

    def _show_columns(self) -> None:
        """Give the experiment's page of runs a column for each metric of this pipeline."""
        run = self.client.get_run(self.parent)
        self.client.set_experiment_tag(run.info.experiment_id, view.TAG, view.text(run.data.metrics))

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        texts = dict(tags)
        for name in [name for name in tags if REPORT_PAGE in tags[name]]:
            page = view.run_page("", self._experiment(), self.run, "/artifacts/report/index.html")
            texts[name] = tags[name].replace(REPORT_PAGE, page)
        self.client.log_batch(self.run, tags=[RunTag(k, v[:MAX_TAG]) for k, v in texts.items()])

    def _end(self, event: End) -> None:
        if self.run == self.parent:
            _terminate(self.client, self.run, event, event["reason"])
            return
        tags = {"device": event["device"], **{f"dvc.out.{p}": md5 for p, md5 in event["outs"].items()}}
        if event["reason"]:
            tags[REASON] = event["reason"]
        if self._tables:
            tags[TABLES_TAG] = json.dumps([{"path": path, "type": "table"} for path in self._tables])
        self._set_tags(tags)
        self.client.set_terminated(self.run, event["status"], end_time=event["time"])
        owner = self.header["parent"].get("owner")
        if owner == "given" or self._has_parent_ended_after(event["time"]):
            return
        if event["status"] != "FINISHED":
            _terminate(self.client, self.parent, event, f"{self.header['stage']}: {event['reason']}")
            if owner == "dvc":
                _untag(self.client, self.parent, EXPERIMENT)  # `dvc exp run` saves none if a stage fails
        elif self.header["last"] or owner == "stage":
            _terminate(self.client, self.parent, event, "")

    def _has_parent_ended_after(self, time: int) -> bool:
        """Whether the pipeline ended later than this stage, so that this stage does not decide how."""
        parent = self.client.get_run(self.parent).info
        return parent.status != "RUNNING" and bool((parent.end_time or 0) > time)

    def _experiment(self) -> str:
        return str(self.client.get_run(self.run).info.experiment_id)

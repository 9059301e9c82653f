"""All calls of MLflow that write runs: one run per stage, under one run per pipeline. No torch."""

from __future__ import annotations

import json
import platform
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import sqlalchemy
from filelock import FileLock
from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE
from sqlalchemy.exc import SQLAlchemyError

from rlhf_tasks import console
from rlhf_tasks.config import Stage, Tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, processes
from rlhf_tasks.tracking import context, curves, view
from rlhf_tasks.tracking.record import PIPELINE, REPORT, SAMPLES, Event, Record

BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's limits for one request
MAX_PARAM, MAX_TAG = 6000, 5000  # characters
MAX_DIGEST = 36  # characters, as many as `….dir` has
PARTIAL = "mlflow.db.partial-"  # a folder in which the database is created
REASON = "rlhf.reason"  # why a run was killed or failed
VANISHED = "the process vanished without an error (killed? out of memory?)"
GONE_SECONDS = 86_400.0  # without a new line, after which a process of another machine is gone
EXPERIMENT = "dvc.exp"
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's viewer finds sample tables by it
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"  # or MLflow shows prompts and traces
COLOR_TAG = "mlflow.runColor"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # color-blind safe
DRAWN = {f"plots/{stage}.csv" for stage in curves.HEADLINES}
"""Artifacts whose figure a description shows."""
NO_ANSWER = (MlflowException, SQLAlchemyError, OSError)  # of MLflow, or of its database
UNDRAWABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # matplotlib's errors


def embedded_uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


def open_store(uri: str | None, home: Path) -> MlflowClient:
    """The store at `uri`, else the embedded one of `home`, whose database appears whole or not at all.

    MLflow creates the tables in dozens of migrations, and never repairs a database in which one was cut off.
    """
    database = home / "mlflow.db"
    if uri is None and not database.exists():
        with FileLock(home / "mlflow.lock"):
            for stale in home.glob(f"{PARTIAL}*"):  # which killed processes left
                shutil.rmtree(stale)
            if not database.exists():
                with TemporaryDirectory(prefix=PARTIAL, dir=home) as folder:
                    made, copy = Path(folder) / "made.db", Path(folder) / "copy.db"
                    MlflowClient(f"sqlite:///{made}").search_experiments(max_results=1)
                    with closing(sqlite3.connect(made)) as connection:  # MLflow keeps connections of its own
                        connection.execute("VACUUM INTO ?", (str(copy),))
                    atomic.fsync(copy)
                    copy.rename(database)
    if uri is None:
        _follow_move(home)
    return MlflowClient(uri or embedded_uri(home))


def _follow_move(home: Path) -> None:
    """Lead a store that was moved or copied with its project to its artifacts here.

    MLflow keeps absolute addresses of artifacts, and has no call that changes them (mlflow/mlflow#3144).
    """
    here = (home / "mlartifacts").as_uri()
    engine = sqlalchemy.create_engine(embedded_uri(home), poolclass=sqlalchemy.NullPool)
    with engine.begin() as database:
        for (there,) in database.exec_driver_sql("SELECT DISTINCT artifact_location FROM experiments").all():
            if there == here or not str(there).endswith("/.rlhf/mlartifacts"):
                continue
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                move = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?) = 1"
                database.exec_driver_sql(move, (there, here, there))
            console.say(f"MLflow's store has moved here from {there}: its artifacts are those at {here}")


def open_experiment(client: MlflowClient, name: str, location: str | None) -> str:
    """The id of the experiment, which is created if there is none; its page of runs has our view.

    Raises UserError if the experiment is deleted.
    """
    tags = {KIND_TAG: KIND, view.TAG: view.text(curves.PPO_HEADLINES)}
    known = client.get_experiment_by_name(name)
    if known is None:
        return str(client.create_experiment(name, location, tags))
    identity = str(known.experiment_id)
    if known.lifecycle_stage == LifecycleStage.DELETED:
        raise UserError(
            f"MLflow's experiment {name} is deleted; name another one in tracking.experiment, or restore it: "
            f"MLFLOW_TRACKING_URI={client.tracking_uri} mlflow experiments restore --experiment-id {identity}"
        )
    for tag in tags.keys() - known.tags.keys():
        client.set_experiment_tag(identity, tag, tags[tag])
    return identity


def log_page(settings: Tracking, home: Path, name: str, page: Path) -> None:
    """Keep a page about several runs, as the artifact of a run of its own; warn where MLflow cannot.

    A later page of this name replaces it.
    """
    if not settings.enabled:
        return
    context.bound_requests()
    try:
        uri = context.uri(settings)
        client = open_store(uri, home)
        location = None if uri else (home / "mlartifacts").as_uri()
        experiment = open_experiment(client, settings.experiment, location)
        tags = {"rlhf.pipeline": f"page-{name}"}  # our view shows runs with this tag
        known = client.search_runs([experiment], f"tags.`rlhf.pipeline` = 'page-{name}'", max_results=1)
        run = known[0] if known else client.create_run(experiment, tags=tags, run_name=name)
        client.log_artifact(run.info.run_id, str(page))
        client.set_terminated(run.info.run_id)
    except (*NO_ANSWER, UserError) as error:
        console.say(f"WARNING: MLflow does not have {page.name}: {' '.join(str(error).split())[:200]}")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where in MLflow a record goes."""

    client: MlflowClient
    experiment: str
    parent: str  # the id of the pipeline's run
    run: str  # the id of the record's own run; that of `parent` if it is the pipeline's
    is_new: bool  # whether the own run was created just now, so that it has no points
    held: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    """The steps that MLflow had at first, by run and metric."""
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    """The highest step that was sent since then: all steps would be much memory in a long run."""


class Delivery:
    """One record on its way to MLflow.

    MLflow gets every point once, however often a process is killed and another one begins anew: only steps
    that MLflow lacks are sent.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._offset = 0  # bytes that MLflow has for certain
        self._header: Event = {}
        self._connection: Connection | None = None  # after a failure too
        self._tables = list[str]()
        self._artifacts = set[str]()

    def step(self, *, only_over: bool = False) -> None:
        """Send what there is, with the outbox's lock held.

        `only_over`: send nothing of a run that may still log something.

        Raises:
            one of NO_ANSWER: if MLflow or its database does not answer.
            DamagedRecordError: if the record cannot be read.
        """
        self._header = self._header or self.record.header()
        if not self._header:
            return  # a process writes the first line just now, or was killed then
        file = self.record.file.stat()  # before the last lines are read, as is what follows
        process, idle = self._header["process"], time.time() - file.st_mtime
        is_lost = idle > GONE_SECONDS and not process.startswith(f"{platform.node()}:")
        is_gone = is_lost or not processes.is_alive(process)
        events, offset = self.record.read(self._offset)
        has_end = bool(events) and events[-1]["kind"] == "end"
        is_over = has_end or is_gone
        if only_over and not is_over:
            return
        if is_over and not has_end:
            events.append(
                {"kind": "end", "time": round(file.st_mtime * 1000), "status": "FAILED", "reason": VANISHED}
            )
        try:
            self._connection = self._connection or self._connect(is_live=not is_over)
            self._send(self._connection, events)
        except BaseException:
            self._connection = None
            raise
        self._offset = offset
        if is_over:
            self.record.write_state(closed=True, size=file.st_size)
            if self.record.state()["closed"]:  # else the stage was resumed meanwhile
                shutil.rmtree(self.record.files, ignore_errors=True)

    def _connect(self, *, is_live: bool) -> Connection:
        """Find or create the run, with its parameters and inputs; RUNNING, as its pipeline if it is live."""
        header, home = self._header, self.record.home
        client = open_store(header["uri"], home)
        location = None if header["uri"] else (home / "mlartifacts").as_uri()
        experiment = open_experiment(client, header["experiment"], location)
        parent, stage = header["parent"], header["stage"]
        start = time.localtime(header["time"] / 1000)
        named = parent.get(EXPERIMENT) or parent.get("name") or time.strftime("repro-%m%d-%H%M%S", start)
        tags = {key: parent[key] for key in (EXPERIMENT, "prefect.flow_run_id") if key in parent}
        tags |= {"rlhf.pipeline": parent["key"], "git.rev": header["tags"]["git.rev"], MLFLOW_RUN_NAME: named}
        # A color that the newest pipelines do not have: MLflow's own colors of two runs are often alike.
        newest = client.search_runs([experiment], view.PIPELINES, max_results=len(COLORS) - 1)
        used = {run.data.tags.get(COLOR_TAG) for run in newest}
        tags[COLOR_TAG] = next(color for color in COLORS if color not in used)

        def find_or_create(tag: str, value: str, tags: Mapping[str, str]) -> tuple[str, bool]:
            """The id of the run with this tag, and whether it was created just now."""
            found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1)
            if found:
                return str(found[0].info.run_id), False
            run = client.create_run(experiment, start_time=header["time"], tags=dict(tags))
            return str(run.info.run_id), True

        pipeline, _ = find_or_create("rlhf.pipeline", parent["key"], tags)
        known = client.get_run(pipeline).data.params
        _log_params(client, pipeline, {k: v for k, v in header["parameters"].items() if k not in known})
        if is_live:
            _set_running(client, pipeline)
        run, is_new = pipeline, False
        if stage != PIPELINE:
            tags = {**header["tags"], MLFLOW_PARENT_RUN_ID: pipeline, MLFLOW_RUN_NAME: stage}
            run, is_new = find_or_create("rlhf.run", header["key"], tags)
            held = client.get_run(run)  # an attempt that was interrupted has sent a part
            lacking = {k: v for k, v in header["parameters"].items() if k not in held.data.params}
            _log_params(client, run, lacking)
            if header["inputs"] and not (held.inputs and held.inputs.dataset_inputs):
                datasets = [
                    Dataset(path, md5[:MAX_DIGEST], "dvc", json.dumps({"path": path, "md5": md5}))
                    for path, md5 in header["inputs"].items()
                ]
                tags_of_input = [InputTag("mlflow.data.context", "input")]
                client.log_inputs(run, [DatasetInput(one, tags_of_input) for one in datasets])
            if not is_new:
                _set_running(client, run)
                client.set_tag(run, MLFLOW_PARENT_RUN_ID, pipeline)
        return Connection(client=client, experiment=experiment, parent=pipeline, run=run, is_new=is_new)

    def _end_parent(self, to: Connection, end: Event) -> None:
        """The parent run takes the status of its last stage; a flow decides itself when it has finished."""
        info, by_flow = to.client.get_run(to.parent).info, self._header["parent"]["owner"] == "flow"
        is_finished = end["status"] == "FINISHED"
        if (is_finished and by_flow) or (info.status != "RUNNING" and (info.end_time or 0) > end["time"]):
            return
        _end(to.client, to.parent, end, "" if is_finished else f"{self._header['stage']}: {end['reason']}")
        if not is_finished and not by_flow:
            _remove_tag(to.client, to.parent, EXPERIMENT)  # `dvc exp run` saves none if a stage fails

    def _send(self, to: Connection, events: Sequence[Event]) -> None:
        points = [event for event in events if event["kind"] == "metrics"]
        self._send_points(to, to.run, points)
        if (of_parent := curves.HEADLINES.get(self._header["stage"])) is not None:
            self._send_points(to, to.parent, points, of_parent)
        tags = dict[str, str]()
        for event in events:
            if event["kind"] == "results":
                self._send_results(to, event)
            elif event["kind"] == "tags":
                tags |= event["values"]
            elif event["kind"] == "event":
                tags[event["name"]] = f"at {event['step']}: {event['text']}"
        latest = {event["file"]: event for event in events if event["kind"] == "artifact"}
        tags |= self._send_artifacts(to, latest)
        if MLFLOW_RUN_NOTE in tags:
            tags[MLFLOW_RUN_NOTE] = self._describe(to, tags[MLFLOW_RUN_NOTE])
        if tags:
            texts = [RunTag(name, text[:MAX_TAG]) for name, text in tags.items()]
            to.client.log_batch(to.run, tags=texts)
        if events and events[-1]["kind"] == "end":
            end = events[-1]
            _end(to.client, to.run, end, end["reason"])
            if to.run == to.parent:
                newest = to.client.search_runs([to.experiment], view.PIPELINES, max_results=view.NUM_RUNS)
                names = {name for run in newest for name in run.data.metrics}  # a cancelled run has few
                to.client.set_experiment_tag(to.experiment, view.TAG, view.text(names))
            else:
                self._end_parent(to, end)

    def _send_points(
        self, to: Connection, run: str, points: Sequence[Event], names: Mapping[str, str] | None = None
    ) -> None:
        """Send one point per metric and step: a resumed stage logs some of them again.

        With `names` only metrics that have a name there, under that.
        """
        metrics = list[Metric]()
        for point in points:
            for own, value in point["values"].items():
                if (name := own if names is None else names.get(own)) is None:
                    continue
                key, step = (run, name), point["step"]
                if key not in to.held:
                    is_new = to.is_new and run == to.run
                    history = [] if is_new else to.client.get_metric_history(run, name)
                    to.held[key] = {one.step for one in history}
                if step not in to.held[key] and step > to.newest.get(key, -1):
                    metrics.append(Metric(name, value, point["time"], step))
                    to.newest[key] = step
        for start in range(0, len(metrics), BATCH_METRICS):
            to.client.log_batch(run, metrics=metrics[start : start + BATCH_METRICS])

    def _send_results(self, to: Connection, results: Event) -> None:
        """Send a stage's results to the pipeline's run, which may have them from another process."""
        held = to.client.get_run(to.parent).data.metrics
        new = {name: value for name, value in results["values"].items() if held.get(name) != value}
        metrics = [Metric(name, value, results["time"], 0) for name, value in new.items()]
        to.client.log_batch(to.parent, metrics=metrics)

    def _send_artifacts(self, to: Connection, artifacts: Mapping[str, Event]) -> dict[str, str]:
        """Send copies of files, with a figure of each CSV file of curves; returns tags that describe them."""
        tags = dict[str, str]()
        for name, artifact in artifacts.items():
            self._artifacts.add(name)
            if artifact["table"]:
                self._tables = list(dict.fromkeys([*self._tables, name]))
                tags[TABLES_TAG] = json.dumps([{"path": path, "type": "table"} for path in self._tables])
            file = self.record.files / name
            if not file.exists():  # MLflow got it before the run was resumed
                continue
            to.client.log_artifact(to.run, str(file), artifact["folder"])
            if artifact["folder"] == "plots":  # MLflow's charts have no preset layout
                figure, rows = self.record.files / "curves.png", curves.read_csv(file.read_text("utf-8"))
                try:
                    curves.draw(rows, cast("Stage", file.stem), figure)
                except UNDRAWABLE as error:
                    tags["rlhf.figure"] = f"{figure.name} cannot be drawn: {type(error).__name__}: {error}"
                else:
                    to.client.log_artifact(to.run, str(figure))
        return tags

    def _describe(self, to: Connection, note: str) -> str:
        """A description with links to artifacts before it, and the figure, which any MLflow server shows."""
        links = list[str]()
        for title, name in {"Samples": SAMPLES, "Report": REPORT}.items():
            if name in self._artifacts:
                page = view.run_page("", to.experiment, to.run, f"/artifacts/{name}")
                links.append(f"[{title}]({page.removeprefix('/')})")
        figure = f"![Curves](get-artifact?path=curves.png&run_uuid={to.run})"
        parts = [" · ".join(links), note, figure if self._artifacts & DRAWN else ""]
        return "\n\n".join(part for part in parts if part)


def _log_params(client: MlflowClient, run: str, values: Mapping[str, Any]) -> None:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    params = [Param(name, text[:MAX_PARAM]) for name, text in texts.items()]
    for start in range(0, len(params), BATCH_PARAMS):
        client.log_batch(run, params=params[start : start + BATCH_PARAMS])


def _set_running(client: MlflowClient, run: str) -> None:
    if client.get_run(run).info.status != "RUNNING":
        client.update_run(run, status="RUNNING")
    _remove_tag(client, run, REASON)


def _remove_tag(client: MlflowClient, run: str, tag: str) -> None:
    if tag in client.get_run(run).data.tags:
        client.delete_tag(run, tag)


def _end(client: MlflowClient, run: str, end: Event, reason: str) -> None:
    if reason:
        client.set_tag(run, REASON, reason[:MAX_TAG])
    else:
        _remove_tag(client, run, REASON)
    client.set_terminated(run, end["status"], end_time=end["time"])

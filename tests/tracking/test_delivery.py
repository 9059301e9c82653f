"""Nothing is lost or doubled, whatever happens to the stage, the disk or the server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INVALID_PARAMETER_VALUE, REQUEST_LIMIT_EXCEEDED
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.project.disk import DiskFullError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking.record import Assessment
from rlhf_tasks.tracking.store import Delivery, embedded_uri, rejection
from rlhf_tasks.tracking.sync import sync
from tests.tracking.toy import (
    UNREACHABLE,
    killed,
    log,
    pending,
    points,
    reason,
    record,
    runs,
    status,
    step,
    table,
    view,
)  # fmt: skip


def last_error(home: Path, key: str) -> str | None:
    error: str | None = record(home, key).state()["last_error"]
    return error


# ---------------------------------------------------------------------------------- the server


def test_all_runs_get_every_point_once_although_the_server_refuses_some_requests(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, away = MlflowClient.log_batch, list[bool]()

    def log_batch(self: MlflowClient, *args: Any, **options: Any) -> Any:
        if away:
            raise MlflowException("away")
        return real(self, *args, **options)

    def errors() -> list[str | None]:
        step(home)
        return [last_error(home, "sft-1"), last_error(home, "ppo-1")]

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    with tracking.open_run(Paths(), "sft", view(), key="sft-1") as sft:
        with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-1") as ppo:
            sft.metrics({"train/loss": 2.0}, step=1)
            ppo.metrics({"train/loss": 4.0}, step=1)
            assert errors() == [None, None]
            away.append(True)
            sft.metrics({"train/loss": 1.0}, step=2)
            ppo.metrics({"train/loss": 3.0}, step=2)
            assert errors() == ["MlflowException: away"] * 2
            away.clear()
            assert errors() == [None, None], "an error that is over is removed"
            away.append(True)
            ppo.metrics({"train/loss": 2.0}, step=3)
        assert errors()[1] == "MlflowException: away"
        away.clear()
    assert sync(home) == (2, {})
    assert points(home, "sft") == [(1, 2.0), (2, 1.0)]
    assert points(home, "ppo") == [(1, 4.0), (2, 3.0), (3, 2.0)]


# ----------------------------------------------------------------------------------- the record


def test_only_the_points_that_mlflow_lacks_are_sent_if_the_delivery_was_killed(home: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        tracker.metrics({"train/loss": 2.0}, step=2)
        step(home)  # and is killed: the next one begins anew
        tracker.metrics({"train/loss": 3.0}, step=3)
    assert sync(home) == (1, {})
    assert points(home) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sync(home) == (0, {})


def test_sync_leaves_a_running_stage_alone(home: Path) -> None:
    with tracking.open_run(Paths(), "sft", view()):
        assert sync(home) == (0, {})
    assert runs(home) == {}


def test_a_run_that_was_resumed_before_its_delivery_is_not_over(home: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
    killed(home, "k")
    delivery = Delivery(record(home, "k"))
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.table("samples", [{"query": "a"}])
        delivery.step()
        assert not record(home, "k").state()["closed"]
        assert record(home, "k").files.exists()
        tracker.table("samples", [{"query": "b"}])
    sync(home)
    assert (status(home, "sft"), pending(home)) == (["FINISHED"], set())


@pytest.mark.parametrize("first_part", ["delivered", "not delivered"])
def test_a_resumed_run_is_one_run_without_doubled_points(home: Path, first_part: str) -> None:
    """Killed after step 3, resumed from the snapshot after step 2."""
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        for step in (1, 2):
            tracker.metrics({"train/loss": float(step)}, step=step)
        tracker.table("samples", [{"query": "a"}])
        state = tracker.state_dict()
        tracker.metrics({"train/loss": 3.0}, step=3)
        tracker.table("samples", [{"query": "b"}])
    killed(home, "k")
    if first_part == "delivered":
        assert sync(home) == (1, {})
        assert status(home, "sft", "pipeline") == ["FAILED", "FAILED"]
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.load_state_dict(json.loads(json.dumps(state)))
        for step in (3, 4):
            tracker.metrics({"train/loss": float(step)}, step=step)
        assert [row["step"] for row in tracker.history()] == [1, 2, 3, 4]
        tracker.table("samples", [{"query": "c"}])
    assert sync(home) == (1, {})
    assert pending(home) == set()
    assert len(MlflowClient(embedded_uri(home)).search_runs(["1"], "attributes.run_name = 'sft'")) == 1
    assert points(home) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert (status(home, "sft"), reason(home, "sft")) == (["FINISHED"], None)
    assert table(home, "sft", "samples")["data"] == [["a"], ["c"]]


def test_a_clock_that_is_set_back_loses_no_point_and_doubles_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an hour: once between two points, and once more between a kill and the resumed run."""
    real, behind = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() - behind)
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        behind = 3600.0
        tracker.metrics({"train/loss": 2.0}, step=2)
        state = tracker.state_dict()
        tracker.metrics({"train/loss": 3.0}, step=3)
    killed(home, "k")
    assert sync(home) == (1, {})
    behind = 7200.0
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.load_state_dict(json.loads(json.dumps(state)))
        for step in (3, 4):
            tracker.metrics({"train/loss": float(step)}, step=step)
    assert sync(home) == (1, {})
    assert points(home) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert (status(home, "sft"), pending(home)) == (["FINISHED"], set())


def test_delivery_continues_with_a_resumed_run(home: Path) -> None:
    log("k", [(1, 1.0)])
    step(home)
    log("k", [(2, 2.0)])
    step(home)
    sync(home)
    assert pending(home) == set()
    assert points(home) == [(1, 1.0), (2, 2.0)]


def test_a_resumed_run_belongs_to_the_pipeline_that_ends_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pipeline in ("flow-1", "flow-2"):
        monkeypatch.setenv("RLHF_PARENT_RUN", pipeline)
        log("k")
        assert sync(home) == (1, {})
    parent = MlflowClient(embedded_uri(home)).get_run(runs(home)["sft"].data.tags["mlflow.parentRunId"])
    assert parent.data.tags["rlhf.pipeline"] == "flow-2"


def test_an_unfinished_line_waits_and_a_resumed_run_removes_it(home: Path) -> None:
    log("k", [(1, 1.0)])
    killed(home, "k")
    one = record(home, "k")
    with one.file.open("ab") as torn:
        torn.write(b'{"kind": "met')
    events, offset = one.read()
    assert [event["kind"] for event in events] == ["run", "metrics", "tags"]
    assert sync(home) == (1, {})
    assert one.state()["closed"]
    log("k", [(2, 2.0)])
    assert one.read(offset)[0][0]["kind"] == "run"
    assert sync(home) == (1, {})
    assert points(home) == [(1, 1.0), (2, 2.0)]


def test_a_line_that_a_full_disk_cuts_is_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda handle, data: write(handle, data[:9]))
            with pytest.raises(DiskFullError, match="is full"):
                tracker.metrics({"train/loss": 2.0}, step=2)
        tracker.metrics({"train/loss": 3.0}, step=3)
    assert sync(home) == (1, {})
    assert points(home) == [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize("text", ["", "[]", '{"closed": true', '{"closed": true}'])
def test_a_damaged_state_is_replaced_and_doubles_nothing(home: Path, text: str) -> None:
    log("k", [(1, 1.0)])
    assert sync(home) == (1, {})
    record(home, "k").state_file.write_text(text, encoding="utf-8")
    log("k", [(2, 2.0)])
    record(home, "k").state_file.write_text(text, encoding="utf-8")
    assert sync(home)[0] == 1
    assert points(home) == [(1, 1.0), (2, 2.0)]


def test_damaged_records_are_reported_by_sync_and_hold_nothing_up(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log("sft-1")
    damaged = {"torn": b'{"kind": "run", "ti{"kind": "metrics"}\n', "bytes": b"\xff\x00\n", "number": b"5\n"}
    for name, line in damaged.items():
        (home / f"outbox/{name}.jsonl").write_bytes(line)
    (home / "outbox/partial.jsonl").write_bytes(b'{"kind": "ru')
    sync(home)
    assert pending(home) == {*damaged, "partial"}
    log("sft-2")
    with record(home, "sft-2").file.open("ab") as middle:
        middle.write(b'{"kind": "metr\n')
    delivered, failed = sync(home)
    assert (delivered, set(failed)) == (0, {*damaged, "sft-2"})
    file = home / "outbox/torn.jsonl"
    assert failed["torn"].endswith(f"{file} has a damaged line: fix the line, or remove the file")
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------------------------- the flow


def test_a_flow_knows_why_mlflow_lacks_one_of_its_stages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {}) as pipeline:
        log("alone")
        assert pipeline.last_error() is None, "this stage belongs to another pipeline"
        monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
        log("ppo-1", stage="ppo", uri=UNREACHABLE)
        assert pipeline.last_error() == "ppo-1 is not delivered"
        sync(home)
        assert str(pipeline.last_error()).startswith("MlflowException")


# ------------------------------------------------------------------------------------ traces


def judge(home: Path, num_traces: int, uri: str | None = None) -> None:
    """A run `judge-1` with so many calls of a model."""
    with tracking.open_run(Paths(), "judge", view("judge", uri=uri), key="judge-1") as tracker:
        for number in range(num_traces):
            tracker.trace("judge gpt", {"model": "m"}, {"text": "A"}, start=number, end=number + 1)
        tracker.metrics({"gold/win_rate": 0.5}, step=1)


def traces(home: Path, uri: str | None = None) -> list[Any]:
    """The traces that MLflow has of stage judge, the first call first."""
    client, run = MlflowClient(uri or embedded_uri(home)), runs(home, uri)["judge"].info
    rows = client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    return sorted(rows, key=lambda trace: trace.info.request_time)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[int, MlflowException]:
    """What the server answers to the trace that starts at this millisecond, if it does not accept it."""
    real, errors = TracingClient.start_trace, dict[int, MlflowException]()

    def start_trace(self: TracingClient, info: Any) -> Any:
        if info.request_time in errors:
            raise errors[info.request_time]
        return real(self, info)

    monkeypatch.setattr(TracingClient, "start_trace", start_trace)
    return errors


@pytest.mark.filterwarnings("ignore:.*Any type hint")  # MLflow's own modules, when tracing begins
def test_calls_of_models_are_traces_of_the_run_and_none_is_sent_twice(home: Path) -> None:
    reply = {"text": "A", "first_is_better": 1.0}
    with tracking.open_run(Paths(), "judge", view("judge"), key="judge-1") as tracker:
        tracker.trace("judge gpt", {"model": "m"}, {"failure": "no winner"}, start=5, end=5)
        tracker.trace("judge gpt", {"model": "m"}, reply, start=1_700_000_000_000, end=1_700_000_000_250)
        step(home)
        tracker.trace("judge gpt", {"model": "m"}, reply, start=1_700_000_000_300, end=1_700_000_000_310)
    assert sync(home) == (1, {})
    rows = traces(home)
    assert [trace.info.state.value for trace in rows] == ["ERROR", "OK", "OK"]
    assert (rows[1].info.request_time, rows[1].info.execution_duration) == (1_700_000_000_000, 250)
    assert rows[1].data.spans[0].outputs == reply


def said(name: str, kind: str, value: str | None, **changes: Any) -> Assessment:
    one: dict[str, Any] = {
        "name": name, "kind": kind, "source": "HUMAN", "by": "anna", "time": 5, "value": value,
        "error": "", "rationale": "", "metadata": {},
    }  # fmt: skip
    return cast("Assessment", one | changes)


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_assessments_arrive_with_their_trace_and_none_twice(home: Path) -> None:
    judge = {"source": "LLM_JUDGE", "by": "judge-1"}
    first = [
        said("gpt", "feedback", "A", rationale="Because.", metadata={"probability_of_A": "0.9"}, **judge),
        said("gpt", "feedback", "B"),
        said("gpt", "expectation", "B"),
    ]
    failed = said("gpt", "feedback", None, error="no preference", **judge)
    with tracking.open_run(Paths(), "judge", view("judge"), key="judge-1") as tracker:
        tracker.trace("judge gpt", {}, {"text": "A"}, start=5, end=6, assessments=first)
        step(home)
        tracker.trace("judge gpt", {}, {"failure": "no preference"}, start=7, end=8, assessments=[failed])
        tracker.trace("judge gpt", {}, {"text": "A"}, start=9, end=9)
    assert sync(home) == (1, {})
    one, two, three = ([a.to_dictionary() for a in trace.info.assessments] for trace in traces(home))
    assert three == []
    by_source = {
        (a["source"]["source_type"], next(k for k in ("feedback", "expectation") if k in a)): a for a in one
    }
    assert len(one) == len(by_source) == 3
    assert {a["assessment_name"] for a in [*one, *two]} == {"gpt"}
    verdict = by_source["LLM_JUDGE", "feedback"]
    assert (verdict["feedback"]["value"], verdict["rationale"]) == ("A", "Because.")
    assert verdict["source"]["source_id"] == "judge-1"
    assert verdict["metadata"]["probability_of_A"] == "0.9"
    assert verdict["metadata"]["mlflow.assessment.sourceRunId"] == runs(home)["judge"].info.run_id
    assert by_source["HUMAN", "feedback"]["feedback"]["value"] == "B"
    assert by_source["HUMAN", "expectation"]["expectation"]["value"] == "B"
    assert two[0]["feedback"]["error"]["error_message"] == "no preference"


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_traces_of_a_record_without_assessments_are_sent(home: Path) -> None:
    with tracking.open_run(Paths(), "judge", view("judge"), key="judge-1") as tracker:
        tracker.trace("judge gpt", {}, {"text": "A"}, start=5, end=6)
    file = record(home, "judge-1").file
    file.write_text(file.read_text(encoding="utf-8").replace(', "assessments": []', ""), encoding="utf-8")
    assert sync(home) == (1, {})
    assert len(traces(home)) == 1


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_a_trace_that_was_not_accepted_is_sent_again_and_holds_nothing_else_up(
    home: Path, answer: dict[int, MlflowException]
) -> None:
    answer[1] = MlflowException("too busy")
    judge(home, 3)
    delivered, failed = sync(home)
    assert (delivered, list(failed)) == (0, ["judge-1"])
    assert "has not accepted 1 of 3 traces" in failed["judge-1"]
    assert (status(home, "judge"), runs(home)["judge"].data.metrics) == (["FINISHED"], {"gold/win_rate": 0.5})
    answer.clear()
    assert sync(home) == (1, {})
    assert [trace.info.request_time for trace in traces(home)] == [0, 1, 2]
    assert status(home, "judge") == ["FINISHED"]


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_a_rejected_trace_is_reported_and_waits_for_nothing(
    home: Path, answer: dict[int, MlflowException], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two are rejected, and two may be accepted later: only these keep the run in the outbox."""
    answer[0] = MlflowException("bad tag", error_code=INVALID_PARAMETER_VALUE)
    answer[1] = MlflowException("API request to endpoint /x failed with error code 413 != 200. Too large")
    answer[2] = MlflowException("API request to endpoint /x failed with error code 503 != 200. Away")
    answer[3] = MlflowException("slower", error_code=REQUEST_LIMIT_EXCEEDED)
    judge(home, 5)
    assert "has not accepted 2 of 5 traces" in sync(home)[1]["judge-1"]
    line = "MLflow rejected 2 trace(s) of judge-1 (status 400: MlflowException: bad tag)"
    assert capsys.readouterr().out.count(line) == 1
    answer.clear()
    assert sync(home) == (1, {})
    assert len(traces(home)) == 5
    tag = "2, such as status 400: MlflowException: bad tag"
    assert runs(home)["judge"].data.tags["rlhf.rejected_traces"] == tag
    assert line not in capsys.readouterr().out
    kept = [event for event in record(home, "judge-1").read()[0] if event["kind"] == "trace"]
    assert len(kept) == 5


@pytest.mark.parametrize(
    ("error", "is_rejection"),
    [
        (MlflowException("bad tag", error_code=INVALID_PARAMETER_VALUE), True),
        (MlflowException("API request to endpoint /x failed with error code 413 != 200. Too large"), True),
        (MlflowException("API request to endpoint /x failed with error code 403 != 200. Key"), False),
        (MlflowException("QueuePool limit reached", error_code=BAD_REQUEST), False),
    ],
)
def test_an_error_that_another_key_or_a_later_try_can_fix_is_no_rejection(
    error: MlflowException, is_rejection: bool
) -> None:
    assert (rejection(error) is not None) is is_rejection

"""Nothing is lost or doubled, whatever happens to the stage, the disk or the server."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking.store import PARTIAL, Delivery, embedded_uri, log_page, open_store
from rlhf_tasks.tracking.sync import sync
from tests.flows.toy import until
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
    table,
    view,
)


def last_error(home: Path, key: str) -> str | None:
    error: str | None = record(home, key).state()["last_error"]
    return error


def test_sync_leaves_a_running_stage_alone(home: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="k"):
        assert sync(home) == (0, {})
    assert runs(home) == {}


def test_a_run_that_was_resumed_before_its_delivery_is_not_over(home: Path) -> None:
    log("k", [(1, 1.0)])
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


def test_an_attempt_that_was_interrupted_is_completed_by_the_next(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run exists then, without its parameters."""
    log("k")
    send, calls = MlflowClient.log_batch, list[str]()

    def fail_once(self: MlflowClient, run: str, *args: Any, **given: Any) -> None:
        calls.append(run)
        if len(calls) == 2:  # of the stage; the first is the pipeline's
            raise MlflowException("the server went away")
        send(self, run, *args, **given)

    monkeypatch.setattr(MlflowClient, "log_batch", fail_once)
    assert "went away" in sync(home)[1]["k"]
    assert runs(home)["sft"].data.params == {}
    assert sync(home) == (1, {})
    assert runs(home)["sft"].data.params["sft.num_epochs"]


def test_a_run_of_another_machine_is_gone_after_a_day_without_a_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="k"):
        yesterday = time.time() - 86_500
        os.utime(record(home, "k").file, (yesterday, yesterday))
        assert sync(home) == (0, {}), "here it is known to live, as after a night of sleep"
        monkeypatch.setattr(platform, "node", lambda: "elsewhere")
        assert sync(home) == (1, {})
        assert status(home, "sft") == ["FAILED"]


@pytest.mark.parametrize(
    ("first_part", "hour"), [("delivered", 0.0), ("not delivered", 0.0), ("delivered", 3600.0)]
)
def test_a_resumed_run_is_one_run_without_doubled_points_whatever_the_clock_says(
    home: Path, monkeypatch: pytest.MonkeyPatch, first_part: str, hour: float
) -> None:
    """Killed after step 3, resumed from the snapshot after step 2.

    The clock is set back by the hour between two points, and once more between the kill and the resumed run.
    """
    real, behind = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() - behind)
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        for step in (1, 2):
            tracker.metrics({"train/loss": float(step)}, step=step)
            behind = hour
        tracker.table("samples", [{"query": "a"}])
        state = tracker.state_dict()
        tracker.metrics({"train/loss": 3.0}, step=3)
        tracker.table("samples", [{"query": "b"}])
    killed(home, "k")
    if first_part == "delivered":
        assert sync(home) == (1, {})
        assert status(home, "sft", "pipeline") == ["FAILED", "FAILED"]
    behind = 2 * hour
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


def test_a_resumed_run_sends_points_that_mlflow_lacks_below_its_newest_one(home: Path) -> None:
    for steps in ((2, 4), (3, 4, 6)):
        log("k", [(step, float(step)) for step in steps])
        killed(home, "k")
        assert sync(home) == (1, {})
    assert sorted(points(home)) == [(2, 2.0), (3, 3.0), (4, 4.0), (6, 6.0)]


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


def test_a_flow_knows_why_mlflow_lacks_one_of_its_stages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {}) as pipeline:
        log("alone")
        assert pipeline.last_error() is None, "this stage belongs to another pipeline"
        monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
        log("ppo-1", stage="ppo", uri=UNREACHABLE)
        assert pipeline.last_error() == "ppo-1 is not delivered"
        sync(home)
        assert str(pipeline.last_error()).startswith("MlflowException")


CREATE = (
    "from pathlib import Path; from rlhf_tasks.tracking.store import open_store; open_store(None, Path('.'))"
)


@pytest.mark.e2e
def test_a_database_whose_creation_was_cut_off_is_created_anew(tmp_path: Path) -> None:
    def tables() -> int:
        files = [*tmp_path.glob(f"{PARTIAL}*/made.db")]
        return files[0].stat().st_size if files else 0

    environment = os.environ | {"PYTHONPATH": str(Path(tracking.__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", CREATE], cwd=tmp_path, env=environment) as creation:
        until(tables, "the first tables")
        creation.kill()
    assert not (tmp_path / "mlflow.db").exists()
    assert open_store(None, tmp_path).get_experiment("0").name == "Default"
    assert {file.name for file in tmp_path.glob("mlflow.*")} == {"mlflow.db", "mlflow.lock"}


def test_a_deleted_experiment_is_named_and_its_runs_wait(home: Path) -> None:
    client = MlflowClient(embedded_uri(home))
    identity = client.create_experiment("rlhf")
    client.delete_experiment(identity)
    log("k", [(1, 1.0)])
    command = (
        f"MLFLOW_TRACKING_URI={embedded_uri(home)} mlflow experiments restore --experiment-id {identity}"
    )
    delivered, failed = sync(home)
    assert delivered == 0
    assert "MLflow's experiment rlhf is deleted" in failed["k"]
    assert failed["k"].endswith(command)
    client.restore_experiment(identity)
    assert sync(home) == (1, {})


def test_a_page_about_several_runs_is_the_artifact_of_a_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "methods.html"
    page.write_text("<p>", encoding="utf-8")
    for _ in range(2):
        log_page(config.Tracking(experiment="mine"), tmp_path, "methods", page)
    client = open_store(None, tmp_path)
    [experiment] = client.search_experiments(filter_string="name = 'mine'")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("methods", "FINISHED")
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["methods.html"]
    log_page(config.Tracking(enabled=False), tmp_path / "nowhere", "methods", page)
    assert not (tmp_path / "nowhere").exists()
    log_page(config.Tracking(uri="http://127.0.0.1:9"), tmp_path, "methods", page)
    assert "WARNING: MLflow does not have methods.html: " in capsys.readouterr().out

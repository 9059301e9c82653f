"""A run's own thread delivers it: MLflow may die, come late or stay away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.project import processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking import sync as delivery
from rlhf_tasks.tracking.store import VANISHED, embedded_uri
from rlhf_tasks.tracking.sync import Sender, sync
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
    served,
    status,
    view,
)

pytestmark = pytest.mark.e2e

STAGE = """\
import sys
from rlhf_tasks import config, tracking
from rlhf_tasks.project.paths import Paths
(key,) = sys.argv[1:]
with tracking.open_run(Paths(), "sft", config.VIEWS["sft"].of(config.load()), key=key) as tracker:
    tracker.metrics({"train/loss": 1.0}, step=1)
"""

IMPORTING = f"""\
import sys, threading, time
class Pausing:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow.entities" and threading.current_thread() is not threading.main_thread():
            has_imported.wait(60)
has_imported = threading.Event()
sys.meta_path.insert(0, Pausing())
{STAGE}
    while "mlflow" not in sys.modules:
        time.sleep(0.01)
    import mlflow.exceptions
    has_imported.set()
"""


@pytest.fixture
def real(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `.rlhf` folder; runs deliver themselves, and try again soon after a failure."""
    monkeypatch.setattr(delivery, "BATCH_SECONDS", 0.05)
    monkeypatch.setattr(delivery, "RETRY_SECONDS", 0.2)
    return store


def stage(key: str, code: str = STAGE, **environment: str) -> subprocess.Popen[bytes]:
    """A stage in a process of its own."""
    root = str(Path(tracking.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, **environment}
    return subprocess.Popen([sys.executable, "-c", code, key], env=environment)


def test_a_dead_server_ends_nothing_loses_nothing_and_is_reported_once(
    real: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    with tracking.open_run(Paths(), "sft", view(uri=UNREACHABLE), key="k") as tracker:
        for step in range(1, 4):
            tracker.metrics({"train/loss": float(step)}, step=step)
            until(lambda: record(real, "k").state()["last_error"], "a failed delivery")
    assert capsys.readouterr().out.count("MLflow does not receive this run (MlflowException: ") == 1
    delivered, failed = sync(real)
    assert (delivered, list(failed)) == (0, ["k"])
    file = record(real, "k").file
    file.write_text(file.read_text(encoding="utf-8").replace(f'"{UNREACHABLE}"', "null"), encoding="utf-8")
    assert sync(real) == (1, {})
    assert points(real) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_mlflow_that_is_away_for_long_is_tried_again_and_gets_every_point_once(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run's failures delay no other run, and logging waits for neither."""
    sent, tries = MlflowClient.log_batch, list[str]()

    def log_batch(self: MlflowClient, run_id: str, *args: Any, **options: Any) -> Any:
        tries.append(run_id)
        if len(tries) <= 5:
            raise MlflowException("away")
        return sent(self, run_id, *args, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        for number in range(1, 4):
            tracker.metrics({"train/loss": float(number)}, step=number)
        until(lambda: len(tries) > 5 and record(real, "k").state()["last_error"] is None, "the delivery")
        with tracking.open_run(Paths(), "ppo", view("ppo"), key="other") as other:
            other.metrics({"train/loss": 9.0}, step=1)
        tracker.metrics({"train/loss": 4.0}, step=4)
    assert points(real, "sft") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert points(real, "ppo") == [(1, 9.0)]


def test_a_run_is_delivered_while_it_grows_and_completely_at_its_end(real: Path) -> None:
    """Its container may end with it."""
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {"a": "b"}) as pipeline:
        with tracking.open_run(Paths(), "sft", view(), key="sft-1") as tracker:
            tracker.metrics({"train/loss": 2.0}, step=1)
            until(lambda: points(real), "the first point")
            tracker.metrics({"train/loss": 1.0}, step=2)
        assert pipeline.last_error() is None
    assert pending(real) == set()
    assert points(real) == [(1, 2.0), (2, 1.0)]
    run = runs(real)["sft"].info.run_id
    assert "curves.png" in [file.path for file in MlflowClient(embedded_uri(real)).list_artifacts(run)]


def test_a_stage_never_meets_an_mlflow_that_the_delivery_has_half_imported(real: Path) -> None:
    """This stage imports it, too: at once, and any other thread goes on with its own import after that."""
    assert stage("k", IMPORTING).wait(120) == 0
    assert points(real) == [(1, 1.0)]


def test_a_killed_stage_is_shown_as_failed_by_a_run_that_goes_on(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    log("sft-1", [(1, 1.0)])
    killed(real, "sft-1")
    with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-1") as tracker:
        tracker.metrics({"lr": 1.0}, step=1)
        until(lambda: pending(real) == {"ppo-1"}, "the delivery of the killed stage")
    assert (status(real, "sft", "ppo"), reason(real, "sft")) == (["FAILED", "FINISHED"], VANISHED)


@pytest.mark.slow
def test_two_first_stages_at_once_share_one_store(project: Path) -> None:
    """They belong to two pipelines, and there is no database yet."""
    both = [stage(flow, RLHF_PARENT_RUN=flow) for flow in ("flow-2", "flow-3")]
    assert [process.wait() for process in both] == [0, 0]
    home = project / ".rlhf"
    assert pending(home) == set()
    names = [run.info.run_name.split("-")[0] for run in MlflowClient(embedded_uri(home)).search_runs(["1"])]
    assert sorted(names) == ["repro", "repro", "sft", "sft"]


@pytest.mark.slow
@pytest.mark.parametrize("is_back", ["before the end", "after it"])
def test_a_server_that_dies_midway_gets_every_point_once(
    real: Path, capsys: pytest.CaptureFixture[str], is_back: str
) -> None:
    port = free_port(28700)
    url, losses = f"http://127.0.0.1:{port}", [(step, 1 / step) for step in range(1, 31)]

    def train(tracker: tracking.Tracker, first: int, last: int) -> None:
        for step, loss in losses[first - 1 : last]:
            tracker.metrics({"train/loss": loss}, step=step)

    with ExitStack() as again:
        with tracking.open_run(Paths(), "sft", view(uri=url), key="sft-1") as tracker:
            with served(real, port):
                train(tracker, 1, 10)
                until(lambda: len(points(real, uri=url)) == 10, "the first points")
            train(tracker, 11, 20)
            until(lambda: record(real, "sft-1").state()["last_error"], "a failed delivery")
            train(tracker, 21, 30)
            tracker.final({"perplexity": 2.0})
            assert "Training continues, and metrics are kept in" in capsys.readouterr().out
            if is_back == "before the end":
                again.enter_context(served(real, port))
        if is_back == "after it":
            assert pending(real) == {"sft-1"}
            again.enter_context(served(real, port))
            assert sync(real) == (1, {})
        assert pending(real) == set()
        assert points(real, uri=url) == losses
        assert points(real, name="perplexity", uri=url) == [(0, 2.0)]
        assert status(real, "sft") == ["FINISHED"]


def test_the_wait_for_a_delivery_is_bounded(
    real: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server takes a request, and answers when the test is over."""
    is_over = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: is_over.wait(60))
    monkeypatch.setattr(delivery, "WAIT_SECONDS", 0.5)
    begun = time.monotonic()
    try:
        log("sft-1", [(1, 1.0)])
        assert time.monotonic() - begun < 30
        assert "MLflow does not receive this run (no answer within 0 seconds)" in capsys.readouterr().out
        assert pending(real) == {"sft-1"}
    finally:
        is_over.set()


def test_a_record_that_somebody_removed_ends_no_stage_and_holds_no_other_run_up(real: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="sft-1") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        until(lambda: points(real), "the first point")
        record(real, "sft-1").file.unlink()
        tracker.metrics({"train/loss": 2.0}, step=2)
        log("ppo-1", [(1, 1.0)], stage="ppo")
    assert record(real, "ppo-1").state()["closed"]
    delivered, failed = sync(real)
    assert (delivered, list(failed)) == (0, ["sft-1"])
    assert "has lost its first line: remove the file" in failed["sft-1"]


def test_the_run_of_another_machine_is_left_alone_until_its_record_ends(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a disk. Whether its process lives is known there only."""
    with monkeypatch.context() as there:
        there.setattr(Sender, "start", lambda _: None)
        there.setattr(Sender, "close", lambda *_: None)
        there.setattr(processes, "name_of", lambda _: "elsewhere:1:1")
        with tracking.open_run(Paths(), "sft", view(), key="sft-1") as tracker:
            tracker.metrics({"train/loss": 1.0}, step=1)
            assert sync(real) == (0, {})
            assert runs(real) == {}
    assert sync(real) == (1, {})
    assert (points(real), status(real, "sft")) == ([(1, 1.0)], ["FINISHED"])

"""One uploader for all runs of a machine: started, replaced, and ended after its runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking import uploader
from rlhf_tasks.tracking.delivery import VANISHED
from rlhf_tasks.tracking.outbox import Outbox
from rlhf_tasks.tracking.store import embedded_uri
from rlhf_tasks.tracking.uploader import sync
from tests.flows.toy import until
from tests.tracking.toy import (
    log,
    pending,
    points,
    reason,
    record,
    runs,
    served,
    status,
    view,
)  # fmt: skip

pytestmark = pytest.mark.e2e

STAGE = """\
import sys
from rlhf_tasks import config, tracking
from rlhf_tasks.project.paths import Paths
name, key = sys.argv[1:]
with tracking.open_run(Paths(), name, config.VIEWS[name].of(config.load()), key=key) as tracker:
    tracker.metrics({"train/loss": 1.0}, step=1)
heavy = {"mlflow", "matplotlib", "torch"} & sys.modules.keys()
assert not heavy, heavy
"""
DVC = """\
import subprocess, sys
for line in sys.stdin:
    print(subprocess.run([sys.executable, "stage.py", *line.split()]).returncode, flush=True)
"""
FLOW = """\
import time
from rlhf_tasks import config
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import pipeline
with pipeline.open_run(Paths(), "9", config.load().tracking, {}):
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def real(store: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The `.rlhf` folder of a project with real uploaders; they must end by themselves."""
    (project / "stage.py").write_text(STAGE, encoding="utf-8")
    (project / "dvc").write_text(DVC, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(tracking.__file__).parents[2]))
    try:
        yield store
        until(lambda: uploaders(store) == [], "the uploaders to end")
    finally:
        for process in uploaders(store):
            process.kill()


def uploaders(home: Path) -> list[psutil.Process]:
    processes = list[tuple[psutil.Process, psutil.Process | None]]()
    for process in psutil.process_iter():
        try:
            command, parent = process.cmdline(), process.parent()
        except psutil.Error:
            continue
        if "rlhf_tasks.tracking.uploader" in command and str(home / "outbox") in command:
            processes.append((process, parent))
    own = [process for process, _ in processes]
    # a child has its parent's command line until it runs its own program
    return [process for process, parent in processes if parent not in own]


def the_uploader(home: Path) -> psutil.Process:
    """The only one, once it runs."""
    until(lambda: uploader.is_running(Outbox.of(home)), "an uploader")
    [process] = uploaders(home)
    return process


def run_stage(name: str, key: str) -> None:
    subprocess.run([sys.executable, "stage.py", name, key], check=True)


def files(home: Path, stage: str) -> list[str]:
    run = runs(home)[stage].info.run_id
    return [file.path for file in MlflowClient(embedded_uri(home)).list_artifacts(run) if not file.is_dir]


@contextmanager
def dvc() -> Iterator[subprocess.Popen[str]]:
    """A process named like dvc, which runs a stage for each line that it reads."""
    command = [sys.executable, "dvc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def repro(process: subprocess.Popen[str], stage: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{stage} {stage}-1\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0\n"


def test_an_uploader_that_waits_for_the_next_stage_uses_less_than_a_hundredth_of_a_core(real: Path) -> None:
    with dvc() as process:
        repro(process, "prepare")
        one = the_uploader(real)
        until(lambda: not pending(real), "the delivery")
        before = sum(one.cpu_times()[:2])
        time.sleep(4)
        assert sum(one.cpu_times()[:2]) - before < 0.04


def test_stages_of_one_dvc_process_share_an_uploader_that_ends_with_it(real: Path) -> None:
    with dvc() as process:
        repro(process, "sft")
        first = the_uploader(real)
        repro(process, "ppo")
        assert uploaders(real) == [first]
        assert pending(real) == set()
        assert status(real, "pipeline") == ["RUNNING"]
        process.kill()
        process.wait()
        until(lambda: uploaders(real) == [], "the uploader to end")
    assert status(real, "sft", "ppo", "pipeline") == ["FINISHED"] * 3
    assert runs(real)["pipeline"].info.end_time == runs(real)["ppo"].info.end_time


def test_a_stage_waits_until_its_run_and_figure_are_delivered(real: Path) -> None:
    """Its container may end with it."""
    run_stage("sft", "sft-1")
    assert pending(real) == set()
    assert files(real, "sft") == ["curves.png"]


def test_a_flow_starts_the_uploader_of_its_stages_and_waits_for_their_figures(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {"a": "b"}) as pipeline:
        first = the_uploader(real)
        run_stage("sft", "sft-1")
        run_stage("ppo", "ppo-1")
        assert pipeline.last_error() is None
        assert uploaders(real) == [first]
    assert pending(real) == set()
    assert files(real, "sft") == files(real, "ppo") == ["curves.png"]
    parents = {runs(real)[name].data.tags["mlflow.parentRunId"] for name in ("sft", "ppo")}
    assert parents == {runs(real)["pipeline"].info.run_id}
    assert (status(real, "pipeline"), runs(real)["pipeline"].data.tags["a"]) == (["FINISHED"], "b")


def test_a_killed_uploader_is_replaced_by_the_next_stage_and_at_a_stage_s_end(real: Path) -> None:
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {}):
        first = the_uploader(real)
        first.kill()
        until(lambda: uploaders(real) == [], "its end")
        with tracking.open_run(Paths(), "sft", view(), key="sft-1") as tracker:
            tracker.metrics({"train/loss": 2.0}, step=1)
            until(lambda: points(real), "the first point")
            the_uploader(real).kill()
            tracker.metrics({"train/loss": 1.0}, step=2)
        assert record(real, "sft-1").state().closed
    assert points(real) == [(1, 2.0), (2, 1.0)]
    assert status(real, "sft", "pipeline") == ["FINISHED"] * 2


def test_a_flow_that_vanishes_is_shown_as_failed_and_its_uploader_ends(real: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FLOW], stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "begun\n"
        the_uploader(real)
        os.kill(flow.pid, signal.SIGKILL)
    until(lambda: uploaders(real) == [], "the uploader to end")
    assert (status(real, "pipeline"), reason(real, "pipeline")) == (["FAILED"], VANISHED)
    assert list((real / "outbox").glob("uploader@*")) == [], "neither its name nor a log stays"


def test_two_first_stages_at_once_share_one_uploader_and_one_store(project: Path) -> None:
    """They belong to two pipelines, and there is no database yet."""
    (project / "stage.py").write_text(STAGE, encoding="utf-8")
    root = str(Path(tracking.__file__).parents[2])
    both = [
        subprocess.Popen(
            [sys.executable, "stage.py", "sft", flow],
            env=os.environ | {"RLHF_PARENT_RUN": flow, "PYTHONPATH": root},
        )
        for flow in ("flow-2", "flow-3")
    ]
    assert [stage.wait() for stage in both] == [0, 0]
    home = project / ".rlhf"
    until(lambda: pending(home) == set(), "the figures")
    names = [run.info.run_name.split("-")[0] for run in MlflowClient(embedded_uri(home)).search_runs(["1"])]
    assert sorted(names) == ["repro", "repro", "sft", "sft"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Any type hint")  # MLflow's own modules, when tracing begins
@pytest.mark.parametrize("is_back", ["before the end", "after it"])
def test_a_server_that_dies_midway_gets_every_point_and_trace_once(
    real: Path, capsys: pytest.CaptureFixture[str], is_back: str
) -> None:
    port = free_port(28700)
    url, losses = f"http://127.0.0.1:{port}", [(step, 1 / step) for step in range(1, 31)]

    def train(tracker: tracking.Tracker, first: int, last: int) -> None:
        for step, loss in losses[first - 1 : last]:
            tracker.metrics({"train/loss": loss}, step=step)
        tracker.trace("judge gpt", {"model": "m"}, {"text": "A"}, start=first, end=last)

    with ExitStack() as again:
        with tracking.open_run(Paths(), "sft", view(uri=url), key="sft-1") as tracker:
            with served(real, port):
                train(tracker, 1, 10)
                until(lambda: len(points(real, uri=url)) == 10, "the first points")
            train(tracker, 11, 20)
            until(lambda: record(real, "sft-1").state().last_error, "a failed delivery")
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
        assert points(real, name="perplexity", uri=url) == [(30, 2.0)]
        assert status(real, "sft") == ["FINISHED"]
        run = runs(real)["sft"].info
        rows = MlflowClient(url).search_traces(locations=[run.experiment_id], run_id=run.run_id)
        assert sorted(trace.info.request_time for trace in rows) == [1, 11, 21]


def test_a_disk_without_locks_ends_no_stage_and_is_reported_once(
    real: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (real / "outbox/uploader.lock").mkdir(parents=True)  # a lock that cannot be taken
    log("sft-1", [(1, 1.0)])
    assert capfd.readouterr().out.count("MLflow cannot be reached (see ") == 1
    [file] = (real / "outbox").glob("uploader@*.log")
    assert "Error" in file.read_text(encoding="utf-8")
    assert list(sync(real)[1]) == ["sft-1"]
    (real / "outbox/uploader.lock").rmdir()
    assert sync(real) == (1, {})


def test_an_uploader_that_cannot_be_started_ends_neither_stage_nor_flow(
    real: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uploader.log_file(Outbox.of(real)).mkdir(parents=True)
    log("sft-1", [(1, 1.0)])
    assert capsys.readouterr().out.count("MLflow cannot be reached (no uploader could be started: ") == 1
    with tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {}):
        pass
    assert "no uploader could be started: " in capsys.readouterr().out
    assert sync(real) == (2, {})


def test_the_wait_for_a_delivery_is_bounded(real: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as busy:
        start = time.monotonic()
        assert uploader.wait(Outbox.of(real), lambda: False, busy, 0.2), "an uploader continues by itself"
        assert time.monotonic() - start >= 0.2
        busy.returncode = None
        busy.kill()

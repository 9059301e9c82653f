"""One courier for all that belongs together: found, followed, replaced, and gone when it is over."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import context, courier, curves, rendezvous, store
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking.courier import Courier, Delivery
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool, pending, tell_refused
from rlhf_tasks.tracking.store import embedded_uri
from tests.flows.toy import until
from tests.tracking.toy import deliver, runs, served, view

COUNTED = """\
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow":
            open(os.environ["IMPORTS"], "a").write(f"{os.getpid()}\\n")
sys.meta_path.insert(0, Finder())
"""
STAGE = """\
import sys
from rlhf_tasks import config, tracking
name, key = sys.argv[1:]
with tracking.open_run(name, config.VIEWS[name].of(config.load()), key=key) as tracker:
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
from rlhf_tasks.tracking import pipeline
with pipeline.open_run("9", config.load().tracking, {}):
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def there(project: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The .rlhf folder of a project with real couriers, whose imports of MLflow are counted.

    In the end none of them is left.
    """
    home = project / ".rlhf"
    home.mkdir()
    shutil.copy(empty_database, home)
    (project / "site").mkdir()
    (project / "site/sitecustomize.py").write_text(COUNTED, encoding="utf-8")
    (project / "stage.py").write_text(STAGE, encoding="utf-8")
    (project / "dvc").write_text(DVC, encoding="utf-8")
    root = str(Path(tracking.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(project / "site"), root]))
    monkeypatch.setenv("IMPORTS", str(project / "imports"))
    try:
        yield home
        until(lambda: couriers(home) == [], "the couriers to go")
    finally:
        for process in couriers(home):
            process.kill()


def couriers(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "rlhf_tasks.tracking.courier" in words and str(home / "spool") in words:
            found.append(process)
    return found


def imports(home: Path) -> list[str]:
    """The processes that imported MLflow."""
    return sorted(set((home.parent / "imports").read_text(encoding="utf-8").split()))


def the_courier(home: Path) -> psutil.Process:
    """Once it has imported MLflow."""
    until((home.parent / "imports").exists, "a courier")
    found = couriers(home)
    assert len(found) == 1
    return found[0]


def run_stage(name: str, key: str) -> None:
    subprocess.run([sys.executable, "stage.py", name, key], check=True)


def points(home: Path, stage: str, uri: str | None = None) -> list[tuple[int, float]]:
    client = MlflowClient(uri or embedded_uri(home))
    history = client.get_metric_history(runs(home, uri)[stage].info.run_id, "train/loss")
    return sorted((point.step, point.value) for point in history)


def figures(home: Path, stage: str) -> list[str]:
    run = runs(home)[stage].info.run_id
    return [file.path for file in MlflowClient(embedded_uri(home)).list_artifacts(run) if not file.is_dir]


@contextmanager
def dvc() -> Iterator[subprocess.Popen[str]]:
    """A process that looks like dvc's, and runs the stages that it is told, a line each."""
    words = [sys.executable, "dvc"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0\n"


@pytest.mark.e2e
def test_stages_of_one_dvc_process_have_one_courier_that_goes_with_it(there: Path) -> None:
    with dvc() as process:
        tell(process, "sft sft-1")
        first = the_courier(there)
        tell(process, "ppo ppo-1")
        assert couriers(there) == [first]
        assert pending(there / "spool") == []
        assert runs(there)["pipeline"].info.status == "RUNNING"
        process.kill()
        process.wait()
        until(lambda: couriers(there) == [], "the courier to go")
    found = runs(there)
    assert [found[name].info.status for name in ("sft", "ppo", "pipeline")] == ["FINISHED"] * 3
    assert found["pipeline"].info.end_time == found["ppo"].info.end_time
    assert imports(there) == [str(first.pid)]


@pytest.mark.e2e
def test_a_stage_that_ends_with_its_container_leaves_nothing_behind(there: Path) -> None:
    run_stage("sft", "sft-1")
    assert pending(there / "spool") == []
    assert figures(there, "sft") == ["curves.png"]


@pytest.mark.e2e
def test_a_flow_starts_the_courier_that_delivers_its_stages(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    with tracking_pipeline.open_run("1", config.load().tracking, {"a": "b"}) as told:
        first = the_courier(there)
        run_stage("sft", "sft-1")
        run_stage("ppo", "ppo-1")
        assert told.trouble() is None
        assert couriers(there) == [first]
    assert pending(there / "spool") == [], "the flow has waited for all"
    until(lambda: couriers(there) == [], "the courier to go")
    found = runs(there)
    assert figures(there, "sft") == figures(there, "ppo") == ["curves.png"]
    parents = {found[name].data.tags["mlflow.parentRunId"] for name in ("sft", "ppo")}
    assert parents == {found["pipeline"].info.run_id}
    assert (found["pipeline"].info.status, found["pipeline"].data.tags["a"]) == ("FINISHED", "b")
    assert imports(there) == [str(first.pid)]


@pytest.mark.e2e
def test_a_killed_courier_is_replaced_by_the_next_stage_and_at_a_stage_s_end(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    with tracking_pipeline.open_run("1", config.load().tracking, {}):
        the_courier(there).kill()
        with tracking.open_run("sft", view(), key="sft-1") as tracker:
            second = until(lambda: couriers(there), "another courier")[0]
            tracker.metrics({"train/loss": 2.0}, step=1)
            until(lambda: "sft" in runs_so_far(there) and points(there, "sft"), "the first point")
            second.kill()
            tracker.metrics({"train/loss": 1.0}, step=2)
        assert Spool(there / "spool", "sft-1").is_sent, "by one that was started at the end"
    until(lambda: pending(there / "spool") == [], "the figure")
    assert points(there, "sft") == [(1, 2.0), (2, 1.0)]
    assert [runs(there)[name].info.status for name in ("sft", "pipeline")] == ["FINISHED"] * 2


def runs_so_far(home: Path, uri: str | None = None) -> dict[str, Any]:
    try:
        return runs(home, uri)
    except AssertionError:
        return {}  # there is no experiment yet


@pytest.mark.e2e
def test_a_flow_that_vanishes_is_failed_and_its_courier_goes(there: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FLOW], stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "begun\n"
        the_courier(there)
        os.kill(flow.pid, signal.SIGKILL)
    until(lambda: couriers(there) == [], "the courier to go")
    found = runs(there)["pipeline"]
    assert (found.info.status, found.data.tags["rlhf.reason"]) == ("FAILED", courier.VANISHED)
    assert pending(there / "spool") == []


@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_that_is_away_for_a_while_gets_all_from_the_same_courier(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port(28800)
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    with tracking_pipeline.open_run("1", config.load().tracking, {}) as told:
        with served(there, port):
            first = the_courier(there)
            with tracking.open_run("sft", view(), key="sft-1") as tracker:
                tracker.metrics({"train/loss": 1.0}, step=1)
            until(lambda: pending(there / "spool") == [Spool(there / "spool", "flow-1")], "the figure")
        with tracking.open_run("ppo", view("ppo"), key="ppo-1") as tracker:
            tracker.metrics({"train/loss": 1.0}, step=1)
            until(Spool(there / "spool", "ppo-1").trouble.exists, "the courier to be refused")
            tracker.metrics({"train/loss": 0.5}, step=2)
            assert "training goes on, metrics are kept in" in capsys.readouterr().out
            assert told.trouble() is not None
            with served(there, port):
                until(lambda: "ppo" in runs_so_far(there, url), "another try")
                until(lambda: len(points(there, "ppo", url)) == 2, "both points")
        assert Spool(there / "spool", "ppo-1").is_left, "the server is away again at its end"
        with served(there, port):
            with tracking.open_run("judge", view("judge"), key="judge-1"):
                pass
            assert couriers(there) == [first]
            assert {left.name for left in pending(there / "spool")} == {"ppo-1", "flow-1"}
            assert runs(there, url)["judge"].info.status == "FINISHED"
            assert courier.sync(there) == (1, {})
            assert points(there, "ppo", url) == [(1, 1.0), (2, 0.5)]
            assert points(there, "sft", url) == [(1, 1.0)]


# ------------------------------------------------------------------------- a courier in this process


@pytest.fixture
def flow(home: Path, monkeypatch: pytest.MonkeyPatch) -> Post:
    """The place of the courier of a flow's stages; the flow itself has no spool."""
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    return Post(home / "spool", "flow-1")


def test_a_run_that_begins_while_the_courier_is_about_to_go_is_delivered(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, seen = Courier._attend, list[bool]()

    def late(self: Courier) -> None:
        attend(self)
        if not seen:  # it has decided to go, and holds the lock yet
            with tracking.open_run("sft", view(), key="sft-1"):
                seen.append(flow.is_manned())

    monkeypatch.setattr(Courier, "_attend", late)
    assert Courier(flow).serve()
    assert seen == [True], "so the stage started nobody"
    assert pending(home / "spool") == []
    assert runs(home)["sft"].info.status == "FINISHED"
    assert not flow.is_manned()


def test_a_second_courier_leaves_the_first_alone(home: Path, flow: Post) -> None:
    with tracking.open_run("sft", view(), key="sft-1"):
        pass
    code = (
        "import sys; from filelock import FileLock\n"
        "with FileLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    assert not flow.is_manned()
    words = [sys.executable, "-c", code, str(flow.lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert flow.is_manned()
        assert not Courier(flow).serve()
    assert [left.name for left in pending(home / "spool")] == ["sft-1"]
    assert Courier(flow).serve()
    assert pending(home / "spool") == []


def test_what_another_delivers_is_left_to_it_and_what_is_of_others_too(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RLHF_PARENT_RUN", "flow-2")
        with tracking.open_run("sft", view(), key="sft-of-another-flow"):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(context, "process_name", lambda process: "elsewhere:1:1")
        with tracking.open_run("sft", view(), key="sft-of-another-machine"):
            pass
    with tracking.open_run("sft", view(), key="sft-1"):
        pass
    assert Courier(flow).serve()
    left = {spool.name for spool in pending(home / "spool")}
    assert left == {"sft-of-another-flow", "sft-of-another-machine"}


def test_one_courier_sends_again_what_a_server_did_not_take_of_several_runs(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, away = MlflowClient.log_batch, list[bool]()

    def answering(self: MlflowClient, *given: Any, **named: Any) -> Any:
        if away:
            raise MlflowException("away")
        return real(self, *given, **named)

    monkeypatch.setattr(MlflowClient, "log_batch", answering)
    one = Courier(flow)
    spools = {stage: Spool(home / "spool", f"{stage}-1") for stage in ("sft", "ppo")}

    def look() -> list[str | None]:
        one._look()
        one._round()
        return [spool.reason for spool in spools.values() if spool.file.exists()]

    with tracking.open_run("sft", view(), key="sft-1") as sft:
        with tracking.open_run("ppo", view("ppo"), key="ppo-1") as ppo:
            sft.metrics({"train/loss": 2.0}, step=1)
            ppo.metrics({"train/loss": 4.0}, step=1)
            assert look() == [None, None]
            away.append(True)
            sft.metrics({"train/loss": 1.0}, step=2)
            ppo.metrics({"train/loss": 3.0}, step=2)
            assert look() == ["MlflowException: away"] * 2
            away.clear()
            assert look() == [None, None], "trouble that is over is told no more"
            away.append(True)
        assert look()[1] == "MlflowException: away"
        assert spools["ppo"].is_left
        away.clear()
        look()
        assert spools["ppo"].is_left, "over and refused: that is for `rlhf sync`"
    assert one.serve()
    assert [left.name for left in pending(home / "spool")] == ["ppo-1"]
    assert points(home, "sft") == [(1, 2.0), (2, 1.0)]
    assert courier.sync(home) == (1, {})
    assert points(home, "ppo") == [(1, 4.0), (2, 3.0)]


def test_a_fault_with_one_run_ends_the_delivery_of_no_other(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Delivery.step

    def faulty(self: Delivery) -> bool:
        if self.spool.name == "sft-1":
            raise ZeroDivisionError("by zero")
        return step(self)

    monkeypatch.setattr(Delivery, "step", faulty)
    for key in ("sft-1", "sft-2"):
        with tracking.open_run("sft", view(), key=key):
            pass
    assert Courier(flow).serve()
    [left] = pending(home / "spool")
    assert left.name == "sft-1"
    assert left.reason == f"ZeroDivisionError: by zero; see {flow.log}"


def test_a_run_is_sent_before_its_figure_is_drawn(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(home / "spool", "sft-1")
    with tracking.open_run("sft", view(), key="sft-1") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
    one = Courier(flow)
    assert not spool.is_sent
    one._look()
    one._round()
    assert spool.is_sent
    assert spool.file.exists()
    assert runs(home)["sft"].info.status == "FINISHED"
    one._round()
    assert not spool.file.exists()
    assert spool.is_sent
    assert list((home / "spool").glob("sft-1*")) == []


def test_a_run_that_is_not_over_is_tried_again_after_a_fault(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, faults = Delivery.step, [ZeroDivisionError("by zero")]

    def faulty(self: Delivery) -> bool:
        if faults:
            raise faults.pop()
        return step(self)

    monkeypatch.setattr(Delivery, "step", faulty)
    one, spool = Courier(flow), Spool(home / "spool", "sft-1")
    with tracking.open_run("sft", view(), key="sft-1"):
        one._look()
        one._round()
        assert str(spool.reason).startswith("ZeroDivisionError: by zero")
        assert not spool.is_left
    assert "Traceback" in capsys.readouterr().err
    assert one.serve()
    assert pending(home / "spool") == []


def test_at_a_server_that_does_not_answer_runs_that_go_on_wait_for_one_try(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the end of another is not held up by a timeout of each; what is over is tried at once."""
    tried = list[str]()

    def silent(self: store.Store, header: dict[str, Any], **_: bool) -> None:
        tried.append(header["key"])
        raise MlflowException("API request to http://x/y failed with timeout exception: read")

    monkeypatch.setattr(courier, "RETRY_SECONDS", 600.0)
    with monkeypatch.context() as patch, tracking.open_run("sft", view(), key="sft-1") as first:
        patch.setattr(store.Store, "run", silent)
        one, spools = Courier(flow), [Spool(home / "spool", f"sft-{i}") for i in (1, 2, 3)]
        with tracking.open_run("sft", view(), key="sft-2"):
            with tracking.open_run("sft", view(), key="sft-3"):
                pass
            one._look()
            one._round()
            assert (len(tried), tried[-1]) == (2, "sft-3")
            assert all("failed with timeout exception" in str(spool.reason) for spool in spools)
            assert [spool.is_left for spool in spools] == [False, False, True]
            one._round()
            assert len(tried) == 2
        patch.undo()
        one._round()
        assert [spool.is_sent for spool in spools] == [False, True, False]
        first.metrics({"train/loss": 1.0}, step=1)
    assert one.serve()
    assert [left.name for left in pending(home / "spool")] == ["sft-3"]


def test_a_damaged_first_line_is_told_by_sync_and_stops_nobody(
    home: Path, flow: Post, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = {"torn": b'{"kind": "run", "ti{"kind": "metrics"}\n', "bytes": b"\xff\x00\n", "number": b"5\n"}
    with tracking.open_run("sft", view(), key="sft-1"):
        pass
    for name, line in torn.items():
        (home / f"spool/{name}.jsonl").write_bytes(line)
    (home / "spool/begins.jsonl").write_bytes(b'{"kind": "ru')
    pipeline = tracking_pipeline.SpoolPipeline(Spool(home / "spool", "flow-1"), flow)
    assert pipeline.trouble() == "nobody delivers sft-1"
    assert courier.main([str(flow.folder), flow.parent]) == 0
    assert pipeline.trouble() is None
    assert {left.name for left in pending(home / "spool")} == {*torn, "begins"}
    assert runs(home)["sft"].info.status == "FINISHED"
    with tracking.open_run("sft", view(), key="sft-2"):
        pass
    delivered, failed = courier.sync(home)
    assert (delivered, set(failed)) == (1, set(torn))
    file = home / "spool/torn.jsonl"
    assert failed["torn"] == f"the first line of {file} is damaged: mend it, or remove the file"
    assert capsys.readouterr().err == ""


def test_sync_goes_on_after_a_fault_with_one_run(
    home: Path, flow: Post, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("sft-1", "sft-2"):
        with tracking.open_run("sft", view(), key=key):
            pass
    file = Spool(home / "spool", "sft-1").file
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, b'{"kind": "metr\n', *others]))
    delivered, failed = courier.sync(home)
    assert (delivered, list(failed)) == (1, ["sft-1"])
    assert failed["sft-1"].startswith("JSONDecodeError")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_of_curves_that_cannot_be_drawn_all_else_is_delivered(
    home: Path, flow: Post, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracking.open_run("sft", view(), key="sft-1") as tracker:
        tracker.metrics({"train/loss": 1e308}, step=1)
        tracker.metrics({"train/loss": -1e308}, step=2)
    assert Courier(flow).serve()
    assert pending(home / "spool") == []
    assert points(home, "sft") == [(1, 1e308), (2, -1e308)]
    run = runs(home)["sft"]
    assert run.info.status == "FINISHED"
    assert run.data.tags["rlhf.figure"].startswith("curves.png cannot be drawn: ")
    assert run.data.tags["rlhf.figure"] in capsys.readouterr().out
    assert figures(home, "sft") == []


def test_refused_traces_are_told_once_the_run_is_sent_and_not_sent_again_for_a_figure(
    home: Path, flow: Post, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, spool = Courier(flow), Spool(home / "spool", "judge-1")
    with tracking.open_run("judge", view("judge"), key="judge-1") as tracker:
        tracker.metrics({"a": 1.0}, step=1)
        spool.refuse("0", "status 400: bad tag")
    told = "MLflow refused 1 trace(s) of judge-1 for good (status 400: bad tag)"
    assert told not in capsys.readouterr().out, "there may be more of them"
    one._look()
    one._round()
    assert not spool.is_closed
    tell_refused(spool.folder)
    assert told in capsys.readouterr().out
    real = store.send_figure
    monkeypatch.setattr(store, "send_figure", lambda *_: spool.folder.joinpath("none").read_text())
    one._round()
    assert str(spool.reason).startswith("FileNotFoundError")
    assert spool.refusals() == {"0": "status 400: bad tag"}
    monkeypatch.setattr(store, "send_figure", real)
    assert courier.sync(home) == (1, {})
    assert told not in capsys.readouterr().out
    assert list((home / "spool").glob("judge-1*")) == []


def test_what_old_commits_began_is_left_to_their_own_courier(home: Path, flow: Post) -> None:
    with tracking.open_run("sft", view(), key="sft-1"):
        pass
    spool = Spool(home / "spool", "sft-1")
    first, rest = spool.file.read_text(encoding="utf-8").split("\n", 1)
    header = json.loads(first)
    del header["courier"]
    spool.file.write_text(json.dumps(header) + "\n" + rest, encoding="utf-8")
    assert Courier(flow).serve()
    assert pending(home / "spool") == [spool]
    pipeline = tracking_pipeline.SpoolPipeline(Spool(home / "spool", "flow-1"), flow)
    spool.lock.parent.mkdir(exist_ok=True)
    with FileLock(flow.lock):
        assert pipeline.trouble() == "nobody delivers sft-1"
    with FileLock(spool.lock):
        assert pipeline.trouble() is None
    assert courier.sync(home) == (1, {})


def test_a_disk_that_knows_no_locks_ends_no_stage_and_is_told_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Post) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(Post, "is_manned", fails)
    with tracking.open_run("sft", view(), key="sft-1") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
    told = capsys.readouterr().out
    assert told.count("MLflow cannot be reached (no courier could be started: ") == 1
    assert told.count("No locks available") == 1
    with tracking_pipeline.open_run("1", config.load().tracking, {}) as pipeline:
        monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
        with tracking.open_run("sft", view(), key="sft-2"):
            pass
        assert pipeline.trouble() == "nobody delivers sft-2"
    assert "no courier could be started: [Errno" in capsys.readouterr().out
    spools = pending(project / ".rlhf/spool")
    assert {spool.name for spool in spools} == {"sft-1", "flow-1", "sft-2"}
    assert {spool.read()[0][-1]["status"] for spool in spools} == {"FINISHED"}


@pytest.mark.parametrize("begun", [True, False])
def test_the_wait_for_a_courier_ends_if_none_can_be_started(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    started = list[Post]()

    def start(post: Post) -> subprocess.Popen[bytes] | None:
        started.append(post)
        return subprocess.Popen(["true"]) if begun or len(started) > 1 else None

    monkeypatch.setattr(rendezvous, "start_courier", start)
    with tracking.open_run("sft", view(), key="sft-1"):
        pass
    assert len(started) == 2
    told = f"MLflow cannot be reached (see {started[0].log})"
    assert capsys.readouterr().out.count(told) == 1


def test_the_wait_for_a_courier_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    spool = Spool(home / "spool", "k")
    spool.append("run", key="k", parent={"key": "alone-k"}, process="elsewhere:1:1")
    post = Post.of(spool)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as busy:
        began = time.monotonic()
        assert rendezvous.await_delivery(lambda: False, post, busy, 0.2), "it goes on by itself"
        assert time.monotonic() - began >= 0.2
        busy.returncode = None
        busy.kill()


def test_the_figure_is_the_one_that_the_curves_themselves_give(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [2.0, 1 / 3, 1e-12, math.pi]
    with tracking.open_run("ppo", view("ppo")) as tracker:
        for episode, loss in enumerate(losses, start=1):
            tracker.metrics({"objective/kl": loss, "episode": float(episode)}, step=64 * episode)
        tracker.metrics({"lr": 0.5}, step=128)
        rows = tracker.history()
    deliver(home)
    client, run = MlflowClient(embedded_uri(home)), runs(home)["ppo"]
    curves.draw(rows, "ppo", project / "direct.png")
    drawn = Path(client.download_artifacts(run.info.run_id, "curves.png"))
    assert drawn.read_bytes() == (project / "direct.png").read_bytes()


def test_curves_are_read_back_from_csv_as_they_were() -> None:
    rows = [{"step": 1, "a": 0.1 + 0.2, "b,c": math.inf}, {"step": 2, "a": 1e-300}, {"step": 3, "d": -0.0}]
    found = curves.read_csv(curves.csv_text(rows, "step"))
    assert found == rows
    assert [list(row) for row in found] == [list(row) for row in rows]

"""The real servers, worker and deployments, used as the UI uses them: one quick test, the rest slow."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from filelock import FileLock
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import service
from flows.service import ProjectService
from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
from rlhf_tasks.project import processes as daemons
from rlhf_tasks.training.signals import Stopped
from tests import loopback
from tests.conftest import Command
from tests.flows import toy
from tests.flows.toy import Service

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with toy.service(toy.make(tmp_path_factory.mktemp("service") / "project")) as service:
        yield service


@pytest.fixture
def fresh(running: Service) -> Iterator[Service]:
    """The project with its first commit's files, before and after the test."""
    toy.reset(running.root)
    yield running
    toy.reset(running.root)


def test_a_run_completes_and_prefect_mlflow_and_dvc_refer_to_each_other(running: Service) -> None:
    identity = running.start(name="whole", overrides={"ppo.kl_coef": 0.25})
    assert running.end(identity)["type"] == "COMPLETED", running.logs(identity)
    assert running.tasks(identity) == {"first": "Completed", "second": "Completed"}
    assert "kl_coef: 0.25" in toy.git(running.root, "show", f"{revision(running, 'whole')}:params.yaml")
    assert "metrics/first.json" in toy.git(running.root, "ls-tree", "-r", revision(running, "whole"))
    assert toy.git(running.root, "status", "--porcelain") == "", "the working tree is untouched"
    assert list((running.root / ".rlhf/workspaces").iterdir()) == []
    run = toy.until(
        lambda: (made := running.mlflow(identity))["info"]["status"] == "FINISHED" and made, "MLflow"
    )
    assert toy.tags(run)["dvc.exp"] == "whole"
    assert toy.tags(run)["dvc.exp_rev"] == revision(running, "whole")
    assert toy.tags(run)["prefect.flow_run_id"] == identity
    assert toy.tags(run)["git.rev"] == toy.git(running.root, "rev-parse", "HEAD").strip()
    page = running.artifact("rlhf-results")
    assert "dvc exp apply whole" in page
    assert run["info"]["run_id"] in page
    assert '"first/rows"' in running.artifact("rlhf-metrics")
    assert "50%, second: runs: the checkout has no result of it" in running.logs(identity)
    assert_local(running)


def assert_local(running: Service) -> None:
    """Servers and worker listen on loopback, without telemetry. Checked here: starting them is slow."""
    processes = running.processes()
    connections = [c for process in processes for c in process.net_connections(kind="inet")]
    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    assert {int(running.url(name).rpartition(":")[2]) for name in ("prefect", "mlflow")} <= {
        address.port for address in listening
    }
    assert {address.ip for address in listening} == {"127.0.0.1"}
    for name in ("prefect", "mlflow", "worker"):
        environment = psutil.Process(running.daemon(name).record()["pid"]).environ()
        assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true", name
        if name != "mlflow":
            assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false", name
            assert environment["DO_NOT_TRACK"] == "1", name


def revision(service: Service, experiment: str) -> str:
    pattern = f"refs/exps/*/*/{experiment}"
    return toy.git(service.root, "for-each-ref", "--format=%(objectname)", pattern).strip()


@pytest.mark.slow
def test_an_unchanged_stage_is_shown_as_cached(fresh: Service) -> None:
    first = fresh.start(seed=5)
    assert fresh.end(first)["type"] == "COMPLETED"
    again = fresh.start(seed=5)
    assert "nothing had to run" in fresh.end(again)["message"]
    assert fresh.tasks(again) == {"first": "Cached", "second": "Cached"}
    before = fresh.experiments()
    assert len(before) == len(set(before)), "one result must not have two experiments"
    assert f"see experiment {fresh.run(first)['name']}" in fresh.artifact("rlhf-results")
    named = fresh.start(seed=5, name="given")
    assert "experiment given" in fresh.end(named)["message"]
    assert sorted(fresh.experiments()) == sorted([*before, "given"])


@pytest.mark.slow
def test_two_runs_at_once_share_the_slot_and_both_end(fresh: Service) -> None:
    """The second waits until the whole of the first has ended, and says so."""
    toy.write_script(
        fresh.root, ["mkdir ../../slot || exit 5", "sleep 9", "rmdir ../../slot", toy.SECOND.rstrip()]
    )
    once = {"service.retries": 0}  # a stage that ran without a slot must not get another try
    runs = [fresh.start(name=f"both-{seed}", seed=seed, overrides=once) for seed in (11, 12)]
    waiting = "Waiting for gpu"
    late = toy.until(
        lambda: next((r for r in runs if fresh.run(r)["state"]["name"] == waiting), None), waiting
    )
    toy.until(lambda: "waiting for gpu" in fresh.logs(late), "the line in the log")
    for identity in runs:
        assert fresh.end(identity)["type"] == "COMPLETED", fresh.logs(identity)
    assert {"both-11", "both-12"} <= set(fresh.experiments())
    limit = fresh.call("GET", "/v2/concurrency_limits/gpu")
    assert (limit["limit"], limit["active_slots"]) == (1, 0)


@pytest.mark.slow
def test_a_fault_is_retried_and_a_users_mistake_is_not(fresh: Service) -> None:
    toy.write_script(fresh.root, ["echo try >> ../../tries", *toy.refusal("fix it")])
    tries = fresh.root / ".rlhf/tries"
    tries.unlink(missing_ok=True)
    state = fresh.end(fresh.start())
    assert state["type"] == "FAILED"
    assert "fix it" in state["message"]
    assert tries.read_text(encoding="utf-8").count("try") == 1
    toy.write_script(fresh.root, ["echo try >> ../../tries", "exit 1"])
    assert fresh.end(fresh.start())["type"] == "FAILED"
    assert tries.read_text(encoding="utf-8").count("try") == 1 + 3, "service.retries is 2"


TRAIN = """\
import os, pathlib, subprocess, sys, time
helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
home = pathlib.Path('../..')
(home / 'pids').write_text(f'{os.getpid()} {helper.pid}')
try:
    time.sleep(600)
except KeyboardInterrupt:
    (home / 'kept').touch()
    raise
"""


def train_for_long(service: Service) -> str:
    """A run whose second stage trains for minutes, with a rank in a session of its own; returns its id."""
    for name in ("pids", "kept"):
        (service.root / ".rlhf" / name).unlink(missing_ok=True)
    (service.root / "train.py").write_text(TRAIN, encoding="utf-8")
    toy.write_script(service.root, [f"exec {sys.executable} train.py"])
    identity = service.start()
    toy.until(lambda: (service.root / ".rlhf/pids").exists(), "the start of the stage")
    return identity


def alive(service: Service) -> list[int]:
    pids = (service.root / ".rlhf/pids").read_text(encoding="utf-8").split()
    return [int(pid) for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_cancelling_ends_every_process_and_cleans_up(fresh: Service) -> None:
    identity = train_for_long(fresh)
    fresh.cancel(identity)
    assert fresh.end(identity)["type"] == "CANCELLED"
    tasks = fresh.tasks(identity)
    assert tasks.pop("first") in ("Completed", "Cached"), "here, or in an earlier test"
    assert tasks == {"second": "Cancelled"}
    assert alive(fresh) == []
    assert (fresh.root / ".rlhf/kept").exists(), "the stage must be interrupted, not killed"
    assert list((fresh.root / ".rlhf/workspaces").iterdir()) == []
    log = toy.until(lambda: "stopped" in (text := fresh.logs(identity)) and text, "the log")
    assert log.endswith("\n50%, second: stopped; Retry resumes"), "one sentence"
    assert not re.search("Crash|Traceback|cancelled", log)
    toy.until(lambda: fresh.mlflow(identity)["info"]["status"] == "KILLED", "MLflow")
    assert fresh.call("GET", "/v2/concurrency_limits/gpu")["active_slots"] == 0
    toy.reset(fresh.root)
    assert fresh.end(fresh.start(seed=8))["type"] == "COMPLETED"


@pytest.mark.slow
def test_a_killed_flow_run_becomes_crashed_and_its_stage_ends(fresh: Service) -> None:
    identity = train_for_long(fresh)
    for process in daemons.find("PREFECT__FLOW_RUN_ID", identity):
        if "prefect.engine" in process.cmdline():
            process.kill()
    assert fresh.end(identity)["type"] == "CRASHED"
    toy.until(lambda: alive(fresh) == [], "the end of the stage")
    toy.until(lambda: fresh.tasks(identity)["second"] == "Crashed", "the end of the task")
    assert fresh.call("GET", "/v2/concurrency_limits/gpu")["active_slots"] == 0, "freed before the task ended"
    toy.until(lambda: not list((fresh.root / ".rlhf/workspaces").iterdir()), "the removal of the workspace")
    toy.until(lambda: fresh.mlflow(identity)["info"]["status"] == "FAILED", "MLflow")


@pytest.mark.slow
def test_up_restarts_a_killed_worker_and_its_run_becomes_crashed(fresh: Service) -> None:
    identity = train_for_long(fresh)
    os.kill(fresh.daemon("worker").record()["pid"], signal.SIGKILL)
    toy.until(lambda: not fresh.daemon("worker").is_running(), "the end of the worker")
    toy.reset(fresh.root)
    assert fresh.command("up").returncode == 0
    assert fresh.end(identity)["type"] == "CRASHED"
    assert alive(fresh) == []
    assert list((fresh.root / ".rlhf/workspaces").iterdir()) == []
    scheduled = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    fresh.call("POST", f"/flow_runs/{identity}/set_state", scheduled)  # "Retry" in the UI
    toy.until(lambda: fresh.run(identity)["run_count"] == 2, "the retry")
    assert fresh.end(identity)["type"] == "COMPLETED", fresh.logs(identity)


@pytest.mark.slow
def test_down_lets_a_running_stage_save_its_state(fresh: Service) -> None:
    identity = train_for_long(fresh)
    assert fresh.command("down").returncode == 0
    assert alive(fresh) == []
    assert (fresh.root / ".rlhf/kept").exists(), "the stage must be interrupted, not killed"
    toy.reset(fresh.root)
    assert fresh.up().returncode == 0
    assert fresh.end(identity)["name"] == "Stopped"
    tasks = fresh.tasks(identity)
    assert tasks.pop("first") in ("Completed", "Cached"), "here, or in an earlier test"
    assert tasks == {"second": "Cancelled"}
    assert fresh.end(fresh.start(seed=51))["type"] == "COMPLETED"


@pytest.mark.slow
def test_a_run_completes_without_mlflow_and_says_so(fresh: Service) -> None:
    failed = "until grep MlflowException ../../outbox/*.state.json; do sleep 0.2; done"
    toy.write_script(fresh.root, [failed, toy.SECOND.rstrip()])
    identity = fresh.start(seed=61, overrides={"tracking.uri": "http://127.0.0.1:9"})
    assert fresh.end(identity)["type"] == "COMPLETED", fresh.logs(identity)
    assert "`rlhf sync` delivers it" in fresh.artifact("rlhf-results")


@pytest.mark.slow
def test_a_run_survives_a_restart_of_the_servers(fresh: Service) -> None:
    started, go_on = fresh.root / ".rlhf/started", fresh.root / ".rlhf/go-on"
    waits = "until [ -e ../../go-on ]; do sleep 0.2; done"
    toy.write_script(fresh.root, ["touch ../../started", waits, toy.SECOND.rstrip()])
    identity = fresh.start(seed=21)
    toy.until(started.exists, "the start of the stage")
    fresh.daemon("prefect").stop(10.0)
    fresh.daemon("mlflow").stop(5.0)
    assert fresh.up().returncode == 0
    assert fresh.call("GET", "/v2/concurrency_limits/gpu")["active_slots"] == 1, (
        "no other run may get the GPU"
    )
    go_on.touch()
    assert fresh.end(identity)["type"] == "COMPLETED", fresh.logs(identity)
    toy.until(lambda: fresh.mlflow(identity)["info"]["status"] == "FINISHED", "the delivery to MLflow")


@pytest.mark.slow
def test_an_unreachable_remote_keeps_the_run_and_names_what_is_missing(fresh: Service) -> None:
    remote = fresh.root / "blocked"
    remote.write_text("a file where the remote should be\n", encoding="utf-8")
    dvc = [sys.executable, "-m", "dvc", "remote"]
    subprocess.run([*dvc, "add", "-q", "-d", "store", str(remote / "x")], cwd=fresh.root, check=True)
    toy.commit(fresh.root)
    identity = fresh.start(name="kept", push=True, seed=31)
    state = fresh.end(identity)
    assert (state["type"], state["name"]) == ("COMPLETED", "Unpushed")
    assert re.search("not pushed: .*; `dvc exp apply` the run, then `dvc push`", state["message"])
    assert "Retry 2/2 will start 20" in fresh.logs(identity), "the push must be repeated with a growing delay"
    assert "kept" in fresh.experiments()
    subprocess.run([*dvc, "remove", "-q", "store"], cwd=fresh.root, check=True)
    remote.unlink()
    toy.commit(fresh.root)


@pytest.mark.slow
def test_a_sweep_repeats_no_run_and_ends_with_one_comparison(fresh: Service) -> None:
    parameters = {"grid": {"ppo.kl_coef": [0.3, 0.4]}, "seeds": [1, 2], "name": "grid"}
    identity = fresh.start("rlhf-sweep/sweep", **parameters)
    state = fresh.end(identity)
    assert state["message"] == "2 setting(s), 4 runs, 0 of them done before", fresh.logs(identity)
    assert len([name for name in fresh.experiments() if name.startswith("grid-")]) == 4
    rows = json.loads(fresh.artifact("rlhf-sweep"))
    assert [(row["setting"], row["seeds"]) for row in rows] == [
        ("ppo.kl_coef=0.3", 2),
        ("ppo.kl_coef=0.4", 2),
    ]
    names = {f"ppo.kl_coef={kl_coef} seed={seed}" for kl_coef in (0.3, 0.4) for seed in (1, 2)}
    assert names <= set(fresh.tasks(identity))
    found = fresh.call("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": sorted(names)}}})
    assert {run["name"] for run in found} == names
    wider = parameters | {"seeds": [1, 2, 3]}
    state = fresh.end(fresh.start("rlhf-sweep/sweep", **wider))
    assert state["message"] == "2 setting(s), 6 runs, 4 of them done before"


@pytest.mark.slow
def test_the_end_of_a_run_is_notified_at_once_however_the_run_began(fresh: Service) -> None:
    """A notice that was held back would come after those of later runs."""
    toy.write_script(fresh.root, toy.refusal("no"))
    identity = fresh.call("GET", "/deployments/name/rlhf-pipeline/scheduled")["id"]
    soon = {"interval": 60, "anchor_date": (datetime.now(UTC) + timedelta(seconds=15)).isoformat()}
    schedules = f"/deployments/{identity}/schedules"
    (made,) = fresh.call("POST", schedules, [{"active": True, "schedule": soon}])
    query = {"deployments": {"id": {"any_": [identity]}}, "sort": "EXPECTED_START_TIME_ASC"}
    runs = toy.until(lambda: fresh.call("POST", "/flow_runs/filter", query), "the scheduled runs")
    ran, never_began, ends_later = (run["id"] for run in runs[:3])

    def set_state(run: str, *states: str) -> None:
        for state in states:
            fresh.call("POST", f"/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})

    set_state(never_began, "PENDING", "CRASHED")
    assert fresh.end(ran)["type"] == "FAILED"
    assert_notified(fresh, never_began, ran)
    set_state(ends_later, "PENDING", "RUNNING")
    fresh.daemon("prefect").stop(10.0)
    assert fresh.up().returncode == 0
    set_state(ends_later, "FAILED")
    assert_notified(fresh, ends_later)
    httpx.delete(f"{fresh.url('prefect')}/api{schedules}/{made['id']}", timeout=30).raise_for_status()


def assert_notified(service: Service, *runs: str) -> None:
    """The notices of these runs come before that of a later run, which is started by hand and fails."""
    by_hand = service.start()
    assert service.end(by_hand)["type"] == "FAILED"
    ends = [f"{(run := service.run(one))['state']['name']}: {run['name']}" for one in (*runs, by_hand)]
    query = {"artifacts": {"key": {"any_": ["rlhf-notifications"]}}}

    def notices() -> list[str]:
        artifacts = service.call("POST", "/artifacts/filter", query)
        titles = [str(one["data"]).partition("\n")[0] for one in artifacts]
        return titles if ends[-1] in titles else []

    titles = toy.until(notices, "the notice of the run by hand")
    assert set(ends) <= set(titles)


@pytest.mark.slow
def test_up_twice_starts_nothing_new_and_down_leaves_nothing(tmp_path: Path) -> None:
    with toy.service(toy.make(tmp_path / "project")) as service:
        before = {name: service.daemon(name).record() for name in ("prefect", "mlflow", "worker")}
        again = service.up()
        assert again.returncode == 0
        assert f"Prefect: {service.url('prefect')}" in again.stdout
        assert f"MLflow, runs of rlhf: {service.url('mlflow')}/#/experiments/" in again.stdout
        assert {name: service.daemon(name).record() for name in before} == before
        elsewhere = before["worker"] | {"prefect": "http://127.0.0.1:9"}
        service.daemon("worker").file.write_text(json.dumps(elsewhere), encoding="utf-8")
        assert service.up().returncode == 0
        after = service.daemon("worker").record()
        assert after["pid"] != before["worker"]["pid"], "a worker with former addresses must be restarted"
        assert after["prefect"] == before["worker"]["prefect"]
        processes = service.processes()
        assert len(processes) >= 3
        status = service.command("status")
        assert status.returncode == 0
        assert "no flow run is in progress" in status.stdout
        assert service.command("down").returncode == 0
        assert [process for process in processes if runs(process)] == []
        status = service.command("status")
        assert (status.returncode, status.stdout) == (1, "nothing runs; `rlhf up` starts the service\n")
        assert "nothing was running" in service.command("down").stdout


def runs(process: psutil.Process) -> bool:
    """False also for a zombie, whose parent has not read its exit status yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---------------- `rlhf up` and `rlhf status` tell their own programs from others; no server is started here


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(toy.STAGES, encoding="utf-8")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Foreign(loopback.Handler):
    """A server that is not ours answers everybody; its API refuses the login."""

    protocol_version = "HTTP/1.0"  # a connection ends with its reply

    def do_GET(self) -> None:
        self.send(401 if self.path.startswith("/api") else 200, b"<html>")


@pytest.fixture
def foreign() -> Iterator[int]:
    """The port of a foreign server."""
    with loopback.serving(loopback.Server(Foreign)) as server:
        yield server.server_port


def test_a_port_in_use_is_refused_with_the_option_that_sets_another(root: Path, rlhf: Command) -> None:
    with socket.create_server((processes.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        message = rlhf("up --prefect-port", port, status=2).err
    assert f"port {port} is in use, so prefect cannot have it" in message
    assert "--prefect-port sets another" in message
    assert not ProjectService.here().daemon("prefect").is_running()


def test_another_programs_server_on_our_port_is_not_ours(root: Path, foreign: int, rlhf: Command) -> None:
    here = ProjectService(root, root / ".rlhf", ready_seconds=0.0)
    here.daemon("mlflow").start(SLEEP, dict(os.environ), root, port=foreign)
    try:
        assert not here.is_healthy("mlflow"), "another program answers on this port"
        with pytest.raises(UserError, match=r"mlflow is not ready; .*mlflow\.log ends with"):
            here.wait_for("mlflow")
        shown = rlhf("status", status=1).out
        assert f"mlflow: runs, but does not answer, http://127.0.0.1:{foreign}" in shown
        assert "worker: does not run" in shown
        with pytest.raises(UserError, match=r"mlflow runs on port \d+; `rlhf down` first"):
            here.up({"prefect": None, "mlflow": 1}, None)
        assert not here.daemon("prefect").is_running(), "nothing may start after a refusal"
    finally:
        here.daemon("mlflow").stop(0.5)


def test_a_long_start_shows_that_it_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SILENT_SECONDS", 0.0)
    here = ProjectService(root, root / ".rlhf", ready_seconds=0.0)
    here.daemon("mlflow").start(SLEEP, dict(os.environ), root, port=1)
    try:
        with pytest.raises(UserError, match="mlflow is not ready"):
            here.wait_for("mlflow")
    finally:
        here.daemon("mlflow").stop(0.5)
    assert "mlflow is starting  0s so far" in capsys.readouterr().out


def test_status_says_that_nothing_runs(root: Path, rlhf: Command) -> None:
    assert rlhf("status", status=1).out == "nothing runs; `rlhf up` starts the service\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prefect-port 0", "'--prefect-port': Input should be greater than or equal to 1"),
        ("--mlflow-port 70000", "'--mlflow-port': Input should be less than or equal to 65535"),
        ("--gpu-slots 0", "'--gpu-slots': Input should be greater than or equal to 1"),
        ("--mlflow-port 4001 --prefect-port 4001", "port 4001 is in use, so mlflow cannot have it"),
    ],
)
def test_an_invalid_number_is_refused(root: Path, rlhf: Command, options: str, message: str) -> None:
    assert message in rlhf(f"up {options}", status=2).err


def choose(here: ProjectService, prefect: int | None, mlflow: int | None) -> dict[str, int]:
    return here.choose_ports({"prefect": prefect, "mlflow": mlflow})


def test_the_servers_get_different_ports(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, port = ProjectService.here(), processes.free_port(12000 + os.getpid() % 5000)
    while not processes.is_free(port + 1):
        port = processes.free_port(port + 2)
    monkeypatch.setattr(service, "PORTS", {"prefect": port, "mlflow": port + 1})
    assert choose(here, None, None) == {"prefect": port, "mlflow": port + 1}
    assert choose(here, port + 1, None)["mlflow"] > port + 1
    assert choose(here, None, port)["prefect"] > port


def test_a_port_of_our_other_server_is_refused(root: Path) -> None:
    here, port = ProjectService.here(), processes.free_port(22000 + os.getpid() % 10000)
    words = [sys.executable, "-m", "http.server", "--bind", processes.HOST, str(port)]
    here.daemon("prefect").start(words, dict(os.environ), root, port=port)
    try:
        with pytest.raises(UserError, match=rf"port {port} is in use, so mlflow cannot have it"):
            choose(here, None, port)
        assert choose(here, None, None)["prefect"] == port
        here.down()
        assert choose(here, None, None)["prefect"] == port, "the next start takes it again"
    finally:
        here.daemon("prefect").stop(0.5)


@pytest.mark.parametrize("answers", [False, True])
def test_joining_a_server_that_is_away_or_refuses_the_login_is_one_message(
    root: Path, foreign: int, monkeypatch: pytest.MonkeyPatch, rlhf: Command, answers: bool
) -> None:
    url = f"http://{processes.HOST}:{foreign if answers else 9}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings({PREFECT_API_URL: url}):
        (message,) = rlhf("up --pool rlhf", status=2).err.splitlines()
    problem = "refuses the login: set PREFECT_API_AUTH_STRING" if answers else "does not answer"
    assert f"PREFECT_API_URL={url} {problem}" in message


def test_down_waits_for_an_up_in_progress(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".rlhf/service").mkdir(parents=True)
    down = threading.Thread(target=ProjectService.here().down)
    with FileLock(root / ".rlhf/service/lock"):
        down.start()
        down.join(0.5)
        assert down.is_alive()
    down.join(60)
    assert "nothing was running" in capsys.readouterr().out


RUN = """\
import pathlib, signal, sys, time
def keep(*_):
    time.sleep(0.3)
    pathlib.Path("kept").touch()
    sys.exit()
signal.signal(signal.SIGTERM, keep)
pathlib.Path("started").touch()
time.sleep(60)
"""  # the process of a flow run, which needs a while to save its state
WORKER = f"""\
import signal, subprocess, sys, time
run = subprocess.Popen([sys.executable, "-c", {RUN!r}, "prefect.engine"])
def end(*_):
    run.kill()
    sys.exit()
signal.signal(signal.SIGTERM, end)
run.wait()
time.sleep(60)
"""


@pytest.fixture
def busy_worker(root: Path) -> Iterator[processes.Daemon]:
    """A running worker with a run; if the worker ends, it kills the run."""
    worker = ProjectService.here().daemon("worker")
    worker.start([sys.executable, "-c", WORKER], dict(os.environ), root)
    toy.until((root / "started").exists, "the start of the run")
    yield worker
    worker.stop(0.5)


def test_down_lets_runs_save_their_state(root: Path, busy_worker: processes.Daemon, rlhf: Command) -> None:
    assert len(busy_worker.processes()) == 2
    assert "stopped: worker" in rlhf("down").out
    assert (root / "kept").exists()
    assert busy_worker.processes() == []


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (Stopped(signal.SIGTERM), 143)])
def test_a_signal_in_up_is_one_message(
    root: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command, end: BaseException, status: int
) -> None:
    def interrupted(*_: object) -> None:
        raise end  # a signal has no effect if the tests run in the background of a shell

    monkeypatch.setattr(ProjectService, "up", interrupted)
    assert "`rlhf down` stops what was started" in rlhf("up", status=status).err

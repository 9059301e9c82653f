"""`rlhf up` and `rlhf status` tell their own programs from others; no server is started here."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import service
from flows.service import ProjectService
from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
from tests import loopback
from tests.conftest import Command
from tests.flows import toy

pytestmark = [pytest.mark.e2e]
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


def test_ctrl_c_in_up_is_one_message(root: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt  # a signal has no effect if the tests run in the background of a shell

    monkeypatch.setattr(ProjectService, "up", interrupted)
    assert "`rlhf down` stops what was started" in rlhf("up", status=130).err

"""`make up` and `status` take nobody else's program for the service's own; no server is started here."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from filelock import FileLock
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import service
from flows.service import Service
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
from tests.flows import toy

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(toy.STAGES, encoding="utf-8")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Healthy(BaseHTTPRequestHandler):
    """Answers each request, and with what nobody asked for."""

    body = b"<html>"
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a server that says of itself that it is well, and is not ours."""
    server = HTTPServer((processes.HOST, 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_port_in_use_is_told_with_the_setting_that_gives_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((processes.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert service.main(["up", "--prefect-port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} is in use by another program" in said
    assert "--prefect-port gives another" in said
    assert not Service.here().daemon("prefect").is_running()


def test_a_strangers_server_on_our_port_is_not_ours(
    root: Path, stranger: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Service.here()
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    here.daemon("mlflow").start(words, dict(os.environ), root, port=stranger)
    try:
        assert not here.is_healthy("mlflow"), "what answers is another program"
        monkeypatch.setattr(service, "READY_SECONDS", 0.0)
        with pytest.raises(UserError, match=rf"port {stranger} is in use .* --mlflow-port gives another"):
            here._await("mlflow")
        assert service.main(["status"]) == 1
        said = capsys.readouterr().out
        assert f"mlflow: runs, and does not answer, http://127.0.0.1:{stranger}" in said
        assert "worker: does not run" in said
        with pytest.raises(UserError, match=r"mlflow runs on port \d+; `make down` first"):
            here.up({"prefect": None, "mlflow": 1}, None)
        assert not here.daemon("prefect").is_running(), "nothing starts half"
    finally:
        here.daemon("mlflow").stop(0.5)


def test_our_own_server_is_healthy_while_it_answers(root: Path) -> None:
    here = Service.here()
    port = processes.free_port(20000 + os.getpid() % 10000)
    (root / "health").touch()
    words = [sys.executable, "-m", "http.server", "--bind", processes.HOST, str(port)]
    here.daemon("mlflow").start(words, dict(os.environ), root, port=port)
    try:
        here.daemon("mlflow").await_ready(lambda: here.is_healthy("mlflow"), 60)
        (root / "health").unlink()
        assert not here.is_healthy("mlflow")
    finally:
        here.daemon("mlflow").stop(0.5)


HEARD = b'[{"name": "service", "last_heartbeat_time": "2999-01-01T00:00:00+00:00"}]'


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'[{"name": "service"}]', b"{}", b"7", HEARD])
def test_a_strangers_word_of_the_worker_is_not_believed(
    root: Path, stranger: int, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(Healthy, "body", body)
    here, words = Service.here(), [sys.executable, "-c", "import time; time.sleep(60)"]
    for name in ("prefect", "worker"):
        here.daemon(name).start(words, dict(os.environ), root, port=stranger)
    try:
        assert not here.is_healthy("worker")
    finally:
        for name in ("prefect", "worker"):
            here.daemon(name).stop(0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--prefect-port", "0"], "ports go from 1 to 65535 (given: 0)"),
        (["up", "--mlflow-port", "70000"], "ports go from 1 to 65535 (given: 70000)"),
        (["up", "--gpu-slots", "0"], "must be 1 or more (given: 0)"),
        (
            ["up", "--mlflow-port", "4001", "--prefect-port", "4001"],
            "are both 4001; give each server its own",
        ),
    ],
)
def test_a_number_that_cannot_be_is_told(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        status = service.main(words)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_the_servers_ports_are_told_apart_before_anything_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, port = Service.here(), processes.free_port(12000 + os.getpid() % 5000)
    while not processes.is_free(port + 1):
        port = processes.free_port(port + 2)
    monkeypatch.setattr(service, "PORTS", {"prefect": port, "mlflow": port + 1})
    assert here._ports({"prefect": None, "mlflow": None}) == {"prefect": port, "mlflow": port + 1}
    assert capsys.readouterr().out == ""
    found = here._ports({"prefect": port + 1, "mlflow": None})
    assert found["prefect"] == port + 1
    assert found["mlflow"] > port + 1
    assert f"port {port + 1} is in use by prefect, so mlflow cannot have it" in capsys.readouterr().out
    found = here._ports({"prefect": None, "mlflow": port})
    assert found["mlflow"] == port
    assert found["prefect"] > port
    monkeypatch.setattr(service, "PORTS", {"prefect": port, "mlflow": port})
    found = here._ports({"prefect": None, "mlflow": None})
    assert found["prefect"] == port
    assert found["mlflow"] > port


def test_a_port_that_our_other_server_has_is_refused(root: Path) -> None:
    here, port = Service.here(), processes.free_port(22000 + os.getpid() % 10000)
    words = [sys.executable, "-m", "http.server", "--bind", processes.HOST, str(port)]
    here.daemon("prefect").start(words, dict(os.environ), root, port=port)
    try:
        with pytest.raises(UserError, match=rf"port {port} is prefect's"):
            here._ports({"prefect": None, "mlflow": port})
        assert here._ports({"prefect": None, "mlflow": None})["prefect"] == port
    finally:
        here.daemon("prefect").stop(0.5)


def test_another_server_in_the_environment_is_told_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Service.here()
    here.daemon("prefect").folder.mkdir(parents=True)
    here.daemon("prefect").file.write_text('{"port": 4201}', encoding="utf-8")
    for told in ("", "http://127.0.0.1:4201/api"):
        monkeypatch.setenv("PREFECT_API_URL", told)
        here._say_other_server()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PREFECT_API_URL", "http://team.example:4200/api")
    here._say_other_server()
    said = capsys.readouterr().out
    assert "PREFECT_API_URL=http://team.example:4200/api is another server" in said
    assert "python -m flows.service work" in said


def test_deploy_without_a_server_is_one_message(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert service.main(["deploy"]) == 2
    said = capsys.readouterr().err
    assert "PREFECT_API_URL=http://127.0.0.1:9/api does not answer" in said
    assert len(said.splitlines()) == 1


def test_deploy_without_a_login_is_one_message(
    root: Path, stranger: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Healthy, "status", 401)
    url = f"http://{processes.HOST}:{stranger}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings({PREFECT_API_URL: url}):
        assert service.main(["deploy"]) == 2
    said = capsys.readouterr().err
    assert f"PREFECT_API_URL={url} refuses the login: set PREFECT_API_AUTH_STRING" in said
    assert len(said.splitlines()) == 1


def test_down_waits_for_an_up_in_progress(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".rlhf/service").mkdir(parents=True)
    down = threading.Thread(target=service.main, args=(["down"],))
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
"""  # a flow run's process, to which keeping its state takes a while
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
def at_work(root: Path) -> Iterator[processes.Daemon]:
    """A worker that kills its run with itself, and its run."""
    worker = Service.here().daemon("worker")
    worker.start([sys.executable, "-c", WORKER], dict(os.environ), root)
    toy.until((root / "started").exists, "the run to start")
    yield worker
    worker.stop(0.5)


def test_the_runs_end_before_their_worker_and_keep_their_state(root: Path, at_work: processes.Daemon) -> None:
    Service.here()._end_runs()
    assert (root / "kept").exists()
    assert at_work.is_running()
    assert [process.pid for process in at_work.members()] == [at_work.known()["pid"]]


def test_down_lets_the_runs_keep_their_state(
    root: Path, at_work: processes.Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    members = at_work.members()
    assert len(members) == 2
    assert service.main(["down"]) == 0
    assert "ended: worker" in capsys.readouterr().out
    assert (root / "kept").exists()
    assert at_work.members() == []


def test_ctrl_c_in_up_is_no_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt  # a signal would do nothing where the tests run in a shell's background

    monkeypatch.setattr(Service, "up", interrupted)
    assert service.main(["up"]) == 130
    assert "`make down` ends what has started" in capsys.readouterr().err

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

from flows import service
from flows.service import Service
from rlhf_tasks import daemons
from rlhf_tasks.config import UserError
from tests.flows import toy

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = toy.make(tmp_path / "project")
    monkeypatch.chdir(made)
    return made


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a server that says of itself that it is well, and is not ours."""
    server = HTTPServer((daemons.HOST, 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_port_in_use_is_told_with_the_setting_that_gives_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((daemons.HOST, 0)) as taken:
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
    port = daemons.free_port(20000 + os.getpid() % 10000)
    (root / "health").touch()
    words = [sys.executable, "-m", "http.server", "--bind", daemons.HOST, str(port)]
    here.daemon("mlflow").start(words, dict(os.environ), root, port=port)
    try:
        here.daemon("mlflow").await_ready(lambda: here.is_healthy("mlflow"), 60)
        (root / "health").unlink()
        assert not here.is_healthy("mlflow")
    finally:
        here.daemon("mlflow").stop(0.5)

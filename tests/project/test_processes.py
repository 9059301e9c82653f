"""A daemon is found again by its pid and start time, ended with all that it started, and nobody else is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
from rlhf_tasks.project.processes import Daemon

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon("server", tmp_path / "service")
    yield made
    made.stop(0.5)


def start(daemon: Daemon, code: str) -> None:
    daemon.start([sys.executable, "-c", code], dict(os.environ), daemon.folder.parent, port=1)


def test_a_daemon_ends_with_what_it_started_in_other_sessions(daemon: Daemon) -> None:
    start(daemon, PARENT)
    daemon.await_ready(lambda: bool(daemon.log.read_text(encoding="utf-8")), 20)
    child = psutil.Process(int(daemon.log.read_text(encoding="utf-8")))
    assert daemon.is_running()
    assert daemon.known()["port"] == 1
    assert daemon.stop(0.5)
    assert not daemon.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not daemon.stop(0.5), "nothing is left to end"


def test_a_stale_file_ends_no_stranger(daemon: Daemon) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        daemon.folder.mkdir()
        known = {"pid": stranger.pid, "started": 1.0, "token": "server-of-yesterday"}
        daemon.file.write_text(json.dumps(known), encoding="utf-8")
        assert not daemon.is_running(), "the pid is alive, but it is another process"
        assert not daemon.stop(0.5)
        assert stranger.poll() is None
        assert not daemon.file.exists()
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}'])
def test_an_unreadable_file_is_no_daemon(daemon: Daemon, text: str) -> None:
    daemon.folder.mkdir()
    daemon.file.write_text(text, encoding="utf-8")
    assert not daemon.is_running()
    assert not daemon.stop(0.5)


def test_one_that_ends_at_once_is_told_with_its_last_words(daemon: Daemon) -> None:
    start(daemon, "print('no such database')")
    with pytest.raises(UserError, match=r"server has ended; .*ends with\nno such database"):
        daemon.await_ready(lambda: False, 20)


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind((processes.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < processes.free_port(port) < port + processes.PORTS_TRIED


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_cannot_be_is_told(port: int) -> None:
    with pytest.raises(UserError, match=f"port {port} is given; ports go from 1 to 65535"):
        processes.free_port(port)


def test_a_strangers_port_is_not_the_daemons(daemon: Daemon) -> None:
    port = processes.free_port(20000 + os.getpid() % 10000)
    start(
        daemon, f"import socket, time; s = socket.create_server(('{processes.HOST}', {port})); time.sleep(60)"
    )
    daemon.await_ready(lambda: daemon.listens(port), 20)
    with socket.create_server((processes.HOST, 0)) as stranger:
        assert not daemon.listens(stranger.getsockname()[1])
    assert daemon.runs_as(port=1)
    assert not daemon.runs_as(port=2)
    daemon.stop(0.5)
    assert not daemon.runs_as(port=1)


def test_carriers_are_told_by_the_environment_they_were_started_with() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(words, env={**os.environ, "RLHF_TEST_MARK": str(os.getpid())})
    try:
        found = processes.carriers("RLHF_TEST_MARK", str(os.getpid()))
        assert [p.pid for p in found] == [process.pid]
        assert processes.carriers("RLHF_TEST_MARK", "another") == []
    finally:
        process.kill()
        process.wait()

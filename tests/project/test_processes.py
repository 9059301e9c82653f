"""A daemon is found by its pid and start time, and is stopped with everything that it started."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
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
    daemon.wait_until_ready(lambda: bool(daemon.log.read_text(encoding="utf-8")), 20)
    child = psutil.Process(int(daemon.log.read_text(encoding="utf-8")))
    assert daemon.is_running()
    assert daemon.record()["port"] == 1
    assert daemon.stop(0.5)
    assert not daemon.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not daemon.stop(0.5), "nothing is left to end"


def test_a_process_that_dies_is_waited_for_although_its_environment_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies_late = "trap 'sleep 0.3; exit' TERM; echo ready; while true; do sleep 0.01; done"
    with subprocess.Popen(["bash", "-c", dies_late], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        known = [[psutil.Process(child.pid)]]
        monkeypatch.setattr(processes, "find", lambda *_: known.pop() if known else [])
        processes.end("ANY", "one", signal.SIGTERM, 20.0)
        assert child.poll() is not None


def test_a_stale_record_stops_no_other_process(daemon: Daemon) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        daemon.folder.mkdir()
        record = {
            "pid": stranger.pid,
            "process": f"{platform.node()}:{stranger.pid}:1",
            "token": "server-of-yesterday",
        }
        daemon.file.write_text(json.dumps(record), encoding="utf-8")
        assert not daemon.is_running(), "the pid is alive, but it is another process"
        assert not daemon.stop(0.5)
        assert stranger.poll() is None
        assert not daemon.file.exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_copied_record_is_no_daemon_of_the_copy(daemon: Daemon) -> None:
    start(daemon, "import time; time.sleep(60)")
    copy = Daemon("server", Path(shutil.copytree(daemon.folder, daemon.folder.with_name("copy"))))
    assert not copy.stop(0.5)
    assert daemon.is_running()


def test_a_change_of_the_clock_ends_no_process(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil adds the date of the boot to a start, and that date changes with the clock."""
    start(daemon, PARENT)
    name, boot = processes.name_of(psutil.Process()), psutil.boot_time()
    before = psutil.Process().create_time()
    for change in (-86400.0, 3600.0):
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda change=change: boot + change)
        assert psutil.Process().create_time() == pytest.approx(before + change), "the test has no effect"
        assert daemon.is_running()
        assert processes.is_alive(name), "a worker whose launcher seems to be gone would end itself"


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    own, first = psutil.Process(), psutil.Process(1)
    assert processes.start(own) == processes.start(psutil.Process(own.pid)) != processes.start(first)
    host, pid, _ = processes.name_of(own).rsplit(":", 2)
    assert not processes.is_alive(f"{host}:{pid}:{processes.start(first)}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_process_whose_name_is_cut_within_a_letter_has_a_start() -> None:
    """Linux keeps 15 bytes of a name, in whatever encoding."""
    set_name, own = 15, psutil.Process()  # PR_SET_NAME
    before = processes.start(own)
    name = Path("/proc/self/comm").read_bytes().rstrip()
    try:
        ctypes.CDLL(None).prctl(set_name, "Überwachung für".encode(), 0, 0, 0)
        assert processes.start(own) == before
    finally:
        ctypes.CDLL(None).prctl(set_name, name, 0, 0, 0)


def test_the_error_of_a_program_that_ends_has_the_end_of_its_log(daemon: Daemon) -> None:
    start(daemon, "print('no such database')")
    with pytest.raises(UserError, match=r"server has ended; .*ends with\nno such database"):
        daemon.wait_until_ready(lambda: False, 20)


def test_a_port_in_use_is_skipped() -> None:
    with socket.socket() as taken:
        taken.bind((processes.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < processes.free_port(port) < port + processes.PORTS_TRIED


def test_a_daemon_listens_only_on_its_own_port(daemon: Daemon) -> None:
    port = processes.free_port(20000 + os.getpid() % 10000)
    start(
        daemon, f"import socket, time; s = socket.create_server(('{processes.HOST}', {port})); time.sleep(60)"
    )
    daemon.wait_until_ready(lambda: daemon.listens(port), 20)
    with socket.create_server((processes.HOST, 0)) as stranger:
        assert not daemon.listens(stranger.getsockname()[1])
    assert daemon.runs_with(port=1)
    assert not daemon.runs_with(port=2)
    daemon.stop(0.5)
    assert not daemon.runs_with(port=1)


def test_processes_are_found_by_the_environment_they_were_started_with() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(words, env={**os.environ, "RLHF_TEST_MARK": str(os.getpid())})
    try:
        matching = processes.find("RLHF_TEST_MARK", str(os.getpid()))
        assert [p.pid for p in matching] == [process.pid]
        assert processes.find("RLHF_TEST_MARK", "another") == []
    finally:
        process.kill()
        process.wait()

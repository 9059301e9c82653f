"""Nothing is left of Prefect's temporary server once its flow has ended, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flows import temporary_server
from rlhf_tasks.project import processes
from tests.flows import toy

MARK = "RLHF_TEST_SERVER"
OWNER = f"""\
import pathlib, signal, subprocess, sys
from flows import temporary_server
temporary_server.bind()
for word in ({temporary_server.SERVER!r}, "a stage"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", word])
pathlib.Path("started").touch()
signal.pause()
"""


def marked(mark: str) -> list[str]:
    """The last words of the commands of the processes with this mark."""
    words = []
    for process in processes.find(MARK, mark):
        with suppress(psutil.Error):  # it has ended meanwhile
            words += process.cmdline()[-1:]  # empty while nobody has asked how the process ended
    return sorted(words)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_temporary_server_ends_with_its_owner_and_nothing_else_does(
    tmp_path: Path, number: signal.Signals
) -> None:
    environment = toy.environment() | {MARK: str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path, env=environment)
    try:
        toy.until((tmp_path / "started").exists, "the start")
        assert temporary_server.SERVER in marked(str(tmp_path))
        owner.send_signal(number)
        owner.wait(60)
        toy.until(lambda: marked(str(tmp_path)) == ["a stage"], "the end of the server, and of its watcher")
    finally:
        processes.end(MARK, str(tmp_path), signal.SIGKILL, 5.0)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_killed_flow_leaves_no_server(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project", tracking={"enabled": False})
    toy.write_script(root, [f"touch {tmp_path}/started", "exec sleep 600"])
    environment = toy.environment() | {
        MARK: str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect"), "DVC_NO_ANALYTICS": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    }  # fmt: skip
    flow = subprocess.Popen([sys.executable, "-m", "rlhf_tasks.cli", "flow"], cwd=root, env=environment)
    try:
        toy.until((tmp_path / "started").exists, "the start of the stage")
        servers = [p for p in processes.find(MARK, str(tmp_path)) if temporary_server.SERVER in p.cmdline()]
        assert len(servers) == 1, "or Prefect's command has changed"
        os.kill(flow.pid, signal.SIGKILL)
        flow.wait(60)
        toy.until(lambda: not servers[0].is_running(), "the end of the server")
    finally:
        processes.end(MARK, str(tmp_path), signal.SIGKILL, 5.0)

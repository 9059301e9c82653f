"""The temporary Prefect server of `rlhf flow` ends with the flow, also if that is killed. No Prefect here.

Prefect starts such a server where no other is named, and stops it when the flow's process exits, which it
cannot do after a SIGKILL. So a process of ours holds the reading end of a pipe, whose other end closes with
the flow.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

import psutil

from rlhf_tasks.project import processes

OWNER = "RLHF_FLOW_PROCESS"  # in the environment of the flow's process and of all that it starts
SERVER = "prefect.server.api.server:create_app"  # in the command of the server, and of nothing else
GRACE_SECONDS = 5.0


def bind() -> None:
    """Let every temporary server that this process starts from now on end with it."""
    os.environ[OWNER] = secrets.token_hex(8)
    reading, _ = os.pipe()  # the other end is closed by the end of this process, and only by that
    command = [sys.executable, "-m", __name__, os.environ[OWNER]]
    watcher = subprocess.Popen(command, stdin=reading, start_new_session=True)
    os.close(reading)
    watcher.returncode = 0  # it outlives this process: the interpreter must not warn of a lost child


def watch(owner: str) -> None:
    """Wait for the end of the input, which is that of the owner; then end the servers that it has left."""
    sys.stdin.read()
    servers = [process for process in processes.find(OWNER, owner) if _is_server(process)]
    processes.send(servers, signal.SIGTERM)
    _, alive = psutil.wait_procs(servers, GRACE_SECONDS)
    processes.send(alive, signal.SIGKILL)


def _is_server(process: psutil.Process) -> bool:
    try:
        return SERVER in process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False


if __name__ == "__main__":
    watch(sys.argv[1])

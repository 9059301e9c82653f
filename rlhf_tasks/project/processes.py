"""Programs that outlive the command that started them: started, found again, and ended. No torch here.

    FOLDER/NAME.json    pid, start time and token of the program
    FOLDER/NAME.log     what it prints

The token stands in the environment of the program and so of all that it starts, whatever session or
parent these have later: by it they are found and ended, and nobody else is (a pid alone is used again).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic

HOST = "127.0.0.1"
PORTS_TRIED = 50
LAST_PORT = 65535
POLL_SECONDS = 0.1
LOG_LINES = 15
KILL_SECONDS = 2.0
TOKEN = "RLHF_DAEMON"  # in the environment of a daemon and of its descendants


@dataclass(frozen=True)
class Daemon:
    name: str
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def known(self) -> dict[str, Any]:
        """What is written of its last start; empty if nothing is, or it cannot be read."""
        try:
            found: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def is_running(self) -> bool:
        known = self.known()
        try:
            process = psutil.Process(known["pid"])
            return bool(
                process.create_time() == known["started"] and process.status() != psutil.STATUS_ZOMBIE
            )
        except (KeyError, psutil.Error):
            return False

    def runs_as(self, **facts: Any) -> bool:
        """Whether it runs, started with these facts."""
        known = self.known()
        return self.is_running() and all(known.get(name) == value for name, value in facts.items())

    def listens(self, port: int) -> bool:
        """Whether it is the daemon, or what it started, that listens on this port, and not a stranger."""
        for process in carriers(TOKEN, str(self.known().get("token"))):
            with suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        return False

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, **facts: Any
    ) -> None:
        """Start it in a session of its own; `facts` are kept with its pid.

        What an earlier start left running is to be ended first (`stop`).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        token = f"{self.name}-{secrets.token_hex(8)}"
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**environment, TOKEN: token},
                start_new_session=True,
            )
        started = psutil.Process(process.pid).create_time()
        atomic.write_json(self.file, {"pid": process.pid, "started": started, "token": token, **facts})
        process.returncode = 0  # it outlives this command: the interpreter is not to warn of a lost child

    def await_ready(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Raises UserError with the end of its log if it ends, or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not is_ready():
            if not self.is_running() or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:])
                how = "is not ready" if self.is_running() else "has ended"
                raise UserError(f"{self.name} {how}; {self.log} ends with\n{tail}")
            time.sleep(POLL_SECONDS)

    def members(self) -> list[psutil.Process]:
        """The program and all that it started, and that lives."""
        token = str(self.known().get("token", ""))
        return carriers(TOKEN, token) if token else []

    def stop(self, grace_seconds: float) -> bool:
        """End it and all that it started; True if there was anything. Whom the file names wrongly is left.

        First the program alone is asked, so that it may end its own children in its own way; then those
        that are left; then they are killed.
        """
        token, members = str(self.known().get("token", "")), self.members()
        if members:
            first = [process for process in members if process.pid == self.known()["pid"]] or members
            send(first, signal.SIGTERM)
            _await_end(TOKEN, token, grace_seconds)
            end_carriers(TOKEN, token, signal.SIGTERM, grace_seconds)
            self._reap()
        self.file.unlink(missing_ok=True)
        return bool(members)

    def _reap(self) -> None:
        """Where this very process started it, its remains are ours to take away."""
        with suppress(ChildProcessError):
            os.waitpid(int(self.known()["pid"]), os.WNOHANG)


def carriers(variable: str, value: str) -> list[psutil.Process]:
    """The living processes of this user with this variable in the environment they were started with."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or somebody else's
    return found


def end_carriers(variable: str, value: str, number: signal.Signals, grace_seconds: float) -> bool:
    """Send all of them a signal, and kill those that outlive the grace; True if there were any."""
    found = carriers(variable, value)
    if found:
        send(found, number)
        _await_end(variable, value, grace_seconds)
        send(carriers(variable, value), signal.SIGKILL)
        _await_end(variable, value, KILL_SECONDS)
    return bool(found)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)  # psutil looks first whether the pid is still the same process


def _await_end(variable: str, value: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while carriers(variable, value) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def is_free(port: int) -> bool:
    """Whether nobody listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(first: int, besides: Collection[int] = ()) -> int:
    """`first`, or the next port that nobody listens on and that is not `besides`.

    Raises:
        UserError: if none of the next ones is free, or there is no such port.
    """
    if not 1 <= first <= LAST_PORT:
        raise UserError(f"port {first} is given; ports go from 1 to {LAST_PORT}")
    last = min(first + PORTS_TRIED - 1, LAST_PORT)
    for port in range(first, last + 1):
        if port not in besides and is_free(port):
            return port
    raise UserError(f"ports {first} to {last} are all in use; give another one")


def environment_path(base: Mapping[str, str]) -> str:
    """PATH with the commands of this Python's environment first (`rlhf`, `dvc`), activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])

"""Programs that are started: supervised to their end, as daemons, or for as long as their owner lives.

    FOLDER/NAME.json    pid, name and token of the program
    FOLDER/NAME.log     what it prints

A daemon's token is in its environment, and so in that of every process that it starts, whatever session or
parent these have later. They are found and ended by it, and no other process is: a pid alone may be reused.

A process that is killed cannot end what it has started. A program that must end with it is `attached`: it has
this module beside it, which checks that the owner lives, and leads the session of all that it starts. What
outlives the program is killed: vLLM's own processes overwrite their environment, and outlive their server.
"""

from __future__ import annotations

import json
import math
import os
import platform
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
from typing import Any, NoReturn

import psutil

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic

HOST = "127.0.0.1"
PORTS_TRIED = 50
LAST_PORT = 65535
POLL_SECONDS = 0.1
LOG_LINES = 15
KILL_SECONDS = 2.0
STARTTIME = 19  # among the fields of /proc/PID/stat after the program's name; see proc_pid_stat(5)
ATTACHED_GRACE_SECONDS = 5.0  # for an attached program to end its own processes
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would lead another Python of an attached program to our packages."""
TOKEN = "RLHF_DAEMON"  # in the environment of a daemon and of its descendants


@dataclass(frozen=True)
class Daemon:
    """A program by its name, with its files in a folder."""

    name: str
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def record(self) -> dict[str, Any]:
        """What was written at its last start; empty without a record, or for a copy of another folder's."""
        try:
            record = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        folder = Path(record.get("folder", self.folder))  # where it was started; it may have moved since then
        return {} if folder != self.folder and folder.exists() else record

    def is_running(self) -> bool:
        name = self.record().get("process")
        return name is not None and is_alive(name)

    def runs_with(self, **facts: Any) -> bool:
        """Whether it runs and was started with these facts."""
        record = self.record()
        return self.is_running() and all(record.get(name) == value for name, value in facts.items())

    def listens(self, port: int) -> bool:
        """Whether the program itself, or a process that it started, listens on this port."""
        listening = []
        for process in self.processes():
            with suppress(psutil.Error):
                listening += [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return any(connection.laddr.port == port for connection in listening)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, **facts: Any
    ) -> None:
        """Start it in a session of its own; `facts` are recorded with its pid.

        Call `stop` first: it ends what an earlier start left running.
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
        name = name_of(psutil.Process(process.pid))
        known = {"pid": process.pid, "process": name, "token": token, "folder": str(self.folder)}
        atomic.write_json(self.file, {**known, **facts})
        process.returncode = 0  # it outlives this command: the interpreter must not warn of a lost child

    def wait_until_ready(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Wait. Raises UserError with the end of the log if the program ends or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not is_ready():
            if not self.is_running() or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:])
                how = "is not ready" if self.is_running() else "has ended"
                raise UserError(f"{self.name} {how}; {self.log} ends with\n{tail}")
            time.sleep(POLL_SECONDS)

    def processes(self) -> list[psutil.Process]:
        """The living processes of the program and of everything that it started."""
        token = str(self.record().get("token", ""))
        return find(TOKEN, token) if token else []

    def stop(self, grace_seconds: float) -> bool:
        """End the program and everything that it started; True if anything was alive.

        The program alone gets the first signal, so that it may end its own children in its own way. Then
        those that are left get one, and what outlives the grace is killed.
        """
        record, alive = self.record(), self.processes()
        if alive:
            first = [process for process in alive if process.pid == record["pid"]] or alive
            send(first, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while (_living(alive.__contains__) or self.processes()) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            end(TOKEN, record["token"], signal.SIGTERM, grace_seconds)
            with suppress(ChildProcessError):  # if this very process started it, it would stay as a zombie
                os.waitpid(record["pid"], os.WNOHANG)
        self.file.unlink(missing_ok=True)
        return bool(alive)


def start(process: psutil.Process) -> str:
    """When a process started, which distinguishes it from earlier ones with its pid. It never changes.

    On Linux it is the boot, and the clock ticks since then: psutil adds the date of the boot, which differs
    after every change of the system's clock, so that a living process would seem to have ended.

    Raises:
        psutil.NoSuchProcess: if it has ended.
    """
    try:
        # The program's name in it may be cut within a letter.
        stat = Path(f"/proc/{process.pid}/stat").read_text("utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # another system, or it has ended
        return f"{process.create_time():.2f}"
    return f"{boot}-{fields[STARTTIME]}"


def name_of(process: psutil.Process) -> str:
    """HOST:PID:START, which names one process only: the system uses a pid again."""
    return f"{platform.node()}:{process.pid}:{start(process)}"


def is_alive(name: str) -> bool:
    """False only if the process lived on this machine and has ended."""
    machine, pid, _ = name.rsplit(":", 2)
    if machine != platform.node():
        return True
    try:
        process = psutil.Process(int(pid))
        return name_of(process) == name and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find(variable: str, value: str) -> list[psutil.Process]:
    """The living processes of this user that were started with this variable in their environment."""
    return _living(lambda process: process.environ().get(variable) == value)


def others_in_session(leader: int) -> list[psutil.Process]:
    """The living processes of the session that this process leads, or has led, but for itself."""
    return _living(lambda process: process.pid != leader and os.getsid(process.pid) == leader)


def _living(is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    living = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.status() != psutil.STATUS_ZOMBIE and is_wanted(process):
                living.append(process)
    return living


def end(variable: str, value: str, number: signal.Signals, grace_seconds: float) -> None:
    """Send a signal to all of them, and kill those that outlive the grace."""
    # One that is ending is found no more, for its environment goes first; but its ports are still in use.
    for sign, seconds in ((number, grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
        send(found := find(variable, value), sign)
        deadline = time.monotonic() + seconds
        while (_living(found.__contains__) or find(variable, value)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)  # psutil first checks that the pid is still the same process


def supervise(
    program: subprocess.Popen[Any],
    interrupt: Callable[[], object],
    grace_seconds: float = math.inf,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Wait for the end of a program that leads a process group; returns its exit status.

    An exception in the meantime, of a signal's handler or of `check`, calls `interrupt`, and is raised when
    the program has ended; a further signal calls it again. After the grace its group is killed.
    """
    stop, deadline = None, math.inf
    while True:
        try:
            # Not one long wait: a signal that the kernel hands to another thread would not end it.
            while program.poll() is None:
                time.sleep(POLL_SECONDS)
                if stop is None:
                    check()
                elif time.monotonic() > deadline:
                    interrupt_group(program, signal.SIGKILL)
            break
        except BaseException as error:
            stop, deadline = stop or error, min(deadline, time.monotonic() + grace_seconds)
            interrupt()
    if stop is not None:
        raise stop
    return program.returncode


def interrupt_group(leader: subprocess.Popen[Any], number: signal.Signals = signal.SIGINT) -> None:
    """Send a signal to a program and its process group: on SIGINT, DVC waits for its stage."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, number)


def attached(words: Sequence[str]) -> list[str]:
    """The command that runs `words` for as long as this process lives; start it in a session of its own.

    It ends as they do, and everything in that session with it.
    """
    return [sys.executable, "-P", "-m", "rlhf_tasks.project.processes", str(os.getpid()), *words]


def run_attached(owner: int, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program until it ends, or its owner, our parent, does; returns its exit status, or 143."""
    hidden = () if words[0] == sys.executable else OF_THIS_PYTHON
    variables = {name: value for name, value in environment.items() if name not in hidden}
    program = subprocess.Popen(words, env=variables, process_group=0)

    def end(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    def check() -> None:
        if os.getppid() != owner:  # whoever loses its parent gets another one
            end()

    signal.signal(signal.SIGTERM, end)
    try:
        return supervise(program, program.terminate, ATTACHED_GRACE_SECONDS, check)
    finally:
        send(others_in_session(os.getpid()), signal.SIGKILL)


def is_free(port: int) -> bool:
    """Whether no program listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(first: int, besides: Collection[int] = ()) -> int:
    """`first`, or the next port that is free and not among `besides`."""
    last = min(first + PORTS_TRIED - 1, LAST_PORT)
    for port in range(first, last + 1):
        if port not in besides and is_free(port):
            return port
    raise UserError(f"ports {first} to {last} are all in use; give another first port")


def environment_path(base: Mapping[str, str]) -> str:
    """PATH with the commands of this Python's environment first (`rlhf`, `dvc`), activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])


if __name__ == "__main__":
    status = run_attached(int(sys.argv[1]), sys.argv[2:], os.environ)
    if status < 0:  # a signal has ended the program, and so it ends this one
        with suppress(OSError):  # nothing handles SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)

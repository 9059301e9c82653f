"""Runs a program that ends when another process ends: `python -m rlhf_tasks.training.attached OWNER WORD …`.

A process that is killed cannot end what it has started. So the program has this one beside it, which
checks that the owner lives, and leads the session of the program and of all that it starts. Whatever of that
outlives the program is killed: vLLM's own processes overwrite their environment, and do not end with their
server. OWNER is the process id of its parent. No torch here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from rlhf_tasks.project.processes import send

CHECK_SECONDS = 0.5
GRACE_SECONDS = 5.0
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would lead the program's own Python to our packages."""


def command(words: Sequence[str]) -> list[str]:
    """The command that runs `words` for as long as this process lives; start it in a session of its own."""
    return [sys.executable, "-m", "rlhf_tasks.training.attached", str(os.getpid()), *words]


def run(owner: int, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program; returns its exit status, or 143 if it was ended by SIGTERM, or with its owner.

    On SIGTERM the program has GRACE_SECONDS to end its own processes.
    """
    program = subprocess.Popen(words, env={k: v for k, v in environment.items() if k not in OF_THIS_PYTHON})
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        while os.getppid() == owner and not received:  # whoever loses its parent gets another one
            with suppress(subprocess.TimeoutExpired):
                return program.wait(CHECK_SECONDS)
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_SECONDS)
    finally:
        send(others_in_session(os.getpid()), signal.SIGKILL)
    return 128 + signal.SIGTERM


def others_in_session(leader: int) -> list[psutil.Process]:
    """The living processes of the session that this process leads, or has led, but for itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if not is_zombie and process.pid != leader and os.getsid(process.pid) == leader:
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:], os.environ))

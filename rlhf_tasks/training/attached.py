"""Runs a program that ends when another process ends: `python -m rlhf_tasks.training.attached OWNER WORD …`.

A process that is killed cannot end what it has started. So the program has this one beside it, in a
session of its own, which checks that the owner lives. OWNER is a `context.process_name`. No torch here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from rlhf_tasks.project.processes import TOKEN, find, send
from rlhf_tasks.tracking import context

CHECK_SECONDS = 0.5
GRACE_SECONDS = 5.0
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would lead the program's own Python to our packages."""


def command(words: Sequence[str]) -> list[str]:
    """The command that runs `words` for as long as this process lives."""
    owner = context.process_name(psutil.Process())
    return [sys.executable, "-m", "rlhf_tasks.training.attached", owner, *words]


def run(owner: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program; returns its exit status, or 143 if it was ended because its owner had ended.

    SIGTERM ends the program and everything that it started.
    """
    program = subprocess.Popen(words, env={k: v for k, v in environment.items() if k not in OF_THIS_PYTHON})
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    while context.is_alive(owner):
        with suppress(subprocess.TimeoutExpired):
            return program.wait(CHECK_SECONDS)
    _end(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_SECONDS)
    _end(signal.SIGKILL)
    return 128 + signal.SIGTERM


def _end(number: signal.Signals) -> None:
    """Signal everything that was started with this process's token, but not this process."""
    token = os.environ.get(TOKEN, "")
    send([process for process in find(TOKEN, token) if token and process.pid != os.getpid()], number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:], os.environ))

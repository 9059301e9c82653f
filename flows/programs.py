"""What a flow starts: programs in process groups of their own, their lines as log lines. No torch here.

An interrupt of the task (a cancellation, a timeout) ends the program, and all that it has started. DVC is
kept for as long as a run lasts, since its own start takes longer than most of what it is asked.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect import get_run_logger

from flows import dvc_host
from rlhf_tasks import daemons
from rlhf_tasks.config import UserError
from rlhf_tasks.tracking.context import STAGE_RUN

HINTS = (
    "To track the changes with git, run:",
    "\tgit add ",
    "To enable auto staging, run:",
    "\tdvc config core.autostage ",
    "Use `dvc push` ",
)  # of DVC for people at a terminal
DRAIN_SECONDS = 5.0
POLL_SECONDS = 0.1

Logger = logging.Logger | logging.LoggerAdapter[Any]


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], grace_seconds: float
) -> tuple[int, list[str]]:
    """The exit status of a program, and its lines, which are logged as they come."""
    program = Program(command, folder, environment, grace_seconds, logger=get_run_logger())
    program.wait(for_answer=False)
    return program.status, program.lines


class Program:
    """A program that runs, and what it has printed since it was last asked."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        grace_seconds: float,
        *,
        logger: Logger | None = None,
        mark: str | None = None,
    ) -> None:
        """`mark`: the beginning of a line that is an answer, a number; such a program reads questions."""
        self.lines: list[str] = []
        self.answer: int | None = None
        self._environment, self._grace, self._mark = environment, grace_seconds, mark
        self._logger = logger
        self._told = threading.Event()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE if mark else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
            preexec_fn=_hears_interrupts,
        )
        # In a thread: an interrupt that meets a logging call is swallowed there, and would be lost.
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def status(self) -> int:
        """Of a program that has ended, its exit status; of one that goes on, its answer."""
        return self._process.wait() if self.answer is None else self.answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, words: Sequence[str], logger: Logger | None) -> None:
        """Have a question answered; the lines are those printed meanwhile."""
        self.lines, self.answer, self._logger = [], None, logger
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has gone: that it is not alive tells
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        self.wait(for_answer=True)

    def wait(self, *, for_answer: bool) -> None:
        """Until it has ended, or answered; an interrupt ends it, with all that it has started."""
        try:
            # Not one long wait: a signal that the kernel hands to another thread would not end it.
            while self.is_alive and not (for_answer and self.answer is not None):
                self._told.wait(POLL_SECONDS)
        except BaseException:
            self._interrupt()
            raise
        finally:
            self._told.clear()
        if not self.is_alive:
            self._heard()

    def close(self) -> None:
        """No more questions: one that reads them ends by that."""
        self._ask_no_more()
        self._process.wait()
        self._heard()

    def _ask_no_more(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _heard(self) -> None:
        """The last lines; those of a process that outlives the program are not waited for."""
        self._listener.join(DRAIN_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in map(str.rstrip, lines):
                if self._mark is not None and line.startswith(self._mark):
                    self.answer = int(line.removeprefix(self._mark))
                    self._told.set()
                    continue
                self.lines.append(line)
                if self._logger is not None and is_told(line):
                    self._logger.info("%s", line)
        self._told.set()

    def _interrupt(self) -> None:
        """Interrupt the whole group: dvc waits for its stage and ends clean; alone it would leave an orphan.

        A launcher's ranks have groups of their own and are ended by it; what outlives the grace is killed.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        self._ask_no_more()
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        daemons.end_carriers(STAGE_RUN, self._environment[STAGE_RUN], signal.SIGTERM, 1.0)
        self._process.wait()
        self._heard()


class Dvc:
    """`dvc` in a folder, for as long as the block lasts; to be asked by one thread."""

    def __init__(self, folder: Path, environment: Mapping[str, str], grace_seconds: float) -> None:
        self._mark = f"dvc-{secrets.token_hex(8)} "
        # By its path: at `folder` may lie a commit that has no such file. -P: no module of that folder's.
        self._command = [sys.executable, "-P", dvc_host.__file__, self._mark.strip()]
        self._place = (folder, environment, grace_seconds)
        self._program: Program | None = None

    def ask(self, *words: str, logged: bool) -> tuple[int, list[str]]:
        """The exit status of `dvc WORDS`, and what it printed."""
        if self._program is None or not self._program.is_alive:
            self.close()
            self._program = Program(self._command, *self._place, mark=self._mark)
        self._program.ask(words, get_run_logger() if logged else None)
        return self._program.status, self._program.lines

    def run(self, *words: str) -> str:
        """What `dvc WORDS` prints; UserError with its own words if it fails."""
        status, lines = self.ask(*words, logged=False)
        if status:
            raise UserError(f"`dvc {' '.join(words)}` failed: {' '.join(filter(None, lines))}")
        return "\n".join(lines)

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = None

    def __enter__(self) -> Dvc:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_told(line: str) -> bool:
    """Whether a line is for the log."""
    return bool(line) and not line.startswith(HINTS)


def _hears_interrupts() -> None:
    """In the child: a worker started in a shell's background ignores SIGINT, and would bequeath that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""What a flow starts: programs in process groups of their own, their lines as log lines. No torch here.

An interrupt of the task (a cancellation, a timeout) ends the program, and all that it has started. DVC is
kept for as long as a run lasts, since its own start takes longer than most of what it is asked.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect import get_run_logger

from flows import dvc_host
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
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
FAULT = 1  # the status of a program that ended without an answer

Logger = logging.Logger | logging.LoggerAdapter[Any]


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], grace_seconds: float
) -> tuple[int, list[str]]:
    """The exit status of a program, and its lines, which are logged as they come."""
    program = Program(command, folder, environment, grace_seconds, get_run_logger())
    return program.wait(), program.lines


class Program:
    """A program that runs, and what it has printed."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        grace_seconds: float,
        logger: Logger | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.lines: list[str] = []
        self._logger, self._token, self._grace = logger, environment[STAGE_RUN], grace_seconds
        self._news = threading.Event()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=stdin,
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
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Its exit status; an interrupt ends it, with all that it has started."""
        try:
            self._await(lambda: False)
        except BaseException:
            self.interrupt()
            raise
        self._listener.join(DRAIN_SECONDS)  # what outlives it may hold its output for ever
        return self._process.wait()

    def _await(self, is_so: Callable[[], bool]) -> None:
        """Until this is so, or it has ended."""
        # Not one long wait: a signal that the kernel hands to another thread would not end it.
        while self.is_alive and not is_so():
            self._news.wait(POLL_SECONDS)
            self._news.clear()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in map(str.rstrip, lines):
                self._hear(line)

    def _hear(self, line: str) -> None:
        self.lines.append(line)
        if self._logger is not None and is_told(line):
            self._logger.info("%s", line)

    def interrupt(self) -> None:
        """Interrupt the whole group: dvc waits for its stage and ends clean; alone it would leave an orphan.

        A launcher's ranks have groups of their own and are ended by it; what outlives the grace is killed.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.end_carriers(STAGE_RUN, self._token, signal.SIGTERM, 1.0)
        self._process.wait()
        self._listener.join(DRAIN_SECONDS)


class Host(Program):
    """A program that answers questions, one after another, each with a number in a line `MARK NUMBER`."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], grace_seconds: float
    ) -> None:
        """It is told the mark, which nothing else prints, as the command's last word."""
        self._mark = f"answer-{secrets.token_hex(8)}"
        self._answer: int | None = None
        super().__init__([*command, self._mark], folder, environment, grace_seconds, stdin=subprocess.PIPE)

    def ask(self, words: Sequence[str], logger: Logger | None) -> int:
        """The answer, or else how it ended, never 0; `lines` are those printed meanwhile."""
        self.lines, self._answer, self._logger = [], None, logger
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has gone: that it is not alive tells
                self._process.stdin.write(json.dumps(words) + "\n")
                self._process.stdin.flush()
            self._await(lambda: self._answer is not None)
        except BaseException:
            self.interrupt()
            raise
        ended = FAULT if self._answer is not None else self.wait() or FAULT  # which may hear an answer yet
        return ended if self._answer is None else self._answer

    def close(self) -> None:
        """No more questions: it ends by that."""
        self._ask_no_more()
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            self.interrupt()
        self._listener.join(DRAIN_SECONDS)

    def interrupt(self) -> None:
        self._ask_no_more()  # DVC, which heeds no interrupt while its stage runs, would wait for another
        super().interrupt()

    def _ask_no_more(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _hear(self, line: str) -> None:
        if found := re.fullmatch(rf"{self._mark} (-?\d+)", line):
            self._answer = int(found[1])
            self._news.set()
        else:
            super()._hear(line)


class Dvc:
    """`dvc` in a folder, for as long as the block lasts; to be asked by one thread."""

    def __init__(self, folder: Path, environment: Mapping[str, str], grace_seconds: float) -> None:
        self._place = (folder, environment, grace_seconds)
        self._host: Host | None = None

    def ask(self, *words: str, logged: bool) -> tuple[int, list[str]]:
        """The exit status of `dvc WORDS`, and what it printed."""
        if self._host is None or not self._host.is_alive:
            self.close()
            # By its path: at `folder` may lie a commit that has no such file. -P: no module of that folder's.
            self._host = Host([sys.executable, "-P", dvc_host.__file__], *self._place)
        status = self._host.ask(words, get_run_logger() if logged else None)
        return status, self._host.lines

    def run(self, *words: str) -> str:
        """What `dvc WORDS` prints; UserError with its own words if it fails."""
        status, lines = self.ask(*words, logged=False)
        if status:
            raise UserError(f"`dvc {' '.join(words)}` failed: {' '.join(filter(None, lines))}")
        return "\n".join(lines)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._host = None

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

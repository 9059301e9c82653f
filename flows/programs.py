"""Programs that a flow starts: each in a process group of its own, its lines as log lines. No torch here.

An interrupt of the task (a cancellation, a timeout) ends the program and everything that it has started.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from rlhf_tasks.project import processes
from rlhf_tasks.tracking.context import STAGE_RUN

DRAIN_SECONDS = 5.0
POLL_SECONDS = 0.1

Logger = logging.Logger | logging.LoggerAdapter[Any]


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    grace_seconds: float,
    logger: Logger | None = None,
) -> tuple[int, list[str]]:
    """Run a program and log its lines as they come. Returns its exit status and its lines."""
    program = Program(command, folder, environment, grace_seconds, logger or get_run_logger())
    return program.wait(), program.lines


class Program:
    """A running program, and what it has printed."""

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
            preexec_fn=_restore_interrupts,
        )
        # In a thread: an interrupt that arrives during a logging call is swallowed there, and would be lost.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for the exit status. An interrupt ends the program and everything that it has started."""
        try:
            self._wait_until(lambda: False)
        except BaseException:
            self.interrupt()
            raise
        self._reader.join(DRAIN_SECONDS)  # a process that outlives the program may hold its output open
        return self._process.wait()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the program has ended."""
        # Not one long wait: a signal that the kernel hands to another thread would not end it.
        while self.is_alive and not condition():
            self._news.wait(POLL_SECONDS)
            self._news.clear()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in map(str.rstrip, lines):
                self._handle(line)

    def _handle(self, line: str) -> None:
        self.lines.append(line)
        if self._logger is not None and line:
            self._logger.info("%s", line)

    def interrupt(self) -> None:
        """Send SIGINT to the whole group: dvc then waits for its stage, and leaves no orphan.

        A launcher ends its own ranks, which are in other groups. What outlives the grace is killed.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.end(STAGE_RUN, self._token, signal.SIGTERM, 1.0)
        self._process.wait()
        self._reader.join(DRAIN_SECONDS)


def _restore_interrupts() -> None:
    """In the child: a worker in a shell's background ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

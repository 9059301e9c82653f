"""Programs that a flow runs: each in a process group of its own, its lines as log lines. No torch here."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prefect import get_run_logger
from prefect.exceptions import TerminationSignal

from rlhf_tasks.project import processes
from rlhf_tasks.tracking.context import STAGE_RUN

DRAIN_SECONDS = 5.0  # for the last lines: a process that outlives the program may hold its output open
FOLLOW_SECONDS = 3.0
INTERRUPTS = (KeyboardInterrupt, TerminationSignal)  # of a task: it ends as cancelled, which is no crash
STOPPED = "it was stopped with its run"
# What DVC says to people at a terminal after every stage, and of each stage that the flow says itself.
HINT = re.compile(
    r"To track the changes with git|\s+git add|To enable auto staging|\s+dvc config|Use `dvc push`|"
    r"Updating lock file|Stage '.*' is cached"
)


class OutOfTime(KeyboardInterrupt):
    """The run's deadline is over. It unwinds like an interrupt, so that MLflow shows the run as KILLED."""


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    grace_seconds: float,
    *,
    deadline: float = math.inf,
    follow: Callable[[], None] = lambda: None,
) -> tuple[int, list[str]]:
    """Run a program and log its lines as they come. Returns its exit status and its lines.

    An interrupt of the task (a cancellation, a timeout) ends the program and everything that it has started:
    the group gets SIGINT, upon which dvc waits for its stage, and what outlives the grace is killed.

    Args:
        deadline: When it is interrupted, by `time.monotonic`.
        follow: Is called every few seconds, in a thread of its own.

    Raises:
        OutOfTime: at the deadline, when the program has ended.
    """
    logger, lines = get_run_logger(), list[str]()
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,
        # A worker in a shell's background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in map(str.rstrip, output):
                if line and not HINT.match(line):
                    lines.append(line)
                    if not interrupted.is_set():  # from then on it speaks to a person at a terminal
                        logger.info("%s", line)

    def interrupt() -> None:
        interrupted.set()
        processes.interrupt_group(process)

    def check() -> None:
        if time.monotonic() > deadline:
            raise OutOfTime

    def show() -> None:
        while not ended.wait(FOLLOW_SECONDS):
            follow()

    # In threads: an interrupt that arrives during a logging call is swallowed there, and would be lost.
    ended, interrupted = threading.Event(), threading.Event()
    reader, follower = (threading.Thread(target=target, daemon=True) for target in (read, show))
    reader.start()
    follower.start()
    try:
        status = processes.supervise(process, interrupt, grace_seconds, check)
    except BaseException:
        processes.end(STAGE_RUN, environment[STAGE_RUN], signal.SIGTERM, 1.0)  # those in other groups
        raise
    finally:
        ended.set()
        for thread in (reader, follower):
            thread.join(DRAIN_SECONDS)
    return status, lines

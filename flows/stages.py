"""One stage of dvc.yaml as a Prefect task: run by DVC in a process group of its own. No torch here."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment
from prefect.states import Completed

from flows import settings
from rlhf_tasks import daemons, lineage
from rlhf_tasks.config import Care, Service
from rlhf_tasks.tracking.context import STAGE_RUN

LEASE_SECONDS = 60.0  # of a slot whose holder vanished
EXIT_MISTAKE = 2  # `rlhf STAGE` for what the user can mend
UNCHANGED, RESTORED = "didn't change, skipping", "is cached - skipping run"  # DVC's words; from its run cache
HINTS = (
    "To track the changes with git, run:",
    "\tgit add ",
    "To enable auto staging, run:",
    "\tdvc config core.autostage ",
    "Use `dvc push` ",
)  # of DVC for people at a terminal
OF_DVC = (">", "Running stage", "ERROR: failed to reproduce")  # around a stage's own words
EXITED = r"exited with (\d+)"  # DVC's words of a stage that ran, and so has said itself why it failed
DRAIN_SECONDS = 5.0
POLL_SECONDS = 0.1


class StageFailed(RuntimeError):
    """A fault: worth another try."""


class StageMistaken(StageFailed):
    """A mistake that the user can mend: another try would end alike."""


def with_care(name: str, care: Care) -> Task[Any, Any]:
    """The task of one stage, with its retries, timeout and names."""
    delays = [care.retry_delay_seconds * 2**i for i in range(care.retries)]
    bound: Task[Any, Any] = stage.with_options(
        name=name,
        task_run_name=name,
        tags=["rlhf", *([settings.SLOTS] if care.gpu_slots else [])],
        retries=care.retries,
        retry_delay_seconds=delays or 0,
        retry_condition_fn=_is_fault,
        timeout_seconds=care.timeout_seconds,
    )
    return bound


def _is_fault(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not isinstance(error, StageMistaken)


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def stage(
    name: str, folder: Path, environment: dict[str, str], service: Service, unchanged: bool
) -> State[Any]:
    """Run one stage if anything it depends on has changed; its output becomes log lines.

    `unchanged`: it is known that nothing has. Ends as `Cached` where nothing had to run. A slot of the
    limit is held only while the stage runs.

    Raises:
        StageFailed: if it fails.
    """
    ask = partial(_dvc, name, folder, environment, service.grace_seconds)
    how = UNCHANGED if unchanged else verdict(name, ask("--single-item", "--dry"))
    if how != UNCHANGED:
        with slots(0 if how == RESTORED else service.care(name).gpu_slots):
            # another run may have made the same while this one waited
            how = verdict(name, ask("--single-item"))
    if how is None:
        return Completed(message="ran")
    why = "nothing it depends on has changed" if how == UNCHANGED else "DVC has its outs from an earlier run"
    return Completed(name="Cached", message=why)


def verdict(name: str, told: str) -> str | None:
    """`UNCHANGED`, `RESTORED`, or None for a stage that ran (or would), by what DVC told of it."""
    lines = told.splitlines()
    known = (UNCHANGED, RESTORED)
    return next((w for w in known if any(line.startswith(f"Stage '{name}' {w}") for line in lines)), None)


def unchanged(folder: Path, environment: Mapping[str, str], grace_seconds: float) -> list[str]:
    """The first stages, in dvc.yaml's order, that need not run: asked of DVC once for all of them."""
    names = list(lineage.graph(folder))
    try:
        told = _dvc(None, folder, environment, grace_seconds, "--dry")
    except StageFailed:
        return []  # a stage cannot be looked at before another has run, or at all: its task will tell
    return list(itertools.takewhile(lambda name: verdict(name, told) == UNCHANGED, names))


def slots(number: int) -> AbstractContextManager[Any]:
    """The limit `gpu`; a run outside of the service has no such limit to keep."""
    if not number:
        return nullcontext()
    return concurrency(
        settings.SLOTS,
        occupy=number,
        strict=deployment.id is not None,
        lease_duration=LEASE_SECONDS,
        raise_on_lease_renewal_failure=False,  # else a server that restarts would end the training
    )


def _dvc(
    name: str | None, folder: Path, environment: Mapping[str, str], grace_seconds: float, *options: str
) -> str:
    """What `dvc repro` prints for one stage, or None: all; logged as it comes, but for a dry run's."""
    target = [] if name is None else [name]
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *options, *target]
    status, lines = run(command, folder, environment, grace_seconds, logged="--dry" not in options)
    if status:
        raise _failure(name or "any", lines)
    return "\n".join(lines)


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    grace_seconds: float,
    *,
    logged: bool = True,
) -> tuple[int, list[str]]:
    """The exit status of a program, and its lines; an interrupt of the task ends the program too."""
    logger = get_run_logger()
    lines: list[str] = []

    def listen(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if logged and is_told(lines[-1]):
                logger.info("%s", lines[-1])

    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,
        preexec_fn=_hears_interrupts,
    ) as process:
        # In a thread: an interrupt that meets a logging call is swallowed there, and would be lost.
        listener = threading.Thread(target=listen, args=[process], daemon=True)
        listener.start()
        try:
            # Not one long wait: a signal that the kernel hands to another thread would not end it.
            while (status := process.poll()) is None:
                time.sleep(POLL_SECONDS)
        except BaseException:
            _end(process, environment, grace_seconds)
            listener.join(DRAIN_SECONDS)
            raise
        listener.join(DRAIN_SECONDS)
    return status, lines


def is_told(line: str) -> bool:
    """Whether a line is for the log."""
    return bool(line) and not line.startswith(HINTS)


def _hears_interrupts() -> None:
    """In the child: a worker started in a shell's background ignores SIGINT, and would bequeath that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[str], environment: Mapping[str, str], grace_seconds: float) -> None:
    """Interrupt the whole group: dvc waits for its stage and ends clean; alone it would leave an orphan.

    A launcher's ranks have groups of their own and are ended by it; what outlives the grace is killed.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    daemons.end_carriers(STAGE_RUN, environment[STAGE_RUN], signal.SIGTERM, 1.0)
    process.wait()


def _failure(name: str, lines: list[str]) -> StageFailed:
    """The stage's own last words, and its exit status as DVC tells it; DVC's where no stage has ended."""
    found = re.search(EXITED, "\n".join(lines[-5:]))
    error = next((line for line in reversed(lines[-5:]) if line.startswith("ERROR: ")), None)
    if found is None and error is not None:
        return StageFailed(f"stage {name} failed (dvc failed): {error.removeprefix('ERROR: ')}")
    told = [line for line in lines if line and not line.startswith(OF_DVC)]
    said = next((line for line in told if line.startswith("rlhf: ")), told[-1] if told else "it said nothing")
    if found and int(found[1]) == EXIT_MISTAKE:
        return StageMistaken(f"stage {name} refused: {said.removeprefix('rlhf: ')}")
    status = f"exit status {found[1]}" if found else "dvc failed"
    return StageFailed(f"stage {name} failed ({status}): {said}; its own words are in the log")

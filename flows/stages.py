"""One stage of dvc.yaml as a Prefect task: DVC runs it. No torch here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment
from prefect.states import Completed

from flows import settings
from flows.programs import Dvc
from rlhf_tasks.config import Care, Service

LEASE_SECONDS = 60.0  # of a slot whose holder vanished
EXIT_MISTAKE = 2  # `rlhf STAGE` for what the user can mend
UNCHANGED, RESTORED = "didn't change, skipping", "is cached - skipping run"  # DVC's words; from its run cache
OF_DVC = (">", "Running stage", "ERROR: failed to reproduce")  # around a stage's own words
EXITED = r"exited with (\d+)"  # DVC's words of a stage that ran, and so has said itself why it failed


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
def stage(name: str, dvc: Dvc, service: Service, unchanged: bool) -> State[Any]:
    """Run one stage if anything it depends on has changed; its output becomes log lines.

    `unchanged`: it is known that nothing has. Ends as `Cached` where nothing had to run. A slot of the
    limit is held only while the stage runs.

    Raises:
        StageFailed: if it fails.
    """
    number, how = service.care(name).gpu_slots, UNCHANGED if unchanged else None
    if how is None and number:
        how = verdict(name, _repro(dvc, "--dry", name=name, logged=False))
    if how != UNCHANGED:
        with slots(0 if how == RESTORED else number):
            # another run may have made the same while this one waited
            how = verdict(name, _repro(dvc, name=name))
    if how is None:
        return Completed(message="ran")
    why = "nothing it depends on has changed" if how == UNCHANGED else "DVC has its outs from an earlier run"
    return Completed(name="Cached", message=why)


def verdict(name: str, told: str) -> str | None:
    """`UNCHANGED`, `RESTORED`, or None for a stage that ran (or would), by what DVC told of it."""
    lines = told.splitlines()
    known = (UNCHANGED, RESTORED)
    return next((w for w in known if any(line.startswith(f"Stage '{name}' {w}") for line in lines)), None)


def unchanged(names: Sequence[str], dvc: Dvc) -> list[str]:
    """The first of the stages, given in dvc.yaml's order, that need not run: asked of DVC once for all."""
    try:
        told = _repro(dvc, "--dry", logged=False)
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


def _repro(dvc: Dvc, *words: str, name: str | None = None, logged: bool = True) -> str:
    """What `dvc repro` prints for one stage, or None: all; logged as it comes."""
    target = ["--single-item", name] if name is not None else []
    status, lines = dvc.ask("--wait-for-lock", "repro", *words, *target, logged=logged)
    if status:
        raise _failure(name or "any", lines)
    return "\n".join(lines)


def _failure(name: str, lines: list[str]) -> StageFailed:
    """The stage's own last words, and its exit status as DVC tells it; DVC's where no stage has ended."""
    lines = [line for line in lines if line]
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

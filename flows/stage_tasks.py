"""One stage of dvc.yaml as a Prefect task: DVC runs it. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.states import Completed

from flows import settings
from flows.dvc_client import Dvc
from rlhf_tasks.config import TaskPolicy
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import checkpoint

SHOWN_LINES = 2  # of a stage that wrote no reason: its last words, and DVC's error

Plan = Literal["unchanged", "restore", "run"]


class StageFailed(RuntimeError):
    """A fault, which another try may not meet."""


class StageRefused(StageFailed):
    """A mistake that the user can fix; another try would end in the same way."""


def stage_task(name: str, policy: TaskPolicy) -> Task[Any, Any]:
    """The task of one stage, with its retries, timeout and names."""
    delays = [policy.retry_delay_seconds * 2**i for i in range(policy.retries)]
    bound: Task[Any, Any] = stage.with_options(
        name=name,
        task_run_name=name,
        tags=["rlhf", *([settings.SLOTS] if policy.gpu_slots else [])],
        retries=policy.retries,
        retry_delay_seconds=delays or 0,
        retry_condition_fn=_is_fault,
        timeout_seconds=policy.timeout_seconds,
    )
    return bound


def _is_fault(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not isinstance(error, StageRefused)


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def stage(name: str, dvc: Dvc, plan: Plan, gpus: Sequence[str] = ()) -> State[Any]:
    """Run or restore one stage; its output becomes log lines. The state is `Cached` if nothing had to run.

    `gpus`: those that the stage sees; empty: those that this process sees.

    Raises:
        StageFailed: if the stage fails.
    """
    if plan == "unchanged":
        return Completed(name="Cached", message="nothing it depends on has changed")
    begin = beginning(name, dvc.folder, int(task_run.get_run_count())) if plan == "run" else ""
    if begin:
        get_run_logger().info("%s", begin)
    if gpus:
        get_run_logger().info("uses %s", ", ".join(gpus))
    reproduce(name, dvc, gpus)
    if plan == "restore":
        return Completed(name="Cached", message="DVC restored its outs from an earlier run")
    return Completed(message=f"ran; {begin}" if begin else "ran")


def beginning(name: str, folder: Path, attempt: int) -> str:
    """What a try of a stage begins with, if that is worth a word: `attempt 2 resumes from update 12`."""
    point = checkpoint.point(Paths(folder), name)
    if attempt > 1:
        return f"attempt {attempt} " + (f"resumes from {point}" if point else "starts from the beginning")
    return f"resumes from {point} of an earlier run" if point else ""


def make_plan(name: str, dvc: Dvc) -> Plan:
    """What `dvc repro` will do with a stage."""
    changed = dvc.changed(name)
    if changed is not None and name not in changed:
        return "unchanged"
    return "restore" if dvc.is_restorable(name) else "run"


def unchanged(names: Sequence[str], dvc: Dvc) -> list[str]:
    """The first stages, in dvc.yaml's order, that need not run. DVC answers once for all of them."""
    changed = dvc.changed()
    return [] if changed is None else list(itertools.takewhile(lambda name: name not in changed, names))


def reproduce(name: str, dvc: Dvc, gpus: Sequence[str] = ()) -> None:
    """Run `dvc repro` for one stage.

    Raises:
        StageRefused: if the stage has written that the user can fix its failure, or lacks a dep.
        StageFailed: for any other failure.
    """
    status, lines = dvc.reproduce(name, gpus)
    if not status:
        return
    failure = dvc.failure()
    if failure is None and (missing := dvc.missing(name)):
        raise StageRefused(f"stage {name} refused: {', '.join(missing)} must exist; restore it")
    if failure is None:  # a stage that is not ours, or one that was killed; or DVC itself failed
        message = "; ".join(lines[-SHOWN_LINES:]) or "it printed nothing"
        raise StageFailed(f"stage {name} failed: {message}")
    if failure["kind"] == "user":
        raise StageRefused(f"stage {name} refused: {failure['message']}")
    raise StageFailed(f"stage {name} failed: {failure['message']}; its output is in the log")

"""One stage of dvc.yaml as a Prefect task: DVC runs it. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment
from prefect.states import Completed

from flows import settings
from flows.dvc_client import Dvc
from rlhf_tasks.config import Service, TaskPolicy

LEASE_SECONDS = 60.0  # after which a slot is free whose holder vanished
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
def stage(name: str, dvc: Dvc, service: Service, unchanged: bool) -> State[Any]:
    """Run one stage if anything it depends on has changed; its output becomes log lines.

    `unchanged`: the flow already knows that nothing has. The state is `Cached` if nothing had to run. A slot
    of the limit is held only while the stage runs.

    Raises:
        StageFailed: if the stage fails.
    """
    plan = "unchanged" if unchanged else make_plan(name, dvc)
    if plan == "unchanged":
        return Completed(name="Cached", message="nothing it depends on has changed")
    number = service.policy(name).gpu_slots if plan == "run" else 0
    with slots(number):
        if number and dvc.is_restorable(name):  # another run may have made the same while this one waited
            plan = "restore"
        reproduce(name, dvc)
    if plan == "restore":
        return Completed(name="Cached", message="DVC restored its outs from an earlier run")
    return Completed(message="ran")


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


def slots(number: int) -> AbstractContextManager[Any]:
    """Slots of the concurrency limit `gpu`. A run outside the service has no such limit."""
    if not number:
        return nullcontext()
    return concurrency(
        settings.SLOTS,
        occupy=number,
        strict=deployment.id is not None,
        lease_duration=LEASE_SECONDS,
        raise_on_lease_renewal_failure=False,  # or else a restart of the server would end the training
    )


def reproduce(name: str, dvc: Dvc) -> None:
    """Run `dvc repro` for one stage.

    Raises:
        StageRefused: if the stage has written that the user can fix its failure, or lacks a dep.
        StageFailed: for any other failure.
    """
    status, lines = dvc.reproduce(name)
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

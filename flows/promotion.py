"""The flow's last task: `rlhf promote` where the run works. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from flows import devices, results, subprocesses
from flows.slots import Slots
from rlhf_tasks.config import Config
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.command import DEFERRED, DONE, POLICY, REFUSED, RETRY_HINT, UNDECIDED, verdict_file
from rlhf_tasks.promotion.verdict import Verdict
from rlhf_tasks.report import run_facts

NAMES: Mapping[int, str] = dict(zip((DONE, REFUSED, DEFERRED), results.VERDICTS, strict=True))


def verdict(folder: Path, values: Config, environment: dict[str, str]) -> dict[str, Any]:
    """Promote the policy in the folder if there is one, a gate and a registry.

    Returns the fields of an Outcome that the gate decides; none if nothing is to be promoted.
    """
    outs = {out for node in dvc_files.graph(folder).values() for out in node.outs}
    if values.promotion is None or not values.tracking.enabled or POLICY not in outs:
        return {}
    bound: Any = promote.with_options(timeout_seconds=values.service.timeout_seconds)
    state: State[Any] = bound(folder, environment, values, return_state=True)
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        if state.is_cancelled():
            raise error
        return {"verdict": results.DEFERRED, "reason": f"the gate did not run ({error})"}
    rows = criteria(folder) if state.name != results.DEFERRED else []
    return {"verdict": str(state.name), "reason": str(state.message), "criteria": rows}


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote(folder: Path, environment: dict[str, str], values: Config) -> State[Any]:
    """Promoted, Not promoted or Deferred, which it is also if the gate cannot run.

    The message names no command that decides later: the notes of the run do, since they know the experiment.
    The task waits for a slot only if it has to judge.
    """
    command, service = [sys.executable, "-P", "-m", "rlhf_tasks.cli", "promote"], values.service
    run = partial(subprocesses.run, folder=folder, grace_seconds=service.grace_seconds)
    try:
        status, lines = run([*command, "--unless-judging"], environment=environment)
        if status == UNDECIDED:
            with Slots() as slots:
                if service.gpu_slots:
                    slots.hold(service.gpu_slots, get_run_logger().info)
                status, lines = run(command, environment=environment | devices.variables(slots.held))
    except subprocesses.INTERRUPTS as interrupt:
        get_run_logger().info("stopped; Retry decides")
        return Cancelled(message=subprocesses.STOPPED, data=interrupt)
    message = lines[-1] if lines else "it printed nothing"
    name = NAMES.get(status, results.DEFERRED)
    if status not in NAMES:
        message = f"the gate did not run ({message.removeprefix('rlhf: ')})"
    return Completed(name=name, message=message.removeprefix(f"{name}: ").removesuffix(RETRY_HINT))


def criteria(folder: Path) -> list[dict[str, str]]:
    """The last verdict on the policy in the folder, a row per criterion; empty without a verdict."""
    file = verdict_file(Paths(folder).home, dvc_files.locked(folder).get(POLICY, "none"))
    tree = run_facts.read_json(file)
    return Verdict.of_tree(tree).rows() if tree else []

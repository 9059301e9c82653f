"""The flow's last task: `rlhf promote` where the run works. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows import devices, outcome, programs
from flows.slots import Slots
from rlhf_tasks.config import Config
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import gate
from rlhf_tasks.promotion.candidate import POLICY
from rlhf_tasks.promotion.command import DEFERRED, DONE, REFUSED, RETRY_HINT, UNDECIDED
from rlhf_tasks.promotion.record import verdict_file

NAMES: Mapping[int, str] = {DONE: "Promoted", REFUSED: "Refused", DEFERRED: "Deferred"}


class Verdict(TypedDict):
    """The fields of an Outcome that the gate decides."""

    verdict: str | None
    reason: str
    criteria: list[dict[str, str]]


def verdict(folder: Path, values: Config, environment: dict[str, str]) -> Verdict:
    """Promote the policy in the folder if there is one, a gate and a registry."""
    if not is_due(values, folder):
        return Verdict(verdict=None, reason="", criteria=[])
    bound: Any = promote.with_options(timeout_seconds=values.service.timeout_seconds)
    state: State[Any] = bound(folder, environment, values, return_state=True)
    if not outcome.has_results(state):
        error = state.result(raise_on_failure=False)
        return Verdict(verdict="Deferred", reason=f"the gate did not run ({error})", criteria=[])
    name = str(state.name)
    rows = criteria(folder) if name != "Deferred" else []
    return Verdict(verdict=name, reason=str(state.message), criteria=rows)


def is_due(values: Config, folder: Path) -> bool:
    """Whether there is a gate, a registry, and a policy."""
    outs = {out for node in dvc_files.graph(folder).values() for out in node.outs}
    return values.promotion is not None and values.tracking.enabled and POLICY in outs


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote(
    folder: Path, environment: dict[str, str], values: Config, logger: programs.Logger | None = None
) -> State[Any]:
    """Promoted, Refused or Deferred, which it is also if the gate cannot run.

    The message names no command that decides later: the
    notes of the run do, since they know the experiment. The task waits for a slot only if it has to judge.
    """
    command, service = [sys.executable, "-m", "rlhf_tasks.cli", "promote"], values.service
    run = partial(programs.run, folder=folder, grace_seconds=service.grace_seconds, logger=logger)
    status, lines = run([*command, "--unless-judging"], environment=environment)
    if status == UNDECIDED:
        with Slots() as slots:
            if service.gpu_slots:
                slots.hold(service.gpu_slots, lambda line: None)
            gpus = {devices.VISIBLE: ",".join(slots.held)} if slots.held else {}
            status, lines = run(command, environment=environment | gpus)
    message = next((line for line in reversed(lines) if line), "it printed nothing")
    name = NAMES.get(status, NAMES[DEFERRED])
    if status not in NAMES:
        message = f"the gate did not run ({message.removeprefix('rlhf: ')})"
    return outcome.ended(name, message.removeprefix(f"{name}: ").removesuffix(RETRY_HINT))


def criteria(folder: Path) -> list[dict[str, str]]:
    """The last verdict on the policy in the folder, a row per criterion; empty without a verdict."""
    md5 = dvc_files.locked(folder).get(POLICY)
    file = verdict_file(Paths(folder).home, md5 or "none")
    if not file.exists():
        return []
    return gate.Verdict.of_tree(json.loads(file.read_text(encoding="utf-8"))).rows()

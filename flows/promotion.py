"""The flow's last task: `rlhf promote` where the run works. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import programs, stages
from rlhf_tasks.config import Config
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import gate
from rlhf_tasks.promotion.command import DEFERRED, DONE, REFUSED, RETRY_HINT, UNDECIDED
from rlhf_tasks.promotion.record import verdict_file

POLICY = "models/policy"
NAMES: Mapping[int, str] = {DONE: "Promoted", REFUSED: "Refused", DEFERRED: "Deferred"}


def is_due(values: Config, folder: Path) -> bool:
    """Whether there is a gate, a registry, and a policy."""
    made = {out for node in dvc_files.graph(folder).values() for out in node.outs}
    return values.promotion is not None and values.tracking.enabled and POLICY in made


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote(folder: Path, environment: dict[str, str], values: Config) -> State[Any]:
    """Promoted, Refused or Deferred, always completed: the policy is there whatever the gate says.

    Deferred, too, where the gate could not be asked. The state names no command that asks it later: what
    that has to name, the run's notes know. A slot of the limit is waited for only where there is something
    to judge.
    """
    command, service = [sys.executable, "-m", "rlhf_tasks.cli.main", "promote"], values.service
    ask = partial(programs.run, folder=folder, environment=environment, grace_seconds=service.grace_seconds)
    status, lines = ask([*command, "--unless-judging"])
    if status == UNDECIDED:
        with stages.slots(service.gpu_slots):
            status, lines = ask(command)
    said = next((line for line in reversed(lines) if line), "it said nothing")
    name = NAMES.get(status, NAMES[DEFERRED])
    if status not in NAMES:
        said = f"the gate could not be asked ({said.removeprefix('rlhf: ')})"
    return Completed(name=name, message=said.removeprefix(f"{name}: ").removesuffix(RETRY_HINT))


def criteria(folder: Path) -> list[dict[str, str]]:
    """The last verdict on the policy there, a row a criterion; empty if there is none."""
    md5 = dvc_files.locked(folder).get(POLICY)
    file = verdict_file(Paths().home, md5 or "none")
    if not file.exists():
        return []
    return gate.Verdict.of_tree(json.loads(file.read_text(encoding="utf-8"))).rows()

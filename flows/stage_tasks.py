"""One stage of dvc.yaml as a Prefect task: it runs `dvc repro` for the stage. No torch here."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.states import Cancelled, Completed

from flows import devices, settings, stage_plan, subprocesses
from rlhf_tasks import console
from rlhf_tasks.config import TaskPolicy
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import checkpoint, failures

SHOWN_LINES = 2  # of a stage that wrote no reason: its last words, and DVC's error

Plan = Literal["unchanged", "restore", "run"]


class StageFailed(RuntimeError):
    """A fault, which another try may not meet."""


class StageRefused(StageFailed):
    """A mistake that the user can fix; another try would end in the same way."""


@dataclass(frozen=True)
class Dvc:
    """DVC's command line in the folder where a run works."""

    folder: Path
    environment: Mapping[str, str]
    grace_seconds: float  # time that an interrupted stage has to save its state
    deadline: float = math.inf  # when a stage is interrupted, by `time.monotonic`
    follow: Callable[[Mapping[str, Any]], None] = lambda doing: None
    """Is called every few seconds with what a stage does, as `console` writes it."""

    def plans(self, stages: Sequence[str]) -> list[Plan]:
        """What `dvc repro` will do with the first of these stages: all that are unchanged, and one more."""
        # By its path: the commit in `folder` may not have this file. -P: no module of that folder.
        done = subprocess.run(
            [sys.executable, "-P", stage_plan.__file__, *stages],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
            start_new_session=True,
        )
        return cast(list[Plan], done.stdout.split()) if done.returncode == 0 else ["run"]

    def reproduce(self, stage: str, gpus: Sequence[str] = ()) -> None:
        """Run or restore one stage if it has changed; its output becomes log lines.

        Args:
            gpus: Those that the stage sees; empty: those that this process sees.

        Raises:
            StageRefused: if the stage reports a user error, or a dependency is missing.
            StageFailed: for any other failure.
            OutOfTime: at the deadline.
        """
        command = [sys.executable, "-P", "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
        with tempfile.TemporaryDirectory(prefix="rlhf-flow-") as scratch:
            report, progress = Path(scratch) / "failure.json", Path(scratch) / "progress.json"
            files = {failures.FAILURE: str(report), console.PROGRESS: str(progress)}

            def follow() -> None:
                try:
                    doing = json.loads(progress.read_text(encoding="utf-8"))
                except (OSError, ValueError):  # there is none yet, or it is being written
                    return
                self.follow(doing)

            status, lines = subprocesses.run(
                command,
                self.folder,
                {**self.environment, **devices.variables(gpus), **files},
                self.grace_seconds,
                deadline=self.deadline,
                follow=follow,
            )
            failure = failures.read_failure(report)
        if status == 0:
            return
        deps = dvc_files.graph(self.folder)[stage].deps if failure is None else ()
        if missing := [dep for dep in deps if not (self.folder / dep).exists()]:
            raise StageRefused(f"stage {stage} refused: {', '.join(missing)} must exist; restore it")
        if failure is None:  # a stage that is not ours, or one that was killed; or DVC itself failed
            message = "; ".join(lines[-SHOWN_LINES:]) or "it printed nothing"
            if re.search("exited with (-9|137)", message):
                message += f" (SIGKILL: {failures.OUT_OF_MEMORY})"
            raise StageFailed(f"stage {stage} failed: {message}")
        if failure["kind"] == "user":
            raise StageRefused(f"stage {stage} refused: {failure['message']}")
        raise StageFailed(f"stage {stage} failed: {failure['message']}; its output is in the log")


def stage_task(name: str, policy: TaskPolicy) -> Task[Any, Any]:
    """The task of one stage, with its retries, timeout and names."""

    def is_fault(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
        return not isinstance(state.result(raise_on_failure=False), StageRefused)

    delays = [policy.retry_delay_seconds * 2**i for i in range(policy.retries)]
    bound: Task[Any, Any] = stage.with_options(
        name=name,
        task_run_name=name,
        tags=["rlhf", *([settings.SLOTS] if policy.gpu_slots else [])],
        retries=policy.retries,
        retry_delay_seconds=delays or 0,
        retry_condition_fn=is_fault,
        timeout_seconds=policy.timeout_seconds,
    )
    return bound


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def stage(name: str, dvc: Dvc, plan: Plan, gpus: Sequence[str] = ()) -> State[Any]:
    """Run or restore one stage. The state is `Cached` if nothing had to run, `Out of time` at the deadline.

    An interrupt is the result of a cancelled state. Raises StageFailed if the stage fails.
    """
    if plan == "unchanged":
        return Completed(name="Cached", message="nothing it depends on has changed")
    begin = describe_beginning(name, dvc.folder, int(task_run.get_run_count())) if plan == "run" else ""
    for line in (begin, f"uses {', '.join(gpus)}" if gpus else ""):
        if line:
            get_run_logger().info("%s", line)
    try:
        dvc.reproduce(name, gpus)
    except subprocesses.INTERRUPTS as interrupt:
        name = settings.OUT_OF_TIME if isinstance(interrupt, subprocesses.OutOfTime) else "Cancelled"
        return Cancelled(name=name, message=subprocesses.STOPPED, data=interrupt)
    if plan == "restore":
        return Completed(name="Cached", message="DVC restored its outs from an earlier run")
    return Completed(message=f"ran; {begin}" if begin else "ran")


def explain(plan: Plan, stage: str, root: Path, folder: Path) -> str:
    """What is done with a stage; if it must run, what differs from its last run in the checkout `root`."""
    if plan != "run":
        return "unchanged" if plan == "unchanged" else "restored from an earlier run"
    try:
        before = dvc_files.locked_by(root, stage)
    except UserError:  # a merge is open there
        return "runs: dvc.lock of the checkout cannot be read"
    now, graph = dvc_files.locked(folder), dvc_files.graph(folder)
    if not before:
        return "runs: the checkout has no result of it"
    changes = inputs.find_changes(root, folder, stage)
    for maker in [name for name in graph if name != dvc_files.INPUTS]:
        read = {*graph[maker].outs} & {*graph[stage].deps}
        changes += [f"what {maker} made"] * any(now.get(out) != before.get(out) for out in read)
    changed = f"changed since its last run in the checkout: {'; '.join(changes)}"
    return f"runs: {changed if changes else 'the cache of DVC lacks its result'}"


def describe_beginning(name: str, folder: Path, attempt: int) -> str:
    """Where this attempt resumes, or "": `attempt 2 resumes from update 12`."""
    point = checkpoint.point(Paths(folder), name)
    if attempt > 1:
        return f"attempt {attempt} " + (f"resumes from {point}" if point else "starts from the beginning")
    return f"resumes from {point} of an earlier run" if point else ""

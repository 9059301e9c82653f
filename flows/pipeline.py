"""The whole pipeline as a Prefect flow: a task per stage of dvc.yaml, in its order. No torch here.

DVC decides which stages run, as under a plain `dvc repro`, and both share the cache, the run cache and the
lineage. Prefect shows the run, logs it and can cancel it. By default a run has a workspace of its own
(`rlhf_tasks.project.workspaces`) and ends as a DVC experiment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.utilities.urls import url_for

from flows import (
    hooks,
    promotion,
    request,
    results,
    settings,
    stage_tasks,
    temporary_server,
    watch,
    workplace,
)
from flows.dvc_client import Dvc
from flows.outcome import Outcome, has_results
from flows.slots import Slots
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, dvc_files, git, workspace_inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import links
from rlhf_tasks.tracking import pipeline as tracking

PUSH_TRIES, PUSH_DELAY_SECONDS = 3, 10.0  # the delay doubles
DOING: Mapping[stage_tasks.Plan, str] = {"unchanged": "checked", "restore": "restoring", "run": "running"}


@flow(
    name=settings.PIPELINE,
    description="Bring every stage of dvc.yaml up to date: data, SFT, reward model, PPO, judge, report.",
    persist_result=False,
    on_cancellation=[hooks.clean],
    on_crashed=[hooks.clean],
)
def pipeline(
    preset: request.PresetName = request.DEFAULT,
    seed: request.Seed | None = None,
    overrides: request.Overrides = {},  # noqa: B006  Prefect shows it in the form
    where: request.Where = "workspace",
    revision: request.Revision | None = None,
    name: request.ExperimentName | None = None,
    push: bool = False,
    promote: bool = True,
) -> State[Any]:
    """Bring every stage of dvc.yaml up to date, one after the other.

    Invalid parameters end the run as Failed before anything starts. A stage that fails, or anything else
    that the user can fix, also ends it as Failed, with one message in the state and in the log.

    Args:
        preset: Changes of params.yaml for this run; `rlhf preset` lists the presets. default: no preset.
        seed: Replaces the seed of params.yaml. The same seed gives the same result.
        overrides: Single values by dotted key, for any key of params.yaml; they replace the preset's values.
        where: workspace: a git worktree of a commit, whose result becomes a DVC experiment. checkout: the
            working tree itself, as under a plain `dvc repro`; it takes no changes of parameters.
        revision: The commit of the workspace, by hash, branch or tag. The default is the last commit.
        name: The name of the workspace's DVC experiment. The default is the name of the flow run.
        push: Send the results to the DVC remote at the end.
        promote: Let the gate decide at the end whether the policy becomes the champion.
    """
    try:
        asked = Request(request.preset_of(preset), seed, overrides)
        return _run(asked, where, revision, name, push, promote)
    except (UserError, stage_tasks.StageFailed) as error:
        return request.refused(error)


@dataclass(frozen=True)
class Inputs:
    """What a run works on, as it finds it at its start."""

    root: Path
    request: Request
    commit: str | None
    """None for a run in the checkout."""
    text: str
    """Of the params.yaml that the stages see."""
    values: Config
    changes: list[str]
    revision: str
    data: str
    """The fingerprint of the data."""
    unseen: list[str]
    """Files with uncommitted changes, which a run of a commit does not see."""


def _read_inputs(request_: Request, where: request.Where, revision: str | None, name: str | None) -> Inputs:
    """Check the request and read what it names.

    Raises:
        UserError: if anything is invalid.
    """
    root = Path.cwd()
    commit = request.commit_of(root, where, revision, name)
    text, values, changes = request.resolve(root, request_, commit)
    if commit is not None:
        workspace_inputs.check_data(values.data.path)
    return Inputs(
        root, request_, commit, text, values, changes,
        revision=commit or git.revision(root) or "none",
        data=watch.fingerprint(root, values),
        unseen=workspace_inputs.unseen(root, values.data.path) if commit is not None else [],
    )  # fmt: skip


def _run(
    request_: Request, where: request.Where, revision: str | None, name: str | None, push: bool, promote: bool
) -> State[Any]:
    """The final state of a run in which no stage fails.

    Raises:
        UserError: for a mistake that the user can fix.
        StageFailed: if a stage fails.
    """
    inputs, run = _read_inputs(request_, where, revision, name), str(flow_run.get_id())
    values = inputs.values
    chosen = name or request.default_name(str(flow_run.get_name()), run)
    title = request.name_run(run, chosen)
    facts = _facts(inputs, title, run)
    tags = {"prefect.flow_run_id": run, "prefect.flow_run": title}
    tags |= {tracking.NAME: title, tracking.NOTE: tracking.note(facts)}
    with (
        workplace.opened(inputs.root, run, inputs.commit, inputs.text, values, inputs.unseen) as place,
        tracking.open_run(Paths(inputs.root), run, values.tracking, tags) as tracked,
    ):
        folder = workplace.folder_of(place)
        environment = workplace.stage_environment(place, run, chosen)
        with Dvc(folder, environment, values.service.grace_seconds) as dvc:
            how = run_stages(list(dvc_files.graph(folder)), values, dvc)
            saved, experiment = workplace.saved_experiment(place, chosen, name is not None, dvc)
        outcome = Outcome(
            name=saved, how=how, revision=inputs.revision, experiment=experiment, changes=inputs.changes,
            unpushed=send(folder) if push else None,
        )  # fmt: skip
        tracked.results(Paths(folder))
        tracked.tags(outcome.tags(folder))
        if promote:
            outcome = replace(outcome, **promotion.verdict(folder, values, environment))
        if outcome.verdict:
            tracked.tags({"promotion": outcome.promotion})
        facts |= {"DVC experiment": saved if outcome.experiment else None}
        facts |= {"verdict": outcome.promotion if outcome.verdict else None}
        tracked.tags({tracking.NOTE: tracking.note(facts, has_report=True)})
        earlier = saved if saved != chosen else None
        undelivered = tracked.last_error()
        outcome = replace(outcome, notes=_notes(inputs, outcome, earlier, undelivered))
        keys, patience = results.run_keys(folder, list(how)), 0.0 if undelivered else links.WAIT_SECONDS
        pages = links.run_links(values.tracking, keys, tracking.key(run), patience)
        results.show(outcome, folder, pages)
        watch.note(request_, values, inputs.data)
    return outcome.state()


def _facts(inputs: Inputs, title: str, run: str) -> dict[str, str | None]:
    """What the description in MLflow says of a run at its start."""
    page = url_for("flow-run", run)
    return {
        "preset": inputs.request.preset or "none",
        "seed": str(inputs.values.seed),
        "changes": ", ".join(f"`{change}`" for change in inputs.changes),
        "commit": inputs.revision,
        "Prefect run": f"[{title}]({page})" if page else None,
    }


def run_stages(names: Sequence[str], values: Config, dvc: Dvc) -> dict[str, str]:
    """Run these stages, in this order; returns `ran` or `cached` for each.

    Raises:
        StageFailed: if a stage fails; the later ones do not start.
    """
    progress: Any = create_progress_artifact(0.0, key=results.PROGRESS_KEY, description="comparing")
    how = dict[str, str]()

    def show(*doing: str) -> None:
        """The share of the stages that are done; how each of them ended, and what the run does now."""
        description = "; ".join([*(f"{stage}: {result}" for stage, result in how.items()), *doing])
        update_progress_artifact(progress, 100.0 * len(how) / len(names), description=description)

    if (first := dvc_files.INPUTS) in names:  # before DVC compares, and without a slot
        names = [name for name in names if name != first]
        show(f"{first}: running")
        policy = values.service.policy(first).model_copy(update={"gpu_slots": 0})
        written: Any = stage_tasks.stage_task(first, policy)(first, dvc, "run", return_state=True)
        if not written.is_completed():
            raise _failure(first, written)
    unchanged = stage_tasks.unchanged(names, dvc)
    policies = [values.service.policy(name) for name in names]
    with Slots() as slots:
        for number, (name, policy) in enumerate(zip(names, policies, strict=True)):
            try:
                plan: stage_tasks.Plan = (
                    "unchanged" if name in unchanged else stage_tasks.make_plan(name, dvc)
                )
                needed = slots.needed(name, values) if plan == "run" else 0
                if needed and slots.hold(needed, show):
                    plan = stage_tasks.make_plan(name, dvc)  # another run may have made the same meanwhile
                gpus = slots.held if needed and plan == "run" else []
                show(f"{name}: {DOING[plan]}")
                # Called, not submitted: the thread of a submitted task would train on after a cancellation.
                state: Any = stage_tasks.stage_task(name, policy)(name, dvc, plan, gpus, return_state=True)
                if not state.is_completed():
                    raise _failure(name, state)
            except BaseException as error:
                show(f"{name}: {'failed' if isinstance(error, Exception) else 'stopped'}")
                raise
            how[name] = "cached" if state.name == "Cached" else "ran"
            if not any(later.gpu_slots for later in policies[number + 1 :]):
                slots.release()
    show()
    return how


def _failure(name: str, state: State[Any]) -> BaseException:
    """The error of a stage's task. A timeout is a failure of the stage."""
    error: BaseException = state.result(raise_on_failure=False)
    if isinstance(error, TimeoutError):
        return stage_tasks.StageFailed(f"stage {name} was ended: {state.message}")
    return error


def _notes(inputs: Inputs, outcome: Outcome, earlier: str | None, undelivered: str | None) -> list[str]:
    """What the user must know; `earlier` is an experiment with the same result."""
    notes = []
    if inputs.unseen:
        notes.append(f"this run saw the commit, not the uncommitted changes of {', '.join(inputs.unseen)}")
    if inputs.commit is not None and outcome.experiment is None:
        notes.append("nothing differs from the commit, so the run has no experiment")
    if undelivered:
        notes.append(f"MLflow lacks part of this run ({undelivered}); `rlhf sync` delivers it")
    if earlier:
        notes.append(f"an earlier run has the same result: see experiment {earlier}")
    if outcome.unpushed:
        notes.append(f"not pushed to the DVC remote, and kept here: {outcome.unpushed}")
    if outcome.verdict == "Deferred":
        which = f" {outcome.name}" if outcome.experiment else ""
        notes.append(f"the gate has not decided; `rlhf promote{which}` decides later")
    return notes


@task(
    name="push",
    task_run_name="push",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=PUSH_TRIES - 1,
    retry_delay_seconds=[PUSH_DELAY_SECONDS * 2**i for i in range(PUSH_TRIES - 1)],
)
def _push(folder: Path) -> None:
    dvc_cli.run(folder, "push")


def send(folder: Path) -> str | None:
    """Push the outs to the DVC remote. If that fails, returns what the remote lacks, and why."""
    state: State[Any] = _push(folder, return_state=True)
    if state.is_completed():
        return None
    error = state.result(raise_on_failure=False)
    outs = ", ".join(out for node in dvc_files.graph(folder).values() for out in node.outs)
    return f"{outs} ({str(error).splitlines()[-1]}); `dvc exp apply` the run, then `dvc push`"


def run_in_checkout() -> int:
    """Run the flow once in the working folder. Exit status: 0 done, 2 a user's mistake, 1 a fault.

    Raises:
        UserError: if params.yaml is invalid, before Prefect starts anything.
    """
    request.resolve(Path.cwd(), Request(), None)
    for variable, value in settings.QUIET.items():
        os.environ.setdefault(variable, value)
    if PREFECT_API_URL.value() is None:
        temporary_server.bind()
    state: State[Any] = pipeline(where="checkout", return_state=True)
    if has_results(state):
        return 0
    reason = state.result(raise_on_failure=False)
    return 2 if isinstance(reason, UserError | stage_tasks.StageRefused) else 1

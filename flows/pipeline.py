"""The whole pipeline as a Prefect flow: a task per stage of dvc.yaml, in its order. No torch here.

DVC decides which stages run, as under a plain `dvc repro`, and both share the cache, the run cache and the
lineage. Prefect shows the run, logs it and can cancel it. By default a run has a workspace of its own
(`rlhf_tasks.project.workspaces`) and ends as a DVC experiment.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.utilities.urls import url_for

from flows import automations, form, promotion, results, run_folder, settings, stage_tasks, watch
from flows.progress import Progress
from flows.results import Outcome
from flows.slots import Slots
from flows.stage_tasks import Dvc, StageFailed, StageRefused
from flows.subprocesses import OutOfTime
from rlhf_tasks.config import Config, TaskPolicy
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, dvc_files, git, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import run_facts
from rlhf_tasks.tracking import pipeline as tracking
from rlhf_tasks.training import checkpoint

CANCELLED = "Flow run was cancelled."
PUSH_RETRIES, PUSH_DELAY_SECONDS = 2, 10.0  # the delay doubles


@flow(
    name=settings.PIPELINE,
    description="Bring every stage of dvc.yaml up to date: data, SFT, reward model, PPO, judge, report.",
    persist_result=False,
    on_completion=[automations.emit_end],
    on_failure=[automations.emit_end],
    on_cancellation=[automations.emit_end, run_folder.clean],
    on_crashed=[automations.emit_end, run_folder.clean],
)
def pipeline(
    preset: form.PresetName = form.DEFAULT,
    common: form.Common = form.NONE,
    seed: form.Seed | None = None,
    overrides: form.Overrides = {},  # noqa: B006  Prefect shows it in the form
    where: form.Where = "workspace",
    revision: form.Revision | None = None,
    name: form.ExperimentName | None = None,
    push: bool = False,
    promote: bool = True,
    max_hours: form.Hours | None = None,
) -> State[Any]:
    """Bring every stage of dvc.yaml up to date, one after the other.

    Invalid parameters end the run as Failed before anything starts. A stage that fails, or anything else
    that the user can fix, also ends it as Failed, with one message in the state and in the log.

    Args:
        preset: Changes of params.yaml for this run; `rlhf preset` lists the presets. default: no preset.
        common: What runs change most often. An empty field has the preset's value, else that of params.yaml.
        seed: Replaces the seed of params.yaml. The same seed gives the same result.
        overrides: Single values by dotted key, for any key of params.yaml; they replace the preset's values.
        where: workspace: a git worktree of a commit, whose result becomes a DVC experiment. checkout: the
            working tree itself, as under a plain `dvc repro`; it takes no changes of parameters.
        revision: The commit of the workspace, by hash, branch or tag. The default is the last commit.
        name: The name of the workspace's DVC experiment. By default it is what the run changes
            and a short id, such as smoke-kl_coef=0.05-seed=2-7f3a. The flow run gets it too. If another
            result of the same commit has the name, the experiment's ends with such an id.
        push: Send the results to the DVC remote at the end.
        promote: Let the gate decide at the end whether the policy becomes the champion.
        max_hours: End the training after this time, with a snapshot: Retry, and a run with the same
            parameters, resume from it. The default is no limit.
    """
    deadline = math.inf if max_hours is None else time.monotonic() + 3600 * max_hours
    try:
        # 1. What the run works on, as it finds it at its start.
        request = form.build_request(preset, seed, common, overrides)
        root, run = Path.cwd(), str(flow_run.get_id())
        commit = form.commit_of(root, where, revision, name)
        text, values, changes = form.resolve(root, request, commit)
        data, notes = watch.fingerprint(root, values), list[str]()
        if commit is not None:
            workspaces.check_data(values)
            is_given = values.data.source in ("files", "mix")
            now = f", with the data ({values.data.in_words}) as it is now" if is_given else ""
            get_run_logger().info("the run works on commit %s%s", commit, now)
            if unseen := ", ".join(workspaces.unseen(root, values)):
                notes.append(f"this run saw the commit, not the uncommitted changes of {unseen}")
                get_run_logger().warning("the run does not see the uncommitted changes of %s", unseen)

        # 2. Its name and description in Prefect and MLflow.
        chosen = name or request.name(run)
        title, page = chosen, url_for("flow-run", run)
        if flow_run.get_parent_flow_run_id():  # a run of a sweep keeps the name that the sweep gave it
            title = str(flow_run.get_name())
        else:
            with get_client(sync_client=True) as client:
                client.update_flow_run(UUID(run), name=chosen)
        facts = {
            "Preset": request.preset or "none",
            "Seed": str(values.seed),
            "Commit": commit or git.commit(root) or "none",
            "Changes": "; ".join(changes),
            "Prefect run": f"[{title}]({page})" if page else None,
        }
        tags = {"preset": request.preset or "none", **({"changes": ", ".join(changes)} if changes else {})}
        tags |= {tracking.NAME: title, tracking.NOTE: tracking.note(facts)}
        with (
            run_folder.open_folder(root, run, commit, text, values) as workspace,
            tracking.open_run(Paths(root), run, values.tracking, tags) as tracked,
        ):
            # 3. The stages, then the experiment, the remote and the gate.
            folder = workspace.folder if workspace else root
            environment = run_folder.stage_environment(workspace, run, chosen)
            if push:
                dvc_cli.check_remote(folder)
            dvc = Dvc(folder, environment, values.service.grace_seconds, deadline=deadline)
            how = run_stages(list(dvc_files.graph(folder)), values, dvc)
            saved, experiment = run_folder.save_experiment(workspace, chosen, name is not None, run)
            outcome = Outcome(
                name=saved,
                how=how,
                revision=str(facts["Commit"]),
                experiment=experiment,
                changes=changes,
                unpushed=send(folder) if push else None,
                card=run_facts.outcome(Paths(folder), values.judge.judges),
            )
            tracked.results(Paths(folder))
            tracked.tags(outcome.tags())
            if promote:
                outcome = replace(outcome, **promotion.verdict(folder, values, environment))

            # 4. What the user sees of it.
            promoted = {"promotion": outcome.promotion} if outcome.verdict else {}
            ran = ", ".join(stage for stage, result in how.items() if result == "ran")
            facts |= {"Stages that ran": ran, "DVC experiment": saved if experiment else None}
            gate = {"Promotion": outcome.promotion if outcome.verdict else None}
            tracked.tags(promoted | {tracking.NOTE: tracking.note({**gate, **outcome.card, **facts})})
            undelivered = tracked.last_error()
            if commit is not None and experiment is None:
                notes.append("nothing differs from the commit, so the run has no experiment")
            if undelivered:
                notes.append(f"MLflow lacks part of this run ({undelivered}); `rlhf sync` delivers it")
            if saved != chosen and name is None:
                notes.append(f"an earlier run has the same result: see experiment {saved}")
            elif saved != chosen:
                notes.append(f"experiment {name} is another result of this commit: this run's is {saved}")
            if outcome.unpushed:
                notes.append(f"not pushed to the DVC remote, and kept here: {outcome.unpushed}")
            if outcome.verdict == results.DEFERRED:
                apply = f"`dvc exp apply {saved}`, then " if experiment else ""
                notes.append(f"the gate has not decided; to decide later: {apply}`rlhf promote`")
            pages = tracked.pages(results.run_keys(folder, list(how)))
            results.show(replace(outcome, notes=notes), folder, pages, git.address(root))
            watch.note(root, request, values, data)
        return outcome.state()
    except OutOfTime as error:
        ended = StageFailed(f"max_hours={max_hours:g} is over; {error}")
        form.silence(ended)
        return Cancelled(name=settings.OUT_OF_TIME, message=str(ended), data=ended)
    except (UserError, StageFailed) as error:
        return form.fail_with(error)


def run_stages(names: Sequence[str], values: Config, dvc: Dvc) -> dict[str, str]:
    """Run these stages, in this order; returns `ran` or `cached` for each.

    Raises:
        StageFailed: if a stage fails; the later ones do not start.
        OutOfTime: at the deadline, with what is kept.
    """
    policies = {name: values.service.policy(name) for name in names}
    plans = list[stage_tasks.Plan]()
    if (inputs := dvc_files.INPUTS) in names:  # it always runs, before DVC compares, and without a slot
        names, plans = sorted(names, key=lambda name: name != inputs), ["run"]
        policies[inputs] = policies[inputs].model_copy(update={"gpu_slots": 0})
    progress = Progress(names, Paths(dvc.folder).home)
    dvc = replace(dvc, follow=progress.follow)
    with Slots(dvc.deadline) as slots:
        for number, name in enumerate(names):
            progress.stage, progress.share = name, 0.0
            try:
                plan, *plans = plans or dvc.plans(names[number:])
                needed = slots.num_slots(name, values) if plan == "run" and policies[name].gpu_slots else 0
                if needed and slots.hold(needed, progress.say):
                    plan = dvc.plans([name])[0]  # another run may have made the same meanwhile
                gpus = slots.held if needed and plan == "run" else []
                if name != inputs:
                    progress.say(stage_tasks.explain(plan, name, Path.cwd(), dvc.folder))
                result = run_stage(name, dvc, plan, gpus, policies[name])
            except BaseException as error:
                point = checkpoint.point(Paths(dvc.folder), name) if progress.share else None
                if point is None:
                    progress.share = 0.0  # a retry starts the stage anew
                saved = f", its state is saved at {point}" if point else ""
                if isinstance(error, Exception):
                    progress.say("failed")
                    raise
                percent = progress.say(f"stopped{saved}; Retry resumes")
                # This sentence is enough: the engine need not say it too.
                logging.getLogger("prefect.flow_runs").addFilter(lambda record: record.msg != CANCELLED)
                if isinstance(error, OutOfTime):
                    raise OutOfTime(f"state kept at {percent}%; Retry resumes") from None
                raise
            if name != inputs:
                progress.ends[name] = result
            if not any(policies[later].gpu_slots for later in names[number + 1 :]):
                slots.release()
    return progress.ends


def run_stage(name: str, dvc: Dvc, plan: stage_tasks.Plan, gpus: Sequence[str], policy: TaskPolicy) -> str:
    """Run the task of one stage; returns `ran` or `cached`.

    Raises:
        StageFailed: if the stage fails, or exceeds its timeout.
        OutOfTime: at the deadline.
    """
    # Called, not submitted: the thread of a submitted task would train on after a cancellation.
    state: Any = stage_tasks.stage_task(name, policy)(name, dvc, plan, gpus, return_state=True)
    if not state.is_completed():
        error: BaseException = state.result(raise_on_failure=False)
        if isinstance(error, TimeoutError):
            error = StageFailed(f"stage {name} was ended: {state.message}")
        raise error
    return "cached" if state.name == "Cached" else "ran"


@task(
    name="push",
    task_run_name="push",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=PUSH_RETRIES,
    retry_delay_seconds=[PUSH_DELAY_SECONDS * 2**i for i in range(PUSH_RETRIES)],
)
def _push(folder: Path) -> None:
    dvc_cli.run(folder, "push")


def send(folder: Path) -> str | None:
    """Push the outs to the DVC remote. If that fails, returns why, and what to do."""
    state: State[Any] = _push(folder, return_state=True)
    if state.is_completed():
        return None
    error = state.result(raise_on_failure=False)
    reason = error.reason if isinstance(error, dvc_cli.DvcError) else error
    return f"{reason}; `dvc exp apply` the run, then `dvc push`"


def run_in_checkout() -> int:
    """`run_here` of the flow in the working folder.

    Raises UserError if params.yaml is invalid, before Prefect starts anything.
    """
    form.resolve(Path.cwd(), Request(), None)
    return run_here(lambda: pipeline(where="checkout", return_state=True))


def run_here(start: Callable[[], Any]) -> int:
    """Run a flow once in this process. Exit status: 0 done, 2 a user's mistake, 1 a fault.

    Where PREFECT_API_URL names no server, Prefect starts one that ends with this process. `start` returns the
    flow's final state.

    Raises UserError if the server is gone.
    """
    for variable, value in settings.QUIET.items():
        os.environ.setdefault(variable, value)
    if address := os.environ.get("PREFECT_API_URL"):
        settings.check_server(address)
    os.environ["PYTHONSAFEPATH"] = "1"  # for the server, which Prefect starts by `python -m`; not for stages
    try:
        state: State[Any] = start()
    except httpx.TransportError as error:
        raise UserError(
            f"the Prefect server is gone ({error}); start it and give the command again, which goes on where "
            "this run stopped"
        ) from None
    finally:
        del os.environ["PYTHONSAFEPATH"]
    if state.is_completed():
        return 0
    reason = state.result(raise_on_failure=False)
    return 2 if isinstance(reason, UserError | StageRefused) else 1

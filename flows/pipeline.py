"""The whole pipeline as a Prefect flow: a task per stage of dvc.yaml, in its order. No torch here.

DVC decides what is to be done, as under a plain `dvc repro`, and shares cache, run cache and lineage
with it; Prefect shows it, logs it and can cancel it. By default a run has a workspace of its own
(`rlhf_tasks.project.workspaces`) and ends as a DVC experiment. `python -m flows.pipeline` runs it once in the
working folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows import hooks, promotion, request, results, settings, stages, watch
from flows.programs import Dvc
from rlhf_tasks.config import Config, Service
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, dvc_files, git, processes, workspace_inputs, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.workspaces import Workspace
from rlhf_tasks.tracking import links
from rlhf_tasks.tracking import pipeline as tracking
from rlhf_tasks.tracking.context import STAGE_RUN

PUSH_TRIES, PUSH_DELAY_SECONDS = 3, 10.0  # the delay doubles
PREFECT_OWN = "PREFECT__"  # what Prefect tells the engine's process is not for the stages


@flow(
    name=settings.PIPELINE,
    description="Bring every stage of dvc.yaml up to date: data, SFT, reward model, PPO, judge, report.",
    persist_result=False,
    on_cancellation=[hooks.clean],
    on_crashed=[hooks.clean],
)
def pipeline(
    preset: request.PresetName | None = None,
    seed: request.Seed | None = None,
    overrides: request.Overrides | None = None,
    where: request.Where = "workspace",
    revision: request.Revision | None = None,
    name: request.ExperimentName | None = None,
    push: bool = False,
) -> State[Any]:
    """Bring every stage of dvc.yaml up to date, one after the other.

    Parameters that cannot be end it as Failed before anything starts. A stage that fails, and whatever else
    the user can mend, ends it as Failed too, with one message in the state and in the log.

    Args:
        preset: Values written over those of params.yaml before the run; `rlhf preset` lists them.
        seed: Instead of params.yaml's; the same seed gives the same run.
        overrides: Single values on top, by dotted key: any key of params.yaml.
        where: workspace: a git worktree of a commit, whose result is a DVC experiment. checkout: the working
            tree itself, like a plain `dvc repro`; takes no changes.
        revision: The workspace's commit, by hash, branch or tag; by default the last one.
        name: Of the workspace's DVC experiment; by default the flow run's name.
        push: Send what the run made to the DVC remote at the end.
    """
    try:
        return _run(Request(preset, seed, overrides), where, revision, name, push)
    except (UserError, stages.StageFailed) as error:
        return request.refused(error)


def _run(
    asked: Request, where: request.Where, revision: str | None, name: str | None, push: bool
) -> State[Any]:
    """The state in which a run ends that comes to its end.

    Raises:
        UserError: for what the user can mend.
        StageFailed: if a stage fails.
    """
    root, run = Path.cwd(), str(flow_run.get_id())
    commit = request.commit_of(root, where, revision, name)
    text, values, changes = request.settle(root, asked, commit)
    if commit is not None:
        workspace_inputs.check_data(values.data.path)
    # As the run finds it, not as it may have become meanwhile.
    revision = commit or git.revision(root) or "none"
    data = watch.fingerprint(root, values)
    unseen = workspace_inputs.unseen(root, values.data.path) if commit is not None else []
    given, name = name is not None, name or request.default_name(str(flow_run.get_name()), run)
    tags = {"prefect.flow_run_id": run, "prefect.flow_run": str(flow_run.get_name())}
    with (
        _place(root, run, commit, text, values, unseen) as place,
        tracking.open_run(run, values.tracking, tags) as told,
    ):
        folder = place.folder if isinstance(place, Workspace) else place
        environment = stage_environment(place, run)
        with Dvc(folder, environment, values.service.grace_seconds) as dvc:
            how = run_stages(list(dvc_files.graph(folder)), values.service, dvc)
            known, experiment = _saved(place, name, given, dvc)
        notes = _notes(commit, experiment, unseen, told)
        if known != name:
            name = known
            notes.append(f"the same was asked before, and nothing has changed since: see experiment {name}")
        unpushed = send(folder) if push else None
        if unpushed:
            notes.append(f"not pushed to the DVC remote, kept here: {unpushed}")
        told.tags(_identity(folder, how, name, experiment, revision))
        verdict = _verdict(folder, values, environment)
        if verdict is not None:
            told.tags({"promotion": f"{verdict.name}: {verdict.message}"})
        if verdict is not None and verdict.name == "Deferred":
            whose = f" {name}" if experiment else ""
            notes.append(f"the gate has not decided: `rlhf promote{whose}` does it later")
        keys = results.run_keys(folder, list(how))
        patience = 0.0 if told.last_error() else links.WAIT_SECONDS
        pages = links.run_links(values.tracking, keys, tracking.key(run), patience)
        outcome = results.Outcome(name, how, changes, revision, experiment, notes, *_shown(verdict, folder))
        results.show(outcome, folder, pages)
        watch.note(asked, values, data)
    return _end(name, how, experiment, unpushed, verdict)


def run_stages(names: Sequence[str], service: Service, dvc: Dvc) -> dict[str, str]:
    """These stages, in this order; `ran` or `cached` for each."""
    progress: Any = create_progress_artifact(0.0, key=results.PROGRESS_KEY, description=", ".join(names))
    how, unchanged = {}, stages.unchanged(names, dvc)
    for done, name in enumerate(names, start=1):
        # Called, not submitted: a submitted task's thread would train on after a cancellation.
        state: Any = stages.with_care(name, service.care(name))(
            name, dvc, service, name in unchanged, return_state=True
        )
        if not state.is_completed():
            raise _failure(name, state)
        how[name] = "cached" if state.name == "Cached" else "ran"
        description = ", ".join(f"{stage}: {told}" for stage, told in how.items())
        update_progress_artifact(progress, 100.0 * done / len(names), description=description)
    return how


def _failure(name: str, state: State[Any]) -> BaseException:
    """What a stage's task failed of; that it took too long is a failure of the stage."""
    error: BaseException = state.result(raise_on_failure=False)
    if isinstance(error, TimeoutError):
        return stages.StageFailed(f"stage {name} was ended: {state.message}")
    return error


@contextmanager
def _place(
    root: Path, run: str, commit: str | None, text: str, values: Config, unseen: Sequence[str]
) -> Iterator[Workspace | Path]:
    """Where the run works: a workspace, removed at its end however it ends, or the checkout."""
    logger = get_run_logger()
    if commit is not None:
        logger.info("sees commit %s and the data at %s as it is now", commit, values.data.path)
        if unseen:
            logger.warning("does not see the uncommitted changes of %s", ", ".join(unseen))
        place = workspaces.create(root, hooks.workspace_name(run), text, values, commit)
        try:
            yield place
        finally:
            place.remove()
        return
    lock = FileLock(Paths(root).home / "checkout.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            "another flow run works in the checkout; wait for it, or set `where` to workspace"
        ) from None
    try:
        yield root
    finally:
        lock.release()


def stage_environment(place: Workspace | Path, run: str) -> dict[str, str]:
    """This environment, `rlhf` on the path, and the flow run as the parent of all its stages in MLflow."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(PREFECT_OWN)}
    names = {
        "RLHF_PARENT_RUN": tracking.key(run),
        "PREFECT__FLOW_RUN_ID": run,
        STAGE_RUN: run,
    }
    code = place.environment() if isinstance(place, Workspace) else {}
    return {
        **settings.QUIET,
        **own,
        "PATH": processes.environment_path(os.environ),
        "PYTHONUNBUFFERED": "1",
        **names,
        **code,
    }


def _saved(place: Workspace | Path, name: str, given: bool, dvc: Dvc) -> tuple[str, str | None]:
    """The experiment's name and commit: an earlier one's if it is the same, and no name was asked for.

    No commit where nothing differs from the commit below, and of a run in the checkout.
    """
    if not isinstance(place, Workspace):
        return name, None
    if not given and place.like is not None and place.is_like():
        return place.like[1], place.like[0]
    return name, place.save(name, dvc.run) if given or place.differs() else None


def _notes(
    commit: str | None, experiment: str | None, unseen: Sequence[str], told: tracking.Pipeline
) -> list[str]:
    notes = []
    if unseen:
        notes.append(f"this run saw the commit, not the uncommitted changes of {', '.join(unseen)}")
    if commit is not None and experiment is None:
        notes.append("nothing differs from the commit, so there is no experiment of it")
    if reason := told.last_error():
        notes.append(f"MLflow does not have all of this run ({reason}); `rlhf sync` sends it what it lacks")
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
    """Push the workspace's outs to the DVC remote; what is missing there if that cannot be done."""
    state: State[Any] = _push(folder, return_state=True)
    if state.is_completed():
        return None
    error = state.result(raise_on_failure=False)
    outs = ", ".join(out for node in dvc_files.graph(folder).values() for out in node.outs)
    return f"{outs} ({str(error).splitlines()[-1]}); `dvc exp apply` the run and `dvc push` sends them"


def _verdict(folder: Path, values: Config, environment: dict[str, str]) -> State[Any] | None:
    """The state of the promotion; None where there is nothing to promote."""
    if not promotion.is_due(values, folder):
        return None
    bound: Any = promotion.promote.with_options(timeout_seconds=values.service.timeout_seconds)
    state: State[Any] = bound(folder, environment, values, return_state=True)
    if state.is_completed():
        return state
    error = state.result(raise_on_failure=False)
    return Completed(name="Deferred", message=f"the gate could not be asked ({error})")


def _shown(verdict: State[Any] | None, folder: Path) -> tuple[str | None, list[dict[str, str]]]:
    """What the gate said, and its criteria where it has looked at them."""
    if verdict is None:
        return None, []
    rows = promotion.criteria(folder) if verdict.name != "Deferred" else []
    return f"{verdict.name}: {verdict.message}", rows


def _identity(
    folder: Path, how: dict[str, str], name: str, experiment: str | None, revision: str
) -> dict[str, str]:
    """How the pipeline's run in MLflow is found from DVC and git, and back."""
    locked = dvc_files.locked(folder)
    outs = {
        out: locked[out] for node in dvc_files.graph(folder).values() for out in node.outs if out in locked
    }
    return {
        "git.rev": revision,
        **({"dvc.exp": name, "dvc.exp_rev": experiment} if experiment else {}),
        **{f"dvc.how.{stage}": told for stage, told in how.items()},
        **{f"dvc.out.{path}": md5 for path, md5 in outs.items()},
    }


def _end(
    name: str,
    how: dict[str, str],
    experiment: str | None,
    unpushed: str | None,
    verdict: State[Any] | None,
) -> State[Any]:
    ran = [stage for stage, told in how.items() if told == "ran"]
    what = f"ran {', '.join(ran)}" if ran else "nothing had to run"
    kept = f"; experiment {name}" if experiment else ""
    gate = f"{verdict.name}: {verdict.message}; " if verdict is not None else ""
    if unpushed:
        return Completed(name="Unpushed", message=f"{gate}{what}{kept}; not pushed: {unpushed}")
    if verdict is not None:
        return Completed(name=verdict.name, message=f"{gate}{what}{kept}")
    return Completed(message=f"{what}{kept}")


def main() -> int:
    """A run in the working folder; its exit status: 0 done, 2 for what the user can mend, 1 for a fault."""
    try:
        request.settle(Path.cwd(), Request(), None)  # before Prefect starts anything
    except UserError as error:
        print(f"rlhf pipeline: {error}", file=sys.stderr)
        return 2
    for variable, value in settings.QUIET.items():
        os.environ.setdefault(variable, value)
    state: State[Any] = pipeline(where="checkout", return_state=True)
    if state.is_completed():
        return 0
    reason = state.result(raise_on_failure=False)
    return 2 if isinstance(reason, UserError | stages.StageMistaken) else 1


if __name__ == "__main__":
    sys.exit(main())

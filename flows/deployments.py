"""What the Prefect server is told: work pool, concurrency limit, deployments, and what ends lost runs.

Applied by `make up`; applying again changes nothing but what changed here: parameters, schedules and
limits that users gave a deployment stay. Parameters belong to the deployment: those on a schedule are lost
when it is switched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron, Interval, Schedule
from prefect.states import Crashed
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows import hooks, settings
from flows.pipeline import pipeline
from flows.sweep import sweep
from flows.watch import data_watch
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

GPU_SLOTS = 1
SILENCE = timedelta(minutes=5)  # ten heartbeats; a server that restarts is not a lost run
FLOWS = (settings.PIPELINE, settings.SWEEP, settings.WATCH)
OWNER = "project:"  # begins the tag that says whose a deployment is, in a work pool of any type
LOST = "rlhf: a run that is silent has crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")
OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def apply(
    root: Path,
    gpu_slots: int | None,
    pool: str = settings.POOL,
    *,
    makes_pool: bool = True,
    is_shared: bool = False,
) -> None:
    """Bring the server up to date for the project at `root`; `gpu_slots` None: 1, or as it is.

    The deployments of another pool than the service's own have its name behind theirs.

    Args:
        makes_pool: Make a process pool of that name if there is none.
        is_shared: Other projects may be on this server: what is theirs is not written over.

    Raises:
        UserError: if there is no such pool; for names that another project has.
    """
    with get_client(sync_client=True) as client:
        if makes_pool:
            _pool(client, pool)
        place = _place(client, root, pool)
        if is_shared:
            _check_owner(client, place, root)
        _limit(client, gpu_slots)
        _automation(client)
        nightly = Cron("0 2 * * *", slug="nightly", active=False)
        hourly = Interval(timedelta(hours=1), slug="hourly", active=False)
        _deploy(client, place, pipeline, "pipeline", "Run the pipeline, with changes if wanted.", [])
        _deploy(client, place, pipeline, "nightly", "An example: nightly, with the newest data.", [nightly])
        _deploy(client, place, data_watch, "on-data-change", "Look every hour for changed data.", [hourly])
        _deploy(client, place, sweep, "sweep", "Compare settings over seeds.", [])


def _check_owner(client: SyncPrefectClient, place: Place, root: Path) -> None:
    """Raises UserError if these names are those of another project, or of this one in another folder.

    By the folder, where a process pool's deployments tell it; else by their tag, which may be from before
    this project had a git remote.
    """
    name = f"{settings.PIPELINE}/pipeline{place.suffix}"
    try:
        known = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return
    owners = [tag.removeprefix(OWNER) for tag in known.tags if tag.startswith(OWNER)]
    folder = known.job_variables.get("working_dir")
    if folder is not None and "working_dir" in place.variables:
        owner, is_ours = folder, folder == place.variables["working_dir"]
    else:
        owner = owners[0] if owners else ""
        is_ours = not owners or bool({place.owner, str(root.resolve())} & set(owners))
    if is_ours:
        return
    raise UserError(
        f"the deployment {name} of this server is that of the project {owner}: give `--pool NAME`, and this "
        f"one, {place.owner} in {root}, has a work pool and names of its own; if it is the same project, "
        f"moved, `prefect deployment delete {name}` first"
    )


@dataclass(frozen=True)
class Place:
    """Where the runs of a set of deployments go."""

    pool: str
    suffix: str
    owner: str
    """The project, by its address; the deployments have it as a tag."""
    variables: dict[str, Any]
    """Of the job, besides the pool's own."""


def _place(client: SyncPrefectClient, root: Path, pool: str) -> Place:
    try:
        kind = client.read_work_pool(pool).type
    except ObjectNotFound:
        raise UserError(f"there is no work pool {pool!r}; `prefect work-pool create` makes one") from None
    own = {"working_dir": str(root), "command": f"{sys.executable} -m prefect.engine"}
    suffix = "" if pool == settings.POOL else f"-{pool}"
    return Place(pool, suffix, git.address(root), own if kind == "process" else {})


def _pool(client: SyncPrefectClient, name: str) -> None:
    template = ProcessWorker.get_default_base_job_template()
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        return


def _limit(client: SyncPrefectClient, slots: int | None) -> None:
    try:
        client.read_global_concurrency_limit_by_name(settings.SLOTS)
    except ObjectNotFound:
        limit = GlobalConcurrencyLimitCreate(name=settings.SLOTS, limit=slots or GPU_SLOTS)
        client.create_global_concurrency_limit(limit)
        return
    if slots is not None:
        client.upsert_global_concurrency_limit_by_name(settings.SLOTS, slots)


def _automation(client: SyncPrefectClient) -> None:
    """A run of these flows whose heartbeat stops, since its machine or its worker is gone, becomes Crashed.

    By the flow's name, which heartbeats and states both tell: other people's flows on the server are none of
    this one's. What an earlier version made gets this trigger and action; it stays on or off as it is.
    """
    trigger = EventTrigger(
        after={HEARTBEAT},
        expect={HEARTBEAT, *(f"prefect.flow-run.{end}" for end in ENDS)},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        match_related=ResourceSpecification(
            {"prefect.resource.role": ["flow"], "prefect.resource.name": list(FLOWS)}
        ),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=SILENCE,
    )
    action = ChangeFlowRunState(
        name="Crashed", state=StateType.CRASHED, message="its heartbeat stopped", force=False
    )
    wanted = AutomationCore(name=LOST, trigger=trigger, actions=[action])
    known = client.read_automations_by_name(LOST)
    if not known:
        client.create_automation(wanted)
    for made in known:
        kept = made.model_dump(exclude={"id", "owner_resource"})
        asked = kept | wanted.model_dump(include={"trigger", "actions"})
        if asked != kept:  # an update forgets which runs it was waiting for
            client.update_automation(made.id, AutomationCore(**asked))


def _deploy(
    client: SyncPrefectClient,
    place: Place,
    flow: Flow[..., Any],
    name: str,
    description: str,
    schedules: Sequence[Schedule],
) -> None:
    """Make a deployment; of one that is there only what comes from here: users change all else."""
    runs = f"{settings.PIPELINE}/pipeline{place.suffix}"
    made: Any = flow.to_deployment(
        name=f"{name}{place.suffix}",
        description=description,
        parameters={} if flow is pipeline else {"deployment": runs},
        tags=["rlhf", f"{OWNER}{place.owner}"],
        schedules=list(schedules),
        work_pool_name=place.pool,
        job_variables=place.variables,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    try:
        known = client.read_deployment_by_name(f"{flow.name}/{name}{place.suffix}")
    except ObjectNotFound:
        made.apply()
        return
    theirs = [tag for tag in known.tags if not tag.startswith(OWNER) and tag not in made.tags]
    own = DeploymentUpdate(
        description=description,
        parameters=made.parameters | known.parameters,
        tags=[*made.tags, *theirs],
        entrypoint=made.entrypoint,
        work_pool_name=place.pool,
        job_variables=known.job_variables | place.variables,
        parameter_openapi_schema=flow.parameters.model_dump(),
    )
    client.update_deployment(known.id, own)


def crash_lost_runs() -> None:
    """Runs that no worker works on any more, to be called while there is none: they can be retried then.

    What such a run left behind is taken away, as a worker would have done.
    """
    where = WorkPoolFilter(name=WorkPoolFilterName(any_=[settings.POOL]))
    states = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=states, work_pool_filter=where):
            hooks.clean_run(str(run.id))
            lost: State[Any] = Crashed(message="its worker is gone: retry it, and it goes on")
            client.set_flow_run_state(run.id, lost, force=True)

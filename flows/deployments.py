"""What this project registers at a Prefect server: work pool, concurrency limit, deployments, automation.

`rlhf up` applies it. Applying it again updates only what changed here: parameters, schedules and limits that
users gave a deployment stay. Parameters belong to the deployment: Prefect drops those of a schedule when the
schedule is switched on or off.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
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
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron, Interval, Schedule
from prefect.states import Crashed
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows import automations, devices, hooks, settings
from flows.pipeline import pipeline
from flows.slots import limit_of
from flows.sweep import sweep
from flows.watch import data_watch
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

OWNER = "project:"  # begins the tag with the owner of a deployment, in a work pool of any type
OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def apply(
    root: Path,
    gpu_slots: int | None,
    pool: str = settings.POOL,
    *,
    makes_pool: bool = True,
    is_shared: bool = False,
) -> None:
    """Bring the server up to date for the project at `root`. `gpu_slots` None: unchanged, at first as
    many as this machine has GPUs, or 1.

    Deployments for another pool than the service's own end with the name of that pool.

    Args:
        makes_pool: Make a process pool of that name if there is none.
        is_shared: Other projects may use this server; their deployments are not overwritten.

    Raises:
        UserError: if the pool does not exist, or another project has deployments of these names.
    """
    with get_client(sync_client=True) as client:
        if makes_pool:
            _pool(client, pool)
        place = _place(client, root, pool)
        with suppress(ObjectAlreadyExists):  # priority 1 moves the pool's default queue to 2
            client.create_work_queue(settings.URGENT, work_pool_name=pool, priority=1)
        if is_shared:
            _check_owner(client, place, root)
        _limit(client, gpu_slots, is_shared=is_shared)
        automations.apply(client)
        _deploy_all(client, place)


def _deploy_all(client: SyncPrefectClient, place: Place) -> None:
    nightly = Cron("0 2 * * *", slug="nightly", active=False)
    hourly = Interval(timedelta(hours=1), slug="hourly", active=False)
    for flow, name, description, schedules in (
        (pipeline, "pipeline", "Run the pipeline, with changes of parameters if you give them.", []),
        (pipeline, settings.URGENT, "Run the pipeline before the runs of the other deployments.", []),
        (pipeline, "nightly", "An example of a schedule: every night, with the newest data.", [nightly]),
        (data_watch, "on-data-change", "Check every hour whether the data changed.", [hourly]),
        (sweep, "sweep", "Compare settings over seeds.", []),
    ):
        _deploy(client, place, flow, name, description, schedules)


def _check_owner(client: SyncPrefectClient, place: Place, root: Path) -> None:
    """Raises UserError if another project, or this one in another folder, has deployments of these names.

    The deployments of a process pool have the folder; others have a tag, which may be older than the git
    remote of this project.
    """
    name = f"{settings.PIPELINE}/pipeline{place.suffix}"
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return
    owners = [tag.removeprefix(OWNER) for tag in existing.tags if tag.startswith(OWNER)]
    folder = existing.job_variables.get("working_dir")
    if folder is not None and "working_dir" in place.variables:
        owner, is_ours = folder, folder == place.variables["working_dir"]
    else:
        owner = owners[0] if owners else ""
        is_ours = not owners or bool({place.owner, str(root.resolve())} & set(owners))
    if is_ours:
        return
    raise UserError(
        f"the deployment {name} of this server belongs to the project {owner}: give `--pool NAME`, so that "
        f"this project, {place.owner} in {root}, has its own work pool and names. If the project has moved, "
        f"run `prefect deployment delete {name}` first"
    )


@dataclass(frozen=True)
class Place:
    """Where the runs of a set of deployments go."""

    pool: str
    suffix: str
    owner: str
    """The address of the project, which the deployments have as a tag."""
    variables: dict[str, Any]
    """Variables of the job that replace those of the pool."""


def _place(client: SyncPrefectClient, root: Path, pool: str) -> Place:
    try:
        kind = client.read_work_pool(pool).type
    except ObjectNotFound:
        raise UserError(f"work pool {pool!r} does not exist; `prefect work-pool create` makes one") from None
    own = {"working_dir": str(root), "command": f"{sys.executable} -m prefect.engine"}
    suffix = "" if pool == settings.POOL else f"-{pool}"
    return Place(pool, suffix, git.address(root), own if kind == "process" else {})


def _pool(client: SyncPrefectClient, name: str) -> None:
    template = ProcessWorker.get_default_base_job_template()
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def _limit(client: SyncPrefectClient, slots: int | None, *, is_shared: bool) -> None:
    """The limit `gpu`, at first one slot for each GPU of this machine, or one. Users may change it.

    Where this machine is the only one, more slots than GPUs let runs share a GPU.
    """
    gpus = devices.visible()
    size = _size(client, settings.SLOTS, len(gpus) or 1, slots)
    for gpu in [] if is_shared else gpus:
        share = math.ceil(size / len(gpus))
        _size(client, limit_of(gpu), share, None if slots is None else share)


def _size(client: SyncPrefectClient, name: str, first: int, given: int | None) -> int:
    """Make the limit with its first size, or give an existing one the given size; returns its size."""
    try:
        found = client.read_global_concurrency_limit_by_name(name).limit
    except ObjectNotFound:
        size = given or first
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=size))
        return size
    if given is not None:
        client.upsert_global_concurrency_limit_by_name(name, given)
    return given or found


def _deploy(
    client: SyncPrefectClient,
    place: Place,
    flow: Flow[..., Any],
    name: str,
    description: str,
    schedules: Sequence[Schedule],
) -> None:
    """Make a deployment, or update only those fields of an existing one that users do not change."""
    runs = f"{settings.PIPELINE}/pipeline{place.suffix}"
    made: Any = flow.to_deployment(
        name=f"{name}{place.suffix}",
        description=description,
        parameters={} if flow is pipeline else {"deployment": runs},
        tags=["rlhf", f"{OWNER}{place.owner}"],
        schedules=list(schedules),
        work_pool_name=place.pool,
        work_queue_name=settings.URGENT if name == settings.URGENT else None,
        job_variables=place.variables,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    try:
        existing = client.read_deployment_by_name(f"{flow.name}/{name}{place.suffix}")
    except ObjectNotFound:
        own = DeploymentUpdate(parameter_openapi_schema=form(flow))
        client.update_deployment(made.apply(), own)
        return
    is_there = existing.work_pool_name == place.pool  # without its name, an update would change the queue
    theirs = [tag for tag in existing.tags if not tag.startswith(OWNER) and tag not in made.tags]
    own = DeploymentUpdate(
        description=description,
        # A null is of an earlier form, where it stood for the default.
        parameters=made.parameters | {k: v for k, v in existing.parameters.items() if v is not None},
        tags=[*made.tags, *theirs],
        entrypoint=made.entrypoint,
        work_pool_name=place.pool,
        work_queue_name=(existing if is_there else made).work_queue_name,
        job_variables=existing.job_variables | place.variables,
        parameter_openapi_schema=form(flow),
    )
    client.update_deployment(existing.id, own)


def form(flow: Flow[..., Any]) -> dict[str, Any]:
    """The fields of the run form. One that may be None is a plain field without a default.

    Prefect's server takes that as well as None if it is left empty. As the flow describes such a field, the
    form has an editor for it only after a click on its type.
    """
    schema = flow.parameters.model_dump()
    for field in schema["properties"].values():
        kinds = [kind for kind in field.get("anyOf", []) if kind["type"] != "null"]
        if kinds:
            (kind,) = kinds
            del field["anyOf"], field["default"]
            field.update(kind)
    return schema


def crash_lost_runs() -> None:
    """Mark runs as Crashed that no worker runs any more, so that they can be retried.

    Call it while there is no worker. It also cleans up after such a run, as a worker would have done.
    """
    where = WorkPoolFilter(name=WorkPoolFilterName(any_=[settings.POOL]))
    states = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=states, work_pool_filter=where):
            lost: State[Any] = Crashed(message="its worker is gone; retry the run to resume it")
            hooks.clean_run(run.id, lost)
            client.set_flow_run_state(run.id, lost, force=True)

"""What this project registers at a Prefect server: work pool, concurrency limit, deployments, automation.

`rlhf up` applies it. Applying it again updates only what changed here: parameters, schedules and limits that
users gave a deployment stay. Parameters belong to the deployment: Prefect drops those of a schedule when the
schedule is switched on or off.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron, Interval
from prefect.states import Crashed
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows import automations, devices, form, run_folder, settings
from flows.pipeline import pipeline
from flows.slots import find_limit
from flows.sweep import sweep
from flows.watch import data_watch
from rlhf_tasks import config, console, presets
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

OWNER = "project:"  # begins the tag with the owner of a deployment, in a work pool of any type
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}


def apply(
    root: Path,
    gpu_slots: int | None,
    pool: str = settings.POOL,
    *,
    makes_pool: bool = True,
    is_shared: bool = False,
) -> None:
    """Bring the server up to date for the project at `root`.

    Deployments for another pool than the service's own end with the name of that pool.

    Args:
        gpu_slots: The size of the limit `gpu`. None keeps the limit; a new one gets one slot per GPU, at
            least 1.
        makes_pool: Make a process pool of that name if there is none.
        is_shared: Other projects may use this server; their deployments are not overwritten.

    Raises UserError if the pool does not exist, or another project has deployments of these names.
    """
    zones = os.environ.get("TZ"), os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    zone = next((one for one in zones if one in available_timezones()), "UTC")
    nightly = Cron("0 2 * * *", timezone=zone, slug="nightly", active=False)
    hourly = Interval(timedelta(hours=1), slug="hourly", active=False)
    with get_client(sync_client=True) as client:
        if makes_pool:
            template = ProcessWorker.get_default_base_job_template()
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            raise UserError(
                f"work pool {pool!r} does not exist; `prefect work-pool create` makes one"
            ) from None
        command = shlex.join([sys.executable, "-P", "-m", "prefect.engine"])
        own = {"working_dir": str(root), "command": command}
        variables: dict[str, Any] = own if kind == "process" else {}
        light, steps = dict[str, Any](), None
        if kind == "kubernetes":
            # a sweep only waits, and a watch hashes; without a step Prefect runs a flow in a temporary copy
            light = {"nodes": 1, "gpus": 0, "cpu": "1", "memory": "4Gi"}
            steps = [{"prefect.deployments.steps.set_working_directory": {"directory": "/project"}}]
        if is_shared:
            _check_owner(client, root, pool, variables)
        if gpu_slots is None and find_limit(client, settings.SLOTS) is None:
            gpu_slots = len(devices.visible()) or 1
        if gpu_slots is not None:
            client.upsert_global_concurrency_limit_by_name(settings.SLOTS, gpu_slots)
        automations.apply(client)
        params = Config()  # fall back to defaults; the run itself reports an invalid params.yaml
        with suppress(UserError):
            params = config.load(root / "params.yaml")
        values, seconds = config.in_force(params), preset_seconds(client, pool)
        for flow, name, description, schedules in (
            (pipeline, "pipeline", "Run the pipeline, with changes of parameters if you give them.", []),
            (
                pipeline,
                "scheduled",
                "An example of a schedule: every night, with the newest data.",
                [nightly],
            ),
            (data_watch, "watch", "Check every hour whether the data changed.", [hourly]),
            (sweep, "sweep", "Compare settings over seeds.", []),
        ):
            runs = f"{settings.PIPELINE}/{name_in(pool, 'pipeline')}"
            deployment: Any = flow.to_deployment(
                name=name_in(pool, name),
                description=description,
                parameters={} if flow is pipeline else {"deployment": runs},
                tags=["rlhf", f"{OWNER}{git.address(root)}"],
                schedules=schedules,
                work_pool_name=pool,
                job_variables=variables if flow is pipeline else {**variables, **light},
                entrypoint_type=EntrypointType.MODULE_PATH,
            )
            _register(client, flow, deployment, build_form(flow, values, seconds), steps)


def name_in(pool: str, name: str) -> str:
    return name if pool == settings.POOL else f"{name}-{pool}"


def _check_owner(client: SyncPrefectClient, root: Path, pool: str, variables: dict[str, str]) -> None:
    """Raises UserError if another project, or this one in another folder, has deployments of these names.

    The deployments of a process pool have the folder; others have a tag, which may be older than the git
    remote of this project.
    """
    name = f"{settings.PIPELINE}/{name_in(pool, 'pipeline')}"
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return
    owners = {tag.removeprefix(OWNER) for tag in existing.tags if tag.startswith(OWNER)}
    ours = {git.address(root), str(root.resolve())}
    folder = existing.job_variables.get("working_dir")
    if variables and folder not in (None, variables["working_dir"]):
        owners, ours = {folder}, {variables["working_dir"]}
    if owners and not owners & ours:
        raise UserError(
            f"the deployment {name} of this server belongs to the project {', '.join(owners)}: give "
            f"`--pool NAME`, so that this project, {git.address(root)} in {root}, has its own work pool and "
            f"names. If the project has moved, run `prefect deployment delete {name}` first"
        )


def _register(
    client: SyncPrefectClient,
    flow: Flow[..., Any],
    made: Any,
    schema: dict[str, Any],
    pull_steps: list[dict[str, Any]] | None,
) -> None:
    """Make a deployment, or update only those fields of an existing one that users do not change."""
    try:
        existing = client.read_deployment_by_name(f"{flow.name}/{made.name}")
    except ObjectNotFound:
        update = DeploymentUpdate(parameter_openapi_schema=schema, pull_steps=pull_steps)
        client.update_deployment(made.apply(), update)
        return
    is_there = existing.work_pool_name == made.work_pool_name
    theirs = [tag for tag in existing.tags if not tag.startswith(OWNER) and tag not in made.tags]
    update = DeploymentUpdate(
        description=made.description,
        parameters=made.parameters | existing.parameters,
        tags=[*made.tags, *theirs],
        entrypoint=made.entrypoint,
        work_pool_name=made.work_pool_name,
        work_queue_name=existing.work_queue_name if is_there else None,  # without it, an update changes it
        job_variables=existing.job_variables | made.job_variables,
        parameter_openapi_schema=schema,
        pull_steps=pull_steps,
    )
    client.update_deployment(existing.id, update)


def build_form(
    flow: Flow[..., Any], values: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The fields of the run form; the server refuses any others. Texts name values, ranges and presets.

    A field that may be None is a plain one without a default: Prefect's server takes that as well as None
    if it is left empty. As the flow describes such a field, the form has an editor for it only after a click
    on its type.

    Args:
        values: Those of params.yaml, by dotted key.
        seconds: How long a run of each preset took.
    """
    schema = flow.parameters.model_dump()
    schema["additionalProperties"] = False
    fields = schema["properties"]
    common = schema.get("definitions", {}).get("Common", {}).get("properties", {})
    for field in [*fields.values(), *common.values()]:
        if "$ref" in field or "anyOf" in field:
            field.pop("default")
        for kind in field.pop("anyOf", []):
            field.update(kind if kind["type"] != "null" else {})
    for name, field in common.items():
        bounds = " and ".join(f"{sign} {field[key]:,}" for key, sign in BOUNDS.items() if key in field)
        default = config.in_yaml(values[form.COMMON[name]])
        field["description"] += f" Default: {default}, from params.yaml. Range: {bounds}."
    if "preset" in fields:
        took = {name: f" ({console.duration(most)} here)" for name, most in seconds.items()}
        lines = [f" • {name}: {presets.summary(name)}{took.get(name, '')}" for name in presets.names()]
        fields["preset"]["description"] += "".join(lines)
    return schema


def preset_seconds(client: SyncPrefectClient, pool: str) -> dict[str, float]:
    """Longest run of each preset without other changes, in seconds."""
    runs = client.read_flow_runs(
        flow_filter=FlowFilter.model_validate({"name": {"any_": [settings.PIPELINE]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["COMPLETED"]}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
        sort=FlowRunSort.END_TIME_DESC,
    )
    seconds = dict[str, float]()
    for run in runs:
        given, took = run.parameters, run.total_run_time.total_seconds()
        if not given.get("overrides") and not given.get("common"):
            name = given.get("preset", form.DEFAULT)
            seconds[name] = max(seconds.get(name, 0.0), took)
    return seconds


def crash_lost_runs() -> None:
    """Mark runs as Crashed that no worker runs any more, so that they can be retried.

    Call it while there is no worker. It also cleans up after such a run, as a worker would have done.
    """
    where = WorkPoolFilter.model_validate({"name": {"any_": [settings.POOL]}})
    is_open = FlowRunFilter.model_validate({"state": {"type": {"any_": [*settings.OPEN]}}})
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=is_open, work_pool_filter=where):
            lost: State[Any] = Crashed(message="its worker is gone; retry the run to resume it")
            run_folder.clean_run(run.id, lost)
            client.set_flow_run_state(run.id, lost, force=True)

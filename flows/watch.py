"""`rlhf-data-watch`: runs the pipeline when, and only when, the data changed since the last completed run.

The data is what `data.path` holds in the main checkout (the md5 of its files, links followed as a run
follows them) and the pinned revisions of `data.hub`. Both are looked at as the run would see them:
parameters of its commit with the deployment's changes, data of now. The last completed run is the last
one that was asked for the same: runs of other presets, seeds or overrides are other models' business.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.variables import Variable

from flows import request, settings
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import hashing, workspace_inputs

TRIES = 3  # runs for one change of the data


def fingerprint(root: Path, values: Config) -> str:
    """Of the content that `prepare` would read: changes exactly when that does."""
    path = root / values.data.path
    hub = values.data.hub.model_dump(mode="json") if values.data.hub is not None else None
    return hashing.json_sha256({"path": _content(path), "hub": hub})


def _content(path: Path) -> Any:
    """What lies there: a file's md5, the md5 of each file of a folder, or None."""
    if not path.is_dir():
        return hashing.dvc_md5(path) if path.exists() else None
    files = (file for file in workspace_inputs.files(path) if file.is_file())
    return sorted((file.relative_to(path).as_posix(), hashing.dvc_md5(file)) for file in files)


def variable(asked: Request, values: Config) -> str:
    """The Prefect variable that holds the fingerprint of the last completed run of this request.

    `tracking.experiment` tells projects of one server apart.
    """
    place = [values.tracking.experiment, values.data.source, values.data.path]
    told = hashing.json_sha256([*place, asked.preset, asked.seed, asked.overrides or {}])
    return f"rlhf_data_{told[:12]}"


def note(asked: Request, values: Config, data: str) -> None:
    """A run came to its end on data of this fingerprint."""
    last = {"data": data, "flow_run": str(flow_run.get_id())}
    Variable.set(variable(asked, values), last, overwrite=True)


@flow(
    name=settings.WATCH,
    description="Run the pipeline if the data at data.path, or data.hub's revision, changed since the last "
    "completed run.",
    persist_result=False,
)
def data_watch(
    preset: request.PresetName | None = None, deployment: str = f"{settings.PIPELINE}/pipeline"
) -> State[Any]:
    """Look once. A run of a change that failed is run again at the next look, a few times.

    Args:
        preset: Values written over those of params.yaml, here and in the run; by default the deployment's.
        deployment: What a change runs, with its own parameters.
    """
    try:
        return _look({"preset": preset} if preset else {}, deployment)
    except UserError as error:
        return request.refused(error)


def _look(parameters: dict[str, Any], deployment: str) -> State[Any]:
    """Raises UserError if what the deployment would run cannot be."""
    root = Path.cwd()
    told = parameters_of(deployment) | parameters
    asked = Request(told.get("preset"), told.get("seed"), told.get("overrides"))
    commit = request.commit_of(root, told.get("where", "workspace"), told.get("revision"), told.get("name"))
    _, values, _ = request.settle(root, asked, commit)
    now, kept = fingerprint(root, values), variable(asked, values)
    last: Any = Variable.get(kept, {})
    before = last.get("data")
    get_run_logger().info("data %s: %s, at the last completed run %s", values.data.path, now, before)
    if now == before:
        return Completed(message="the data is that of the last completed run")
    return ask_for_run(deployment, parameters, f"{kept}-{now}-after-{last.get('flow_run')}")


def parameters_of(deployment: str) -> dict[str, Any]:
    """What a deployment gives its runs.

    Raises:
        UserError: if there is none of this name, or this is no name of one.
    """
    if not re.fullmatch(r"[^/]+/[^/]+", deployment):
        raise UserError(
            f"deployment={deployment!r}: give FLOW/DEPLOYMENT, such as {settings.PIPELINE}/pipeline; "
            "`prefect deployment ls` lists them"
        )
    with get_client(sync_client=True) as client:
        try:
            return dict(client.read_deployment_by_name(deployment).parameters)
        except ObjectNotFound:
            raise UserError(
                f"deployment={deployment!r}: there is none of this name; `prefect deployment ls` lists them"
            ) from None


def ask_for_run(deployment: str, parameters: dict[str, Any], change: str) -> State[Any]:
    """One run for one change, however often it is looked at; another one only after one that failed.

    To cancel it is to decide against it: that is told at each look, and nothing is run.

    Prefect makes one run per key and answers with it ever after: no other record of the tries is needed.
    """
    failed: list[str] = []
    for number in range(1, TRIES + 1):
        run: Any = run_deployment(
            deployment,
            parameters=parameters,
            timeout=0,
            as_subflow=False,
            idempotency_key=f"{change}-try-{number}",
        )
        if run.state is not None and run.state.type in (StateType.CANCELLED, StateType.CANCELLING):
            given = "".join(f" --param {name}={value}" for name, value in parameters.items())
            return Failed(
                message=f"the data changed, and its run {run.name} was cancelled, so it is not run again by "
                f"itself: `prefect deployment run {deployment}{given}` does it; once that completes, or the "
                "data changes again, this goes on"
            )
        if run.state is None or run.state.type not in (StateType.FAILED, StateType.CRASHED):
            again = f", after {', '.join(failed)} failed" if failed else ""
            return Completed(message=f"the data changed: its run is {run.name}{again}")
        failed.append(run.name)
    return Failed(
        message=f"the data changed, and its runs {', '.join(failed)} failed; once one is retried by hand and "
        "completes, or the data changes again, this goes on"
    )

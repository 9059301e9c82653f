"""`rlhf-data-watch`: run the pipeline when, and only when, the data changed since the last completed run.

The data is the content of `data.path` in the main checkout (the md5 of its files, and of those that links
lead to) and the pinned revisions of `data.hub`. The fingerprint uses the parameters that the run would have:
those of its commit, with the deployment's changes. The last completed run is the last one of the same
request: runs with another preset, seed or overrides train other models.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.utilities.urls import url_for
from prefect.variables import Variable

from flows import automations, form, settings
from rlhf_tasks.config import Config
from rlhf_tasks.config.schema import Data, MixedSet
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import git, hashing, workspaces

TRIES = 3  # runs for one change of the data


def fingerprint(root: Path, values: Config) -> str:
    """A hash of the content that `prepare` would read; it changes exactly when that content does."""
    own = _content_of(root, values.data)
    mixed = [_content_of(root, one) for one in values.data.mix or ()]
    return hashing.json_sha256({**own, "mix": mixed} if mixed else own)


def _content_of(root: Path, given: Data | MixedSet) -> dict[str, Any]:
    path = None if given.path is None else _content(root / given.path)
    return {"path": path, "hub": None if given.hub is None else given.hub.model_dump(mode="json")}


def _content(path: Path) -> Any:
    """The hashes of a file, or of all files below a folder; None if there is none."""
    if not path.is_dir():
        return hashing.dvc_md5(path) if path.is_file() else None
    files = [file for file in workspaces.data_files(path) if file.is_file()]
    return sorted((file.relative_to(path).as_posix(), hashing.dvc_md5(file)) for file in files)


def variable(root: Path, request: Request, values: Config) -> str:
    """The Prefect variable that holds the fingerprint of the last completed run of this request.

    The project's address distinguishes the projects of one server, as in the owners of deployments.
    """
    project = [git.address(root), values.tracking.experiment, values.data.source, values.data.path]
    changes = [request.preset, request.seed, request.overrides or {}]
    return f"rlhf_data_{hashing.json_sha256([*project, *changes])[:12]}"


def note(root: Path, request: Request, values: Config, data: str) -> None:
    """Record that a run completed on data with this fingerprint."""
    last = {"data": data, "flow_run": str(flow_run.get_id())}
    Variable.set(variable(root, request, values), last, overwrite=True)


@flow(
    name=settings.WATCH,
    description="Run the pipeline if the data at data.path or of data.mix, or a hub set's revision, changed "
    "since the last completed run.",
    persist_result=False,
    on_completion=[automations.emit_end],
    on_failure=[automations.emit_end],
    on_cancellation=[automations.emit_end],
    on_crashed=[automations.emit_end],
)
def data_watch(
    preset: form.PresetName = form.DEFAULT, deployment: str = f"{settings.PIPELINE}/pipeline"
) -> State[Any]:
    """Check the data once. A failed run of a change is repeated at the next check, up to three times in all.

    Args:
        preset: Changes of params.yaml, for the check and the run. default: the preset of the deployment.
        deployment: The deployment that a change runs, with its own parameters.
    """
    parameters = {} if preset == form.DEFAULT else {"preset": preset}
    try:
        given = {"where": "workspace", **parameters_of(deployment), **parameters}
        fields = (given.get(name) for name in ("preset", "seed", "common", "overrides"))
        request = form.build_request(*fields)
        commit = form.commit_of(Path.cwd(), given["where"], given.get("revision"), given.get("name"))
        _, values, _ = form.resolve(Path.cwd(), request, commit)
    except UserError as error:
        return form.fail_with(error)
    now, key = fingerprint(Path.cwd(), values), variable(Path.cwd(), request, values)
    last: Any = Variable.get(key, {})
    before = last.get("data")
    get_run_logger().info("data (%s): %s; at the last completed run: %s", values.data.in_words, now, before)
    if now == before:
        return Completed(message="the data is that of the last completed run")
    return start_run(deployment, parameters, f"{key}-{now}-after-{last.get('flow_run')}")


def parameters_of(deployment: str) -> dict[str, Any]:
    """The parameters that a deployment gives its runs.

    Raises UserError if the name is malformed, or no deployment has it.
    """
    problem = f"give FLOW/DEPLOYMENT, such as {settings.PIPELINE}/pipeline"
    if re.fullmatch(r"[^/]+/[^/]+", deployment):
        problem = "no deployment has this name"
        with suppress(ObjectNotFound), get_client(sync_client=True) as client:
            return dict(client.read_deployment_by_name(deployment).parameters)
    raise UserError(f"deployment={deployment!r}: {problem}; `prefect deployment ls` lists the deployments")


def start_run(deployment: str, parameters: dict[str, Any], change: str) -> State[Any]:
    """One run per change, however often the data is checked; another one only after a failed one.

    A run that was cancelled is not repeated; each check reports it as failed. Prefect makes one run per
    idempotency key, and later returns the same run: no other record is needed.
    """
    failed: list[str] = []
    again = "checks succeed again after it completes, or after the next change of the data"
    for number in range(1, TRIES + 1):
        key = f"{change}-try-{number}"
        run: Any = run_deployment(
            deployment, parameters=parameters, timeout=0, as_subflow=False, idempotency_key=key
        )
        state, name = run.state, str(run.name)
        is_over = state is not None and (state.is_final() or state.is_cancelling())
        if not is_over or state.is_completed():
            after = f", after {', '.join(failed)} failed" if failed else ""
            page = url_for("flow-run", run.id)  # the run gives itself another name
            return Completed(message=f"the data changed: its run is {name}{after}, {page or run.id}")
        resumes = state.name in (settings.STOPPED, settings.OUT_OF_TIME)
        if (state.is_cancelling() or state.is_cancelled()) and not resumes:
            given = "".join(f" --param {key}={value}" for key, value in parameters.items())
            return Failed(
                message=f"the data changed, but its run {name} was cancelled and is not repeated. Start one "
                f"with `prefect deployment run {deployment}{given}`; {again}"
            )
        failed.append(name)
    return Failed(
        message=f"the data changed, and its runs {', '.join(failed)} failed. Retry one in Prefect; {again}"
    )

"""`rlhf-data-watch`: runs the pipeline when, and only when, the data changed since the last completed run.

The data is what `data.path` holds in the main checkout (its DVC hash) and the pinned revisions of
`data.hub`. Both are looked at as an isolated run would see them: committed parameters, data of now.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.variables import Variable

from flows import request, settings
from rlhf_tasks import lineage, workspace
from rlhf_tasks.config import Config, UserError
from rlhf_tasks.workspace import Request

TRIES = 3  # runs for one change of the data


def fingerprint(root: Path, values: Config) -> str:
    """Of the content that `prepare` would read: changes exactly when that does."""
    path = root / values.data.path
    hub = values.data.hub.model_dump(mode="json") if values.data.hub is not None else None
    tree = {"path": lineage.digest(path) if path.exists() else None, "hub": hub}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def variable(values: Config) -> str:
    """The Prefect variable that holds the fingerprint of the last completed run on this kind of data."""
    where = json.dumps([values.data.source, values.data.path])
    return f"rlhf_data_{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def note(values: Config, data: str) -> None:
    """A run came to its end on data of this fingerprint."""
    last = {"data": data, "flow_run": str(flow_run.get_id())}
    Variable.set(variable(values), last, overwrite=True)


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
        preset: Values written over those of params.yaml, here and in the run.
        deployment: What a change runs.
    """
    root = Path.cwd()
    try:
        _, values, _ = request.settle(root, Request(preset), workspace.resolve(root, None))
    except UserError as error:
        get_run_logger().error("%s", error)
        return Failed(message=str(error))
    now = fingerprint(root, values)
    last: Any = Variable.get(variable(values), {})
    before = last.get("data")
    get_run_logger().info("data %s: %s, at the last completed run %s", values.data.path, now, before)
    if now == before:
        return Completed(message="the data is that of the last completed run")
    return ask_for_run(deployment, preset, f"{now}-after-{last.get('flow_run')}")


def ask_for_run(deployment: str, preset: str | None, change: str) -> State[Any]:
    """One run for one change, however often it is looked at; another one only after one that failed.

    To cancel it is to decide against it: that is told at each look, and nothing is run.

    Prefect makes one run per key and answers with it ever after: no other record of the tries is needed.
    """
    failed: list[str] = []
    for number in range(1, TRIES + 1):
        run: Any = run_deployment(
            deployment,
            parameters={"preset": preset},
            timeout=0,
            as_subflow=False,
            idempotency_key=f"{change}-try-{number}",
        )
        if run.state is not None and run.state.type in (StateType.CANCELLED, StateType.CANCELLING):
            by_hand = f"prefect deployment run {deployment}" + (f" --param preset={preset}" if preset else "")
            return Failed(
                message=f"the data changed, and its run {run.name} was cancelled, so it is not run again by "
                f"itself: `{by_hand}` does it; once that completes, or the data changes again, this goes on"
            )
        if run.state is None or run.state.type not in (StateType.FAILED, StateType.CRASHED):
            again = f", after {', '.join(failed)} failed" if failed else ""
            return Completed(message=f"the data changed: its run is {run.name}{again}")
        failed.append(run.name)
    return Failed(
        message=f"the data changed, and its runs {', '.join(failed)} failed; once one is retried by hand and "
        "completes, or the data changes again, this goes on"
    )

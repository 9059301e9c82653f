"""Who runs a stage, where, and as part of which pipeline. No torch or MLflow here."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks.config import Stage, StageView, Tracking
from rlhf_tasks.config.types import store_uri
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git, lineage, processes
from rlhf_tasks.project.paths import Paths

PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers"),
    *("mlflow", "dvc", "prefect"),
)
GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # a cluster's shell may have some
STAGE_RUN = "RLHF_STAGE_RUN"  # the flow run, in the environment of every process that its stages start
RUN_NAME = "RLHF_RUN_NAME"  # display name of a run of the pipeline; a flow's is that of its experiment
EXPERIMENT_NAME = "DVC_EXP_NAME"  # of the run's experiment; `dvc exp run` sets it too
MLFLOW_URL = "RLHF_MLFLOW_URL"  # the address of MLflow's pages, as a browser sees it
HTTP_BOUNDS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}  # MLflow's defaults block for minutes


def is_main_rank() -> bool:
    """True in the process that logs and saves, by the launcher's variables: torch is not loaded yet."""
    return not is_worker() or os.environ["RANK"] == "0"


def is_worker() -> bool:
    """True in a process that `accelerate launch` started as one of a group: it has all of GROUP."""
    return all(os.environ.get(name) for name in GROUP)


def header(paths: Paths, stage: Stage, view: StageView, key: str) -> dict[str, Any]:
    """Everything known about a run at its start, as the first line of its record."""
    process = psutil.Process()
    launch = {f"launch.{name}": value for name, value in view.launch.model_dump(mode="json").items()}
    return {
        "key": key,
        "stage": stage,
        "uri": uri(view.tracking),
        "experiment": view.tracking.experiment,
        "process": processes.name_of(process),
        "parent": parent(process, key),
        "parameters": {**view.declared, **launch},
        "inputs": lineage.fingerprint(paths, stage).data(),
        "tags": {
            "dvc.stage": stage,
            "rlhf.run": key,
            "git.rev": git.commit(paths.root) or "none",
            "git.dirty": str(git.is_dirty(paths.root)).lower(),
            "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
        },
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def uri(settings: Tracking) -> str | None:
    """MLflow's store by params.yaml, else by the environment; None is the store under `.rlhf/`.

    Raises UserError if the environment names a store by a relative path.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI") or None
    if settings.uri or given is None:
        return settings.uri
    try:
        return store_uri(given)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: {error}") from None


def parent(process: psutil.Process, key: str) -> dict[str, str]:
    """The pipeline's run: its `key` (tag `rlhf.pipeline`), its `owner`, and tags.

    A flow names it (`RLHF_PARENT_RUN`), and tags it itself with the experiment that it saved. The stages of
    one `dvc` process share a run, which is tagged with the experiment that `dvc exp run` saves at its end. A
    stage that is run alone has a pipeline of its own.
    """
    flow_run, experiment = (os.environ.get(name) for name in ("PREFECT__FLOW_RUN_ID", EXPERIMENT_NAME))
    known = {"prefect.flow_run_id": flow_run} if flow_run else {}
    known |= {"name": name} if (name := run_name()) else {}
    if given := os.environ.get("RLHF_PARENT_RUN"):
        return {"key": given, "owner": "flow", **known}
    for ancestor in process.parents():
        if _is_dvc(ancestor):
            saved = {"dvc.exp": experiment} if experiment else {}
            return {"key": f"dvc-{processes.name_of(ancestor)}", "owner": "dvc", **saved, **known}
    return {"key": f"alone-{key}", "owner": "stage", **known}


def run_name() -> str:
    """The name of the run of the pipeline that this process belongs to; "" if nobody has given one."""
    return os.environ.get(RUN_NAME) or os.environ.get(EXPERIMENT_NAME) or ""


def _is_dvc(process: psutil.Process) -> bool:
    """Whether a process is DVC and runs stages, as a program of its own or by `python -m dvc`."""
    try:
        words = {Path(word).name for word in process.cmdline()}
    except psutil.Error:
        return False
    return bool(words & {"dvc", "dvc.exe"} and words & {"repro", "exp"})


def device() -> str:
    """What the stage computed on; a GPU is named only if the stage has loaded torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu ({os.cpu_count()} cores, {platform.machine()})"


def bound_requests() -> None:
    """Let requests to a server that does not answer fail within seconds; variables that are set stay."""
    for name, value in HTTP_BOUNDS.items():
        os.environ.setdefault(name, value)

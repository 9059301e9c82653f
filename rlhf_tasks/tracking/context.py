"""Who runs a stage, where, and as part of which pipeline. No torch here, nor MLflow."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks.config import STAGES, Stage, StageView, Tracking
from rlhf_tasks.config.types import store_uri
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git, lineage
from rlhf_tasks.project.paths import Paths

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "mlflow",
    "dvc",
    "prefect",
)
SHARED = "shared"  # `courier` in a spool's first line: its parent's courier is to deliver it
STAGE_RUN = "RLHF_STAGE_RUN"  # the flow run, in the environment of all that its stages start
HTTP_BOUNDS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
}  # MLflow's own would block for minutes, and lose traces at the courier's end


def is_main_rank() -> bool:
    """True in the process that logs and saves; by the launcher's variables, before torch is there."""
    return os.environ.get("RANK", "0") == "0"


def header(stage: Stage, view: StageView, key: str) -> dict[str, Any]:
    """All that is known of a run at its start, as the spool's first line."""
    process = psutil.Process()
    return {
        "key": key,
        "stage": stage,
        "last": stage == STAGES[-1],
        "home": str(Paths().home),
        "uri": uri(view.tracking),
        "experiment": view.tracking.experiment,
        "process": process_name(process),
        "parent": parent(process, key),
        "courier": SHARED,
        "parameters": {**view.declared}
        | {f"launch.{k}": v for k, v in view.launch.model_dump(mode="json").items()},
        "inputs": dict(lineage.input_hashes(Paths(), stage)),
        "tags": {"dvc.stage": stage, "dvc.how": "ran", "rlhf.run": key, **_git_tags(), **_environment_tags()},
    }


def uri(settings: Tracking) -> str | None:
    """Where MLflow's store is, by params.yaml, else by the environment; None: under `.rlhf/`.

    Raises:
        UserError: if the environment names one by a relative path.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI") or None
    if settings.uri or given is None:
        return settings.uri
    try:
        return store_uri(given)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: {error}") from None


def parent(process: psutil.Process, key: str) -> dict[str, str]:
    """The pipeline's run: `id` if MLflow knows it already, else `key` and the `process` it lives by.

    A flow names it (`RLHF_PARENT_RUN`, or MLflow's id in `MLFLOW_RUN_ID`), and tells itself of the
    experiment that it saved; stages of one `dvc` process share it, and the experiment that `dvc exp run`
    is to save at its end; a stage run by hand has one of its own.
    """
    flow_run, experiment = (os.environ.get(name) for name in ("PREFECT__FLOW_RUN_ID", "DVC_EXP_NAME"))
    known = {"prefect.flow_run_id": flow_run} if flow_run else {}
    if given := os.environ.get("RLHF_PARENT_RUN"):
        return {"key": given, "owner": "flow", **known}
    if identity := os.environ.get("MLFLOW_RUN_ID"):
        return {"id": identity, "owner": "given", **known}
    for ancestor in process.parents():
        if _is_dvc(ancestor):
            name = process_name(ancestor)
            saved = {"dvc.exp": experiment} if experiment else {}
            return {"key": f"dvc-{name}", "owner": "dvc", "process": name, **saved, **known}
    return {"key": f"alone-{key}", "owner": "stage", "process": process_name(process), **known}


def _is_dvc(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in ("dvc", "dvc.exe") for word in words[:3])


def process_name(process: psutil.Process) -> str:
    """HOST:PID:START, which names one process for good (a pid alone is used again)."""
    return f"{platform.node()}:{process.pid}:{int(process.create_time() * 100)}"


def is_local(name: str) -> bool:
    """Whether the process lives, or lived, on this machine."""
    return name.rsplit(":", 2)[0] == platform.node()


def is_alive(name: str) -> bool:
    """False only if the process lived on this machine and is gone."""
    if not is_local(name):
        return True
    try:
        process = psutil.Process(int(name.rsplit(":", 2)[1]))
        return process_name(process) == name and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def device() -> str:
    """What the stage computed on; torch is asked only if the stage has loaded it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu ({os.cpu_count()} cores, {platform.machine()})"


def courier_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Bounded HTTP, one thread; not the launcher's variables, nor a run that is not the courier's."""
    others = ("MLFLOW_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", STAGE_RUN)
    kept = {k: v for k, v in environment.items() if k not in others}
    return {"MLFLOW_DISABLE_TELEMETRY": "true", **HTTP_BOUNDS, **kept, "OMP_NUM_THREADS": "1"}


def bound_requests() -> None:
    """A server that does not answer is told within seconds; a variable that is set already stays."""
    for name, value in HTTP_BOUNDS.items():
        os.environ.setdefault(name, value)


def _git_tags() -> dict[str, str]:
    root = Paths().root
    return {"git.rev": git.revision(root) or "none", "git.dirty": str(git.is_dirty(root)).lower()}


def _environment_tags() -> dict[str, str]:
    versions = {"env.python": platform.python_version(), "env.platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[f"env.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[f"env.{package}"] = "absent"
    return versions

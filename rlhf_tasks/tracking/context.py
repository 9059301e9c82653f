"""Who runs a stage, where, and as part of which pipeline. No torch or MLflow here."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import psutil

from rlhf_tasks.config import STAGES, Stage, StageView, Tracking
from rlhf_tasks.config.types import store_uri
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git, lineage, processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking.events import Header, now

PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "mlflow", "dvc", "prefect",
)  # fmt: skip
STAGE_RUN = "RLHF_STAGE_RUN"  # the flow run, in the environment of every process that its stages start
EXPERIMENT_NAME = "DVC_EXP_NAME"  # of the run's experiment; `dvc exp run` sets it too
HTTP_BOUNDS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}  # MLflow's defaults block for minutes, and lose traces when the process ends


def is_main_rank() -> bool:
    """True in the process that logs and saves, by the launcher's variables: torch is not loaded yet."""
    return os.environ.get("RANK", "0") == "0"


def is_worker() -> bool:
    """True in a process that `accelerate launch` started as one of a group."""
    return "LOCAL_RANK" in os.environ


def header(paths: Paths, stage: Stage, view: StageView, key: str) -> Header:
    """Everything known about a run at its start, as the first line of its record."""
    process = psutil.Process()
    launch = {f"launch.{name}": value for name, value in view.launch.model_dump(mode="json").items()}
    return Header(
        kind="run",
        time=now(),
        key=key,
        stage=stage,
        last=stage == STAGES[-1],
        home=str(paths.home),
        uri=uri(view.tracking),
        experiment=view.tracking.experiment,
        process=process_name(process),
        parent=parent(process, key),
        parameters={**view.declared, **launch},
        inputs=dict(lineage.input_hashes(paths, stage)),
        tags={
            "dvc.stage": stage,
            "dvc.how": "ran",
            "rlhf.run": key,
            **_git_tags(paths.root),
            **_environment_tags(),
        },
    )


def uri(settings: Tracking) -> str | None:
    """MLflow's store by params.yaml, else by the environment; None is the store under `.rlhf/`.

    Raises:
        UserError: if the environment names a store by a relative path.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI") or None
    if settings.uri or given is None:
        return settings.uri
    try:
        return store_uri(given)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: {error}") from None


def parent(process: psutil.Process, key: str) -> dict[str, str]:
    """The pipeline's run: its `id` if MLflow has it already, else its `key` and the `process` that owns it.

    A flow names it (`RLHF_PARENT_RUN`, or MLflow's id in `MLFLOW_RUN_ID`), and tags it itself with the
    experiment that it saved. The stages of one `dvc` process share a run, which is tagged with the experiment
    that `dvc exp run` saves at its end. A stage that is run alone has a pipeline of its own.
    """
    flow_run, experiment = (os.environ.get(name) for name in ("PREFECT__FLOW_RUN_ID", EXPERIMENT_NAME))
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
    """HOST:PID:START, which names one process only: the system uses a pid again."""
    return f"{platform.node()}:{process.pid}:{processes.start(process)}"


def is_local(name: str) -> bool:
    """Whether the process lives, or lived, on this machine."""
    return name.rsplit(":", 2)[0] == platform.node()


def is_alive(name: str) -> bool:
    """False only if the process lived on this machine and has ended."""
    if not is_local(name):
        return True
    try:
        process = psutil.Process(int(name.rsplit(":", 2)[1]))
        return process_name(process) == name and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


def _git_tags(root: Path) -> dict[str, str]:
    return {"git.rev": git.revision(root) or "none", "git.dirty": str(git.is_dirty(root)).lower()}


def _environment_tags() -> dict[str, str]:
    versions = {"env.python": platform.python_version(), "env.platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[f"env.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[f"env.{package}"] = "absent"
    return versions

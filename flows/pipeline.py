"""The whole pipeline as a Prefect flow: a task per stage of dvc.yaml, in its order. No torch here.

DVC decides what is to be done, as under a plain `dvc repro`, and shares cache, lock file and lineage
with it; Prefect shows it, logs it and can cancel it. `python -m flows.pipeline` runs it once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from rlhf_tasks import lineage

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


@flow(name="rlhf-pipeline", persist_result=False)
def pipeline() -> None:
    """Bring every stage of the working folder's dvc.yaml up to date, one after the other."""
    for name in lineage.graph():
        # Called, not submitted: a submitted task's thread would train on after a cancellation.
        stage(name)


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def stage(name: str) -> None:
    """Run one stage if anything it depends on has changed; its output becomes log lines.

    Raises:
        RuntimeError: if it fails.
    """
    logger = get_run_logger()
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", name]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=stage_environment(os.environ, str(flow_run.get_id())),
        start_new_session=True,
        preexec_fn=_hears_interrupts,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                logger.info("%s", line.rstrip())
            status = process.wait()
        except BaseException:
            # To the whole group: dvc waits for its stage and ends clean; alone it would leave an orphan.
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
    if status:
        raise RuntimeError(
            f"stage {name} failed (dvc ended with {status}); its own words are in the log above"
        )


def _hears_interrupts() -> None:
    """In the child: a worker started in a shell's background ignores SIGINT, and would bequeath that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stage_environment(environment: Mapping[str, str], run: str) -> dict[str, str]:
    """This environment, `rlhf` on the path, and the flow run as the parent of all its stages in MLflow."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, environment.get("PATH", os.defpath)])
    names = {"RLHF_PARENT_RUN": f"prefect-{run}", "PREFECT__FLOW_RUN_ID": run}
    return {**SETTINGS, **environment, "PATH": path, "PYTHONUNBUFFERED": "1", **names}


if __name__ == "__main__":
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    pipeline()

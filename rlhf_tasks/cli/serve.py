"""Commands that run the service: `rlhf up`, `status`, `down`."""

from __future__ import annotations

import os
import re
import sys

import typer
from typer import Option

from rlhf_tasks.errors import UserError

POOL = "rlhf"
PORT_HELP = "port of the {} server (default: that of its last start, else {}, or the next free one)"


def _web_address(text: str | None) -> str | None:
    if text and not re.fullmatch(r"https?://[^/\s]+\S*", text):
        raise typer.BadParameter(f"must begin with http:// or https:// and a host (given: {text})")
    return text


def up(
    prefect_port: int | None = Option(None, min=1, max=65535, help=PORT_HELP.format("Prefect", 4200)),
    mlflow_port: int | None = Option(None, min=1, max=65535, help=PORT_HELP.format("MLflow", 5000)),
    gpu_slots: int | None = Option(
        None, min=1, help="size of the limit `gpu` (default: unchanged; at first one per GPU)"
    ),
    webhook: str | None = Option(
        None,
        metavar="URL",
        callback=_web_address,
        help="address to notify of failures and promotions; '' removes it",
    ),
    pool: str | None = Option(
        None, help="start no server: register the deployments at that of PREFECT_API_URL, for this work pool"
    ),
    work: bool = Option(
        False,
        "--work",
        help=f"with --pool (default: {POOL}): make the pool if needed, and run its flow runs here",
    ),
) -> int:
    """Start the service: Prefect, MLflow, a worker and the deployments. Or join a server that others run."""
    if pool is not None or work:
        if (prefect_port, mlflow_port, gpu_slots, webhook) != (None,) * 4:
            raise UserError("--pool and --work start no server here; leave out the other options")
        from flows import worker

        worker.register(pool or POOL, makes_pool=work or pool == POOL)
        if work:  # this process becomes the worker
            os.execv(sys.executable, worker.command(pool or POOL))
        return 0
    from flows.service import ProjectService

    try:
        ProjectService.here().up({"prefect": prefect_port, "mlflow": mlflow_port}, gpu_slots, webhook)
    except KeyboardInterrupt:
        print("rlhf: `rlhf down` stops what was started", file=sys.stderr)
        raise
    return 0


def status() -> int:
    """Show whether servers and worker work, and the runs in progress (exit status 1: one does not work)."""
    from flows.service import ProjectService

    return ProjectService.here().status()


def down() -> int:
    """Stop the service; runs in progress save their state first."""
    from flows.service import ProjectService

    ProjectService.here().down()
    return 0

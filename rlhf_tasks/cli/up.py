"""`rlhf up`: Prefect and MLflow servers, a worker and the deployments, on this machine."""

from __future__ import annotations

import argparse
import sys

from rlhf_tasks.cli.arguments import Commands, add_command, port, positive_int, web_address

PORTS = {"prefect": 4200, "mlflow": 5000}
TITLES = {"prefect": "Prefect", "mlflow": "MLflow"}


def add(commands: Commands) -> None:
    up = add_command(commands, "up", run, "start the service: Prefect, MLflow, a worker and the deployments")
    for name, first in PORTS.items():
        up.add_argument(
            f"--{name}-port",
            type=port,
            metavar="PORT",
            help=f"port of the {TITLES[name]} server (default: the port of its last start, {first} at the "
            "first start; the next free one if that is taken)",
        )
    up.add_argument(
        "--gpu-slots",
        type=positive_int,
        metavar="N",
        help="size of the concurrency limit `gpu` (default: unchanged; at the first start one "
        "slot per GPU, or 1)",
    )
    up.add_argument(
        "--webhook",
        type=web_address,
        metavar="URL",
        help="address to notify when a run fails, crashes, is promoted or refused; '' removes it (default: "
        "unchanged)",
    )


def run(options: argparse.Namespace) -> int:
    from flows.service import Service

    ports = {"prefect": options.prefect_port, "mlflow": options.mlflow_port}
    try:
        Service.here().up(ports, options.gpu_slots, options.webhook)
    except KeyboardInterrupt:
        print("rlhf: interrupted; `rlhf down` stops what was started", file=sys.stderr)
        return 130
    return 0

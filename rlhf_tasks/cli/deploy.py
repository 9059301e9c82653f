"""`rlhf deploy`: this project's deployments at a Prefect server that others run."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command

POOL = "rlhf"


def add(commands: Commands) -> None:
    summary = "register this project's deployments at the server of PREFECT_API_URL"
    deploy = add_command(commands, "deploy", run, summary)
    deploy.add_argument(
        "--pool",
        default=POOL,
        help="an existing work pool of any type (default: %(default)s, made if it does not exist)",
    )


def run(options: argparse.Namespace) -> int:
    from flows import worker

    worker.register(options.pool, makes_pool=options.pool == POOL)
    return 0

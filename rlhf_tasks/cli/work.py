"""`rlhf work`: a worker in the foreground."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.cli.deploy import POOL


def add(commands: Commands) -> None:
    summary = "register the deployments at the server of PREFECT_API_URL, and run their flow runs here"
    work = add_command(commands, "work", run, summary)
    work.add_argument(
        "--pool", default=POOL, help="a process work pool, made if it does not exist (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> NoReturn:
    from flows import worker

    worker.register(options.pool, makes_pool=True)
    worker.work(options.pool)

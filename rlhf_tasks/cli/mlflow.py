"""`rlhf mlflow`: the dashboard, on loopback only, over the project's own store."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command, port
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    mlflow = add_command(commands, "mlflow", run, "serve the MLflow dashboard on this machine")
    mlflow.add_argument(
        "--port",
        type=port,
        default=5000,
        help="first port to try; the next free one is taken (default: 5000)",
    )


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.tracking.dashboard import serve

    paths = Paths()
    dvc_files.graph(paths.root)  # refuses a folder without a project
    return serve(paths.home, options.port)

"""`rlhf lineage MODEL_OR_RUN`: from raw data to the verdict."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.project import dvc_files


def add(commands: Commands) -> None:
    summary = "show the data, code and runs that made a model, its verdict, and how to restore it"
    add_command(commands, "lineage", run, summary).add_argument(
        "target",
        metavar="MODEL_OR_RUN",
        help="a path such as models/policy, an experiment, a git revision, or a run (its run key, a "
        "Prefect flow run's id, or an MLflow run's id)",
    )


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.project import provenance

    root = Path.cwd()
    dvc_files.graph(root)  # refuses a folder without a project before git runs
    print("\n".join(provenance.lines(provenance.find(root, options.target))))
    return 0

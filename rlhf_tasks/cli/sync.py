"""`rlhf sync`: delivery to MLflow of what is only recorded here."""

from __future__ import annotations

import argparse

from rlhf_tasks import console
from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    add_command(commands, "sync", run, "deliver runs to MLflow that could not be delivered before")


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.tracking.sync import sync

    paths = Paths()
    dvc_files.graph(paths.root)  # refuses a folder without a project: it has no runs to deliver
    delivered, failed = sync(paths.home)
    console.say(f"{delivered} run(s) delivered to MLflow")
    if failed:
        reasons = "".join(f"\n  {key}: {reason}" for key, reason in failed.items())
        raise UserError(f"{len(failed)} run(s) could not be delivered, and stay in .rlhf/outbox:{reasons}")
    return 0

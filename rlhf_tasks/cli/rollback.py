"""`rlhf rollback`: the former champion."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    add_command(commands, "rollback", run, "make the former champion the champion again")


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.promotion import command

    return command.rollback(Paths())

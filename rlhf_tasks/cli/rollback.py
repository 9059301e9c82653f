"""`rlhf rollback`: the former champion."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlhf_tasks.cli.arguments import add_command
from rlhf_tasks.project.paths import Paths

if TYPE_CHECKING:
    from rlhf_tasks.cli.arguments import Commands


def add(commands: Commands) -> None:
    add_command(commands, "rollback", run, "make the former champion the champion again")


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.promotion import command

    return command.rollback(Paths())

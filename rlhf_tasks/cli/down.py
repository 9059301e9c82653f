"""`rlhf down`: the end of the service."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlhf_tasks.cli.arguments import add_command

if TYPE_CHECKING:
    from rlhf_tasks.cli.arguments import Commands


def add(commands: Commands) -> None:
    add_command(commands, "down", run, "stop the service; runs in progress save their state first")


def run(options: argparse.Namespace) -> int:
    from flows.service import Service

    Service.here().down()
    return 0

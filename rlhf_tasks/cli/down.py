"""`rlhf down`: the end of the service."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command


def add(commands: Commands) -> None:
    add_command(commands, "down", run, "stop the service; runs in progress save their state first")


def run(options: argparse.Namespace) -> int:
    from flows.service import Service

    Service.here().down()
    return 0

"""`rlhf status`: what the service runs."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command


def add(commands: Commands) -> None:
    summary = (
        "show whether servers and worker work, and the runs in progress (exit status 1: one does not work)"
    )
    add_command(commands, "status", run, summary)


def run(options: argparse.Namespace) -> int:
    from flows.service import Service

    return Service.here().status()

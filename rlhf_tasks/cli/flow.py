"""`rlhf flow`: the pipeline once, as a Prefect flow in the working folder."""

from __future__ import annotations

import argparse

from rlhf_tasks.cli.arguments import Commands, add_command


def add(commands: Commands) -> None:
    summary = "run the pipeline once in this folder, with the flow's retries and promotion"
    add_command(commands, "flow", run, summary)


def run(options: argparse.Namespace) -> int:
    from flows.pipeline import run_in_checkout

    return run_in_checkout()

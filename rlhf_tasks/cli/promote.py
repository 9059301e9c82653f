"""`rlhf promote [MODEL]`: the gate, and the champion of the model registry."""

from __future__ import annotations

import argparse
import os

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    summary = "make a policy the champion if it passes the gate (exit status 3: the gate refuses it)"
    promote = add_command(commands, "promote", run, summary)
    promote.add_argument(
        "model",
        nargs="?",
        default="models/policy",
        metavar="MODEL",
        help="a checkpoint's folder, or an experiment of `dvc exp list` (default: models/policy)",
    )
    promote.add_argument("--again", action="store_true", help="also promote a policy that was rolled back")
    promote.add_argument(
        "--unless-judging",
        action="store_true",
        help="do nothing if a judge would have to run first (exit status 5: undecided)",
    )


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import command

    return command.promote(Paths(), options.model, again=options.again, unless_judging=options.unless_judging)

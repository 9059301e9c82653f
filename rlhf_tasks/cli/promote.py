"""Commands that make a policy the champion or hand it over: `rlhf promote`, `export`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from typer import Argument, Option

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context


def promote(
    model: str = Argument("models/policy", metavar="MODEL", help="a checkpoint's folder"),
    again: bool = Option(False, "--again", help="also promote a policy that was rolled back"),
    unless_judging: bool = Option(
        False, "--unless-judging", help="do nothing if a judge must run first (exit status 5)"
    ),
    rollback: bool = Option(False, "--rollback", help="make the former champion the champion again"),
) -> int:
    """Make a policy the champion if it passes the gate (exit status 3: the gate refuses it)."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import command

    if rollback and (again or unless_judging or model != "models/policy"):
        raise UserError("--rollback takes no MODEL and no other option; give it alone")
    if rollback:
        return command.rollback(Paths())
    paths, is_flow = Paths(), context.STAGE_RUN in os.environ  # whose page shows the table of criteria
    with console.log_to(paths.home / "logs/promote.log") if is_flow else nullcontext():
        return command.promote(paths, model, again=again, unless_judging=unless_judging)


def export(
    name: str = Argument(
        ..., metavar="NAME", help="`champion`, an experiment of `dvc exp list`, or a checkpoint's folder"
    ),
    to: Path = Option(..., metavar="FOLDER", help="a folder that is empty or does not exist"),
) -> int:
    """Write a policy as a plain Hugging Face folder with its card.

    AutoModelForCausalLM loads the folder. Its card has the parameters, the data, the gate's verdict and the
    lineage.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import export as exports

    exports.export(Paths(), name, to)
    return 0

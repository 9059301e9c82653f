"""`rlhf check-model MODEL`: whether PPO can train a model, before a run is paid for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks import console
from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.config import is_hub_id
from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from rlhf_tasks.models.checks import Result


def add(commands: Commands) -> None:
    check = add_command(
        commands, "check-model", run, "check that sampling and training give the same probabilities",
        "Check that sampling and training give the same log-probs on random prompts. Print a "
        "table, and end with status 2 if the model is not fit for PPO. Stage ppo makes the same check. For "
        "a reward model, compare its scores instead.",
    )  # fmt: skip
    check.add_argument("model", metavar="MODEL", help="a checkpoint folder, or OWNER/NAME@COMMIT of the hub")


def run(options: argparse.Namespace) -> int:
    given: str = options.model
    source, _, revision = given.partition("@") if not Path(given).exists() else (given, "", "")
    if not Path(source).is_dir() and not is_hub_id(source):
        raise UserError(
            f"{given}: there is no such folder, and it is not a hub model; give a checkpoint folder or "
            "OWNER/NAME@COMMIT"
        )
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports DeepSpeed, which would look for a GPU
    from rlhf_tasks.models import checks
    from rlhf_tasks.models.load import load_config

    results = checks.check_source(source, revision or None)
    failed = show(source, results)
    bound = checks.find_rescaling_length(load_config(source, revision or None))
    if bound is not None:
        console.say(
            f"above {bound} tokens of prompt plus response, a row's positions depend on the other rows; "
            "stage ppo refuses longer texts"
        )
    console.say(f"{source} is {'not fit' if failed else 'fit'} for PPO")
    return 2 if failed else 0


def show(title: str, results: list[Result]) -> bool:
    """Print the results as a table, and the likely causes below; returns whether one has failed."""
    rows = [(r.name, r.deviation, r.tolerance, "passed" if r.passed else "FAILED") for r in results]
    console.table(title, ["check", "largest difference", "rounding allows", "result"], rows)
    for result in results:
        if not result.passed:
            console.say(str(result))
    return any(not result.passed for result in results)

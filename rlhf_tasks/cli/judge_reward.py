"""`rlhf judge-reward MODEL FILE`: a reward model on rows whose right responses are known."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command, check_output_file


def add(commands: Commands) -> None:
    judge = add_command(
        commands, "judge-reward", run, "measure how often a reward model prefers the right response",
        "Score the responses of each row of FILE, and show by subset how often the chosen response scores "
        "highest, with Wilson's 95% interval.",
    )  # fmt: skip
    judge.add_argument("model", type=Path, metavar="MODEL", help="folder of a reward model")
    judge.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a .jsonl or .parquet file with `prompt`, `chosen`, `rejected` (a text or a list of texts) and "
        "`subset`, as in RewardBench 2",
    )
    judge.add_argument("--out", type=Path, metavar="JSON", help="also write the accuracies to this file")


def run(options: argparse.Namespace) -> int:
    import torch

    from rlhf_tasks.judging import reward_models

    if options.out is not None:
        check_output_file(options.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reward_models.measure_accuracy(options.model, options.file, options.out, device)
    return 0

"""`rlhf label`: human labels for pairs of responses."""

from __future__ import annotations

import argparse
import sys

from rlhf_tasks.cli.arguments import Commands, add_command, positive_int
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    summary = "label pairs of responses without seeing their authors, to measure how well the judges agree"
    label = add_command(commands, "label", run, summary)
    label.add_argument(
        "--pairs",
        action="append",
        default=[],
        metavar="A_vs_B",
        help="pairs to label; A and B are policy, sft or reference; may be repeated (default: "
        "policy_vs_reference, policy_vs_sft)",
    )
    label.add_argument(
        "--num-examples",
        type=positive_int,
        metavar="N",
        help="number of pairs to label; skipped ones do not count (default: all)",
    )
    label.add_argument("--seed", type=int, default=1, help="seed of the order and the sides (default: 1)")
    label.add_argument(
        "--by", metavar="NAME", help="also write this name and the time with each label (default: neither)"
    )


def run(options: argparse.Namespace) -> int:
    paths = Paths()
    dvc_files.graph(paths.root)  # refuses a folder without a project
    from rlhf_tasks.judging import labelling

    try:
        labelling.run(
            paths,
            options.pairs,
            most=options.num_examples,
            seed=options.seed,
            by=options.by,
            stream=sys.stdin,
        )
    except KeyboardInterrupt:
        labelling.keep(paths)
        raise
    labelling.keep(paths)
    return 0

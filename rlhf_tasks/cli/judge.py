"""`rlhf judge [MODEL]`: the stage, or one model against another."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rlhf_tasks import config
from rlhf_tasks.cli.arguments import Commands, add_command, check_output_file, positive_int
from rlhf_tasks.config import JudgeView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner


def add(commands: Commands) -> None:
    judge = add_command(
        commands, "judge", run, dvc_files.descriptions(Path()).get("judge", ""),
        "Without MODEL, run the stage judge: compare reference, SFT and policy. With MODEL, compute the win "
        "rate of a checkpoint or a file of responses on the test prompts, by the judges of params.yaml.",
    )  # fmt: skip
    kinds = "a checkpoint folder, OWNER/NAME@COMMIT, or a .jsonl file with `prompt` and `completion`"
    judge.add_argument("model", nargs="?", metavar="MODEL", help=kinds)
    judge.add_argument(
        "--against", metavar="MODEL", help="the second contender: a MODEL, or `reference` (default)"
    )
    judge.add_argument(
        "--num-examples",
        type=positive_int,
        metavar="N",
        help="number of test prompts to use (default: judge.num_examples)",
    )
    judge.add_argument(
        "--judge",
        action="append",
        default=[],
        metavar="NAME",
        help="use only this judge of judge.judges; may be repeated (default: all)",
    )
    judge.add_argument(
        "--out", type=Path, metavar="FILE", help="also write every comparison to FILE.jsonl or FILE.parquet"
    )
    judge.add_argument(
        "--export",
        choices=["alpaca_eval"],
        help="also write the responses of both contenders to the folder --to, as this tool reads them",
    )
    judge.add_argument("--to", type=Path, metavar="FOLDER", help="the folder of --export")


def run(options: argparse.Namespace) -> int:
    if options.model is None:
        given = (options.against, options.num_examples, options.judge, options.out)
        if any(given) or options.export or options.to:
            raise UserError(
                "--against, --num-examples, --judge, --out, --export and --to need a MODEL, such as `rlhf "
                "judge models/policy`; the stage takes everything from params.yaml"
            )
        return runner.run("judge", Paths())
    if (options.export is None) != (options.to is None):
        raise UserError("--export alpaca_eval and --to FOLDER need each other; give both")
    view = JudgeView.of(config.load())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.judging import head_to_head

    if options.out is not None:
        head_to_head.check_format(options.out)
        check_output_file(options.out)
    head_to_head.compare_models(
        view,
        options.model,
        options.against or head_to_head.REFERENCE,
        paths=Paths(),
        num_examples=options.num_examples,
        names=options.judge,
        out=options.out,
        alpaca_eval=options.to,
    )
    return 0

"""`rlhf export NAME --to FOLDER`: a policy to hand over."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    summary = "write a policy as a plain Hugging Face folder with its card"
    export = add_command(
        commands, "export", run, summary,
        "Copy a policy to a folder that AutoModelForCausalLM loads. Its card has the parameters, the data, "
        "the gate's verdict and the lineage.",
    )  # fmt: skip
    export.add_argument(
        "name", metavar="NAME", help="champion, an experiment of `dvc exp list`, or a checkpoint's folder"
    )
    export.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="a folder that is empty or does not exist"
    )
    export.add_argument(
        "--push-to-hub",
        metavar="ID",
        help="also upload it to this repository of the Hugging Face hub; a new one is private",
    )


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import export

    if options.push_to_hub is not None:
        export.check_id(options.push_to_hub)
    source = export.export(Paths(), options.name, options.to)
    if options.push_to_hub is not None:
        from huggingface_hub import HfApi

        export.push(options.to, options.push_to_hub, source.label, HfApi())
    return 0

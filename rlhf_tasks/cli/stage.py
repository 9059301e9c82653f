"""`rlhf inputs`, `rlhf prepare` … `rlhf report`: one stage of dvc.yaml."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command
from rlhf_tasks.config import STAGES
from rlhf_tasks.project import dvc_files, inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.training import failures


def add(commands: Commands) -> None:
    summaries = dvc_files.descriptions(Path())
    summary = "write down what each stage reads beside its deps: parameters, and what they name"
    add_command(commands, dvc_files.INPUTS, run_inputs, summary)
    for stage in STAGES:
        if stage != "judge":  # it takes arguments: see judge.py
            add_command(commands, stage, run, summaries.get(stage, "")).set_defaults(stage=stage)


def run_inputs(options: argparse.Namespace) -> int:
    try:
        inputs.write(Paths())
    except Exception as error:
        failures.report(error)
        raise
    return 0


def run(options: argparse.Namespace) -> int:
    return runner.run(options.stage, Paths())

"""The `rlhf` command: its parser, its errors and its exit status. It loads no torch, MLflow or Prefect.

Exit status: 0 done, 1 a fault of another program (one message), 2 a mistake that the user can fix (one
message, no traceback), 130 Ctrl-C, 143 terminated. `rlhf promote` also ends with 3 (the gate refuses), 4
(MLflow does not answer) and 5 (undecided). `rlhf status` ends with 1 if not all programs work, and
`rlhf flow` with 1 if the run fails. Anything else is a fault, with its traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType, ModuleType
from typing import NoReturn

from rlhf_tasks import console
from rlhf_tasks.cli import (
    bench,
    check_model,
    compare,
    deploy,
    down,
    export,
    flow,
    generate,
    judge,
    judge_reward,
    label,
    lineage,
    mlflow,
    params,
    plan,
    preset,
    promote,
    rollback,
    stage,
    status,
    sync,
    up,
    work,
)
from rlhf_tasks.config import STAGES
from rlhf_tasks.errors import OutsideFault
from rlhf_tasks.project import dvc_files
from rlhf_tasks.tracking import context
from rlhf_tasks.training import failures
from rlhf_tasks.training.stopping import Stopped

# How many rounds torch's threads wait for each other before they sleep; read when torch loads. With the
# default of 300,000 they keep both cores from other programs: an update beside two took 24 seconds, not 8.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

MODULES: Sequence[ModuleType] = (
    preset, params, flow, check_model, plan, bench, judge, judge_reward, generate, label, compare, lineage,
    mlflow, sync, promote, rollback, export, up, status, down, work, deploy, stage,
)  # fmt: skip
GROUPS: Mapping[str, Sequence[str]] = {
    "Run the pipeline": ("preset", "params", "flow", "check-model", "plan", "bench"),
    "Review results": ("mlflow", "compare", "lineage", "judge", "judge-reward", "label", "generate", "sync"),
    "Promote a policy": ("promote", "rollback", "export"),
    "Run the service": ("up", "status", "down", "work", "deploy"),
    "Stages (`dvc repro` runs them in order)": (dvc_files.INPUTS, *STAGES),
}
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}  # set unless the user has set them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `rlhf` command and return its exit status."""
    options = parser().parse_args(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, _terminate)
    console.set_quiet(not context.is_main_rank())
    try:
        return int(options.command(options) or 0)
    except OutsideFault as error:
        if not failures.has_failed_elsewhere():  # the first process that reports it says it
            print(f"rlhf: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return stopped.status
    except KeyboardInterrupt:
        print("rlhf: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        message = failures.mistake(error)
        if message is None and failures.has_failed_elsewhere():
            return 1
        if message is None:
            raise
        if not context.is_worker():  # the launcher prints it, once
            print(f"rlhf: {message}", file=sys.stderr)
        return 2


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one signal is enough for what is not a stage
    raise Stopped(number)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; its help lists them by what a person wants to do."""
    made = argparse.ArgumentParser(
        prog="rlhf",
        usage="rlhf COMMAND [OPTIONS]",
        description="Align a language model by RLHF: SFT, reward model, PPO and judge.\n"
        "`dvc repro` runs all stages. `rlhf COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(prog="rlhf", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for module in MODULES:
        module.add(commands)
    summaries = {name: command.get_default("summary") for name, command in commands.choices.items()}
    listings = [
        [f"{title}:", *(f"  {name:<12} {summaries[name]}" for name in names)]
        for title, names in GROUPS.items()
    ]
    made.epilog = "\n\n".join("\n".join(lines) for lines in listings)
    return made

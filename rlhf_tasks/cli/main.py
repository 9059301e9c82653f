"""The `rlhf` command: its commands, its errors and its exit status. It loads no torch, MLflow or Prefect.

Exit status: 0 done, 1 a fault of another program (one message), 2 a mistake that the user can fix (one
message, no traceback), 130 Ctrl-C, 143 terminated. `rlhf promote` also ends with 3 (the gate refuses), 4
(MLflow does not answer) and 5 (undecided). `rlhf status` ends with 1 if not all programs work, and
`rlhf run` with 1 if a stage fails otherwise. Anything else is a fault, with its traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from rlhf_tasks import config, console
from rlhf_tasks.cli import data, params, promote, review, run, serve
from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.errors import OutsideFault
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context
from rlhf_tasks.training import auto, failures, launch, signals

# How many rounds torch's threads wait for each other before they sleep; read when torch loads. With the
# default of 300,000 they keep both cores from other programs: an update beside two took 24 seconds, not 8.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

COMMANDS: Mapping[str, Sequence[Callable[..., int]]] = {
    "Run the pipeline": (
        run.run,
        run.methods,
        data.data,
        params.preset,
        params.params,
        params.check_model,
        params.plan,
    ),
    "Review results": (review.mlflow, review.compare, review.lineage, review.generate, review.sync),
    "Promote a policy": (promote.promote, promote.export),
    "Run the service": (serve.up, serve.status, serve.down),
}
STAGE_PANEL = "Stages (`rlhf run` and `dvc repro` run them in order)"
QUIET = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # on a busy machine; by default 20
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "DVC_NO_ANALYTICS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}  # set unless the user has set them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `rlhf` command, by default as the program of this process; returns its exit status."""
    if arguments is not None:
        return _run(arguments)
    atexit.register(signals.end_children)  # before multiprocessing does: it ends its pools first
    status = 1
    try:
        status = _run(sys.argv[1:])
    finally:
        signals.end_with(status)
    return status


def _run(arguments: Sequence[str]) -> int:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):  # no proxy may get what is meant for our own servers
        hosts = [*filter(None, os.environ.get(name, "").split(","))]
        if not {"*", "127.0.0.1"} & {*hosts}:
            os.environ[name] = ",".join([*hosts, "127.0.0.1", "localhost"])
    if not any(name.endswith("_ALLOC_CONF") for name in os.environ):  # rows of all lengths fragment memory
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not context.is_worker():  # accelerate would wait for the group that a cluster's shell speaks of
        for name in filter(launch.RANKS.fullmatch, [*os.environ]):
            del os.environ[name]
    signal.signal(signal.SIGTERM, signals.terminate)
    console.set_quiet(not context.is_main_rank())
    try:
        with parser().make_context("rlhf", list(arguments)) as given:
            return int(given.command.invoke(given) or 0)
    except typer.Exit as end:  # of --help
        return end.exit_code
    except typer.TyperException as error:
        text = error.format_message().rstrip(".")
        print(f"rlhf: {text}; `rlhf [COMMAND] --help` lists what is allowed", file=sys.stderr)
        return 2
    except OutsideFault as error:
        if not failures.has_failed_elsewhere():  # the first process that reports it says it
            print(f"rlhf: {error}", file=sys.stderr)
        return 1
    except signals.Stopped as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would end the interpreter's own end
        return stopped.status
    except KeyboardInterrupt:
        print("rlhf: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `rlhf params | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        message = failures.mistake(error)
        if message is None and failures.has_failed_elsewhere():
            return 1
        if message is None:
            raise
        if not context.is_worker():  # the launcher prints it, once
            print(f"rlhf: {message}", file=sys.stderr)
        return 2


def parser() -> Any:
    """The group of all commands, listed by what a person wants to do; a docstring is its command's help."""
    app = typer.Typer(
        help="Align a language model by RLHF: SFT, reward model, PPO and judge.\n\n"
        "`rlhf run` runs all stages. `rlhf COMMAND --help` explains a command.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for title, functions in COMMANDS.items():
        for function in functions:
            app.command(function.__name__.replace("_", "-"), rich_help_panel=title)(function)
    app.command(dvc_files.INPUTS, rich_help_panel=STAGE_PANEL)(run_inputs)
    summaries = dvc_files.descriptions(Path())
    for stage in STAGES:
        if stage == "judge":  # it takes arguments
            app.command(rich_help_panel=STAGE_PANEL)(review.judge)
        else:
            summary = summaries.get(stage, "").rstrip(".")
            help = f"{summary[:1].upper()}{summary[1:]}." if summary else ""
            app.command(stage, help=help, rich_help_panel=STAGE_PANEL)(_run_of(stage))
    return typer.main.get_command(app)


def run_inputs() -> int:
    """Write down what each stage reads beside its deps, which are parameters and what they name."""
    try:
        with signals.listening(dvc_files.INPUTS):  # which says how much of a model it has hashed
            paths = Paths()
            auto.write_inputs(paths, config.load(paths.params))
    except Exception as error:
        failures.report(error)
        raise
    return 0


def _run_of(stage: Stage) -> Callable[[], int]:
    def run_stage() -> int:
        from rlhf_tasks.stages import runner

        return runner.run(stage, Paths())

    return run_stage

"""`rlhf run`: every stage whose inputs, code or parameters changed, with a head before and a card after."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer import Argument, Option

from rlhf_tasks import config, console, presets
from rlhf_tasks.cli.review import project
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import durations, dvc_cli, dvc_files, git, inputs, processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context
from rlhf_tasks.training import auto, failures, signals


def run(
    dry: bool = Option(False, "--dry", help="only say what would run, why, and how long it took last time"),
    flow: bool = Option(False, "--flow", help="by Prefect, with its retries and the promotion at the end"),
) -> int:
    """Run every stage whose inputs, code or parameters changed, and say what came out."""
    paths = project()
    dvc_cli.check(paths.root)
    if flow and not dry:
        from flows.pipeline import run_in_checkout

        return run_in_checkout()
    settings = config.load(paths.params)
    dvc_cli.refuse_beside_run(paths.root)
    with signals.listening(dvc_files.INPUTS):
        auto.write_inputs(paths, settings)  # for `dvc status`
    reasons, seconds = explain_changes(paths), durations.read(paths.home)
    total = len({*dvc_files.graph(paths.root)} - {dvc_files.INPUTS})
    if dry:
        rows = [[name, why, format_time(seconds, [name])] for name, why in reasons.items()]
        console.table(f"{len(rows)} of {total} stages would run", ["stage", "why", "last time"], rows)
        return 0
    name = run_name(paths, settings)
    if reasons:
        console.say(f"{name}: {len(reasons)} of {total} stages run: {', '.join(reasons)}")
        console.say(
            f"They took, when they last ran: {format_time(seconds, [*reasons])}. Ctrl-C keeps their state."
        )
        console.say(f"Tables and samples: {paths.home / 'logs'}/STAGE-….log")
    else:
        console.say(f"Nothing has changed: the results of all {total} stages are here")
    if (status := _repro(paths, name)) == 0:
        from rlhf_tasks.report import run_facts

        run_facts.show_card(paths, settings)
    return status


def methods(
    names: list[str] = Argument(
        ...,
        metavar="METHOD",
        help="presets, such as ppo, dpo, rloo and grpo; best_of_16 is compared with them",
    ),
    seed: list[int] = Option([1, 2, 3], help="of a run of every method; may be repeated"),
    preset: str = Option("default", help="the preset of all runs; default: params.yaml as it is committed"),
    name: str = Option("methods", help="the name of the page and of the experiments"),
) -> int:
    """Run methods from the same start, each with every seed, and write the page that compares them."""
    dvc_cli.check(project().root)
    from flows.sweep import run_methods

    return run_methods(names, seed, preset, name)


def run_name(paths: Paths, settings: Config) -> str:
    """The name of a run: its presets, and what else differs from the last commit's params.yaml."""
    chosen = settings.preset.split(presets.BETWEEN) if settings.preset else []
    values = expected = config.in_force(settings)
    for name in chosen:
        presets.read(name)
    with suppress(UserError):  # there is no commit, or its file is not valid
        committed = git.show(paths.root, "HEAD", "params.yaml")
        expected = config.in_force(presets.combine(committed, chosen)[1])
    changes = {k: v for k, v in values.items() if k not in expected or v != expected[k]}
    return presets.Request(settings.preset, overrides=changes).name(secrets.token_hex(2))


def format_time(seconds: Mapping[str, float], stages: list[str]) -> str:
    """How long these stages took when they last ran here."""
    if any(stage not in seconds for stage in stages):
        return "not known yet"
    return console.duration(sum(seconds[stage] for stage in stages))


def explain_changes(paths: Paths) -> dict[str, str]:
    """The stages that `dvc repro` would run or restore, in their order, and why."""
    status: dict[str, list[Any]] = json.loads(dvc_cli.run(paths.root, "status", "--json"))
    graph, reasons = dvc_files.graph(paths.root), dict[str, str]()
    for stage, node in graph.items():
        if stage == dvc_files.INPUTS:
            continue
        told = status.get(stage, [])
        changes = [one for one in told if isinstance(one, str)]  # "always changed", "changed command"
        changes += inputs.find_changes(paths.root, paths.root, stage) if told else []
        for change in told:
            if isinstance(change, dict) and (states := change.get("changed outs", {}).values()):
                changed = "have changed" if "modified" in states else "are not here"
                changes.append(f"its results {changed}")
        makers = [name for name in reasons if {*node.deps} & {*graph[name].outs}]
        if not dvc_files.locked_by(paths.root, stage):
            reasons[stage] = "it has not run yet"
        elif changes or makers:
            reasons[stage] = "; ".join(changes or [f"after {', '.join(makers)}"])
    return reasons


def _repro(paths: Paths, name: str) -> int:
    """Run `dvc repro` without its own messages; the exit status is that of the stage that failed.

    DVC and its stages are a group of their own. Each signal goes there once, as Ctrl-C: DVC waits for the
    stage, which saves its state.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
        signal.signal(signal.SIGINT, lambda *_: None)  # else the group would inherit that it is ignored
    with tempfile.TemporaryDirectory(prefix="rlhf-run-") as scratch:
        failure = Path(scratch) / "failure.json"
        command = [sys.executable, "-P", "-m", "dvc", "--wait-for-lock", "repro", "--quiet"]
        own = {"PATH": processes.environment_path(os.environ), context.RUN_NAME: name}
        environment = {**os.environ, **own, failures.FAILURE: str(failure)}
        process = subprocess.Popen(command, cwd=paths.root, env=environment, process_group=0)
        heard = signal.getsignal(signal.SIGTERM)

        def interrupt() -> None:
            signal.signal(signal.SIGTERM, heard)  # a second one ends the stage at once
            if isinstance(sys.exception(), signals.Stopped):
                print("rlhf: SIGTERM; DVC and its stage get it as Ctrl-C", file=sys.stderr, flush=True)
            processes.interrupt_group(process)

        stopped = 0
        try:
            processes.supervise(process, interrupt)
        except KeyboardInterrupt as error:
            stopped = error.status if isinstance(error, signals.Stopped) else 128 + signal.SIGINT
        status = process.returncode
        report = failures.read(failure)
    if stopped and status:
        return stopped
    kind, stage = report.get("kind"), report.get("stage")
    if status and kind is None:  # DVC is quiet
        other = "DVC, or a stage of dvc.yaml that is not of rlhf, failed as it said above, or"
        who = f"stage {stage}" if stage else other
        crashed = f"ended without a word: it crashed, or was killed (SIGKILL): {failures.OUT_OF_MEMORY}"
        end = report.get("stopped") or crashed
        print(f"rlhf: {who} {end}; `dvc repro` shows the status", file=sys.stderr)
    if status:
        return 2 if kind == "user" else 1
    return 0

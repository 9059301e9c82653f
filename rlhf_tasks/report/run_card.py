"""The card at the end of a run, of at most eight lines: what was trained, how good it is, what to do next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.config import Config, ReportView
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import run_facts
from rlhf_tasks.tracking import context

SHELL_PATH = "RLHF_SHELL_PATH"  # PATH of the shell that `make` was started in, which adds .venv to its own
MOST = 2  # changes


def show(paths: Paths, settings: Config) -> None:
    rows = dict(_rows(paths, settings))
    width = max(map(len, rows), default=0) + 2
    console.say("\n".join(f"{title:{width}}{text}" for title, text in rows.items()))


def _rows(paths: Paths, settings: Config) -> Iterator[tuple[str, str]]:
    episodes = run_facts.read_json(paths.metrics("ppo")).get("episode")
    trained = f", preference pairs ({settings.dpo.loss})" if settings.dpo.train else ""
    trained += f", {episodes:,.0f} episodes of PPO" if episodes else ""
    data = settings.data.in_words
    if run_facts.read_json(paths.metrics("prepare")).get("rows/as_turns"):
        data += ", as turns of the chat template"
    yield "Trained", f"{run_facts.base_model(settings.model)}{trained}; data: {data}"
    facts = run_facts.facts(ReportView.of(settings), run_facts.read_lineage(paths), "", paths.root)
    outcome = run_facts.outcome(paths, settings.judge.judges)
    if "Commit" in facts:
        changes = facts["Changes"].split("; ") if "Changes" in facts else []
        many = [f"{len(changes)} changes of params.yaml, in the report"]
        origin = [f"commit {facts['Commit']}", f"preset {facts['Preset']}"]
        origin += many if len(changes) > MOST else changes
        outcome["Time"] = "; ".join([outcome.get("Time", "not known"), *origin])
    for title, text in outcome.items():
        first, *more = text.split("; ") if title == "Verdict" else [text]
        yield title, f"{first}; and {len(more)} more, in the report" if more else first
    report = paths.reports / "index.html"
    if report.exists():
        yield "Report", report.resolve().as_uri()
    rlhf = command()
    curves = f"; {context.uri(settings.tracking) or f'{rlhf} mlflow'}   (curves)" * settings.tracking.enabled
    yield "Next", f"{rlhf} generate models/policy   (try it){curves}"
    if verdict := outcome.get("Verdict"):
        is_passed = verdict.startswith("passed")
        what = "make it the champion" if is_passed else "shows each criterion; it cannot become champion"
        yield "", f"{rlhf} promote   ({what})"


def command() -> str:
    """`rlhf`, or its path where the user's shell finds no such command, or another one."""
    program = Path(sys.executable).with_name("rlhf")
    in_shell = shutil.which("rlhf", path=os.environ.get(SHELL_PATH))
    if not program.exists() or (in_shell and program.samefile(in_shell)):
        return "rlhf"
    folder = Path.cwd()
    return shlex.quote(str(program.relative_to(folder) if program.is_relative_to(folder) else program))

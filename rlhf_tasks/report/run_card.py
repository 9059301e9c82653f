"""The card at the end of a run, of at most eight lines: what was trained, how good it is, what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import STAGES, Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import durations
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, run_facts
from rlhf_tasks.tracking import catalogue, context

OPPONENTS = {"reference": "the data's references", "sft": "the SFT model"}


def show(paths: Paths, settings: Config) -> None:
    """Print the card of the results in a project."""
    rows = dict(describe(paths, settings))
    width = max(map(len, rows), default=0) + 2
    console.say("\n".join(f"{title:{width}}{text}" for title, text in rows.items()))


def describe(paths: Paths, settings: Config) -> Iterator[tuple[str, str]]:
    """The rows of the card: a title and a text. A flow's log ends with some of them."""
    ppo = _json(paths.metrics("ppo"))
    episodes = f", {ppo['episode']:,.0f} episodes of PPO" if "episode" in ppo else ""
    data = settings.data.in_words
    if _json(paths.metrics("prepare")).get("rows/as_turns"):
        data += ", as turns of the chat template"
    yield "Trained", f"{run_facts.base_model(settings.model)}{episodes}; data: {data}"
    results = EvaluationResults()
    with suppress(UserError):
        results = EvaluationResults.read(paths.evaluation_results)
    judge = results.first_judge
    rates = [
        f"{document.share(one.win_rate)} over {text}"
        for other, text in OPPONENTS.items()
        if (one := results.comparison(judge, "policy", other)) is not None
    ]
    if rates:
        yield "Win rate", f"{'; '.join(rates)}; by {catalogue.placeholder_in_words(judge)}"
    if judge in results.accuracies:
        policy, sft = (document.share(results.accuracies[judge].right[name]) for name in ("policy", "sft"))
        yield "Right", f"{policy} of the responses; SFT {sft}"
    gate = _json(paths.verdict)
    if gate:
        first, *more = gate["summary"].split("; ")
        others = f"; and {len(more)} more, in the report" if more else ""
        yield "Verdict", f"{'passed' if gate['passed'] else 'refused'}: {first}{others}"
    known = durations.read(paths.home)
    if all(stage in known for stage in STAGES):
        yield "Time", f"{console.duration(sum(known[stage] for stage in STAGES))}, of all stages"
    report = paths.reports / "index.html"
    if report.exists():
        yield "Report", report.resolve().as_uri()
    curves = f"; {context.uri(settings.tracking) or 'rlhf mlflow'}   (curves)" * settings.tracking.enabled
    yield "Next", f"rlhf generate models/policy   (try it){curves}"
    if gate:
        what = "make it the champion" if gate["passed"] else "shows each criterion; it cannot become champion"
        yield "", f"rlhf promote   ({what})"


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

"""What a finished run shows in Prefect: metrics against the last run, win rates, answers, links. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import Artifact, create_markdown_artifact, create_table_artifact

from rlhf_tasks import config
from rlhf_tasks.project import dvc_files

METRICS_KEY, RESULTS_KEY, PROGRESS_KEY = "rlhf-metrics", "rlhf-results", "rlhf-progress"
ANSWERS = Path("evaluation/judge/answers.parquet")
NUM_ANSWERS, ANSWER_LENGTH = 5, 300  # rows, characters


@dataclass(frozen=True)
class Outcome:
    """Of a run that came to its end."""

    name: str
    how: Mapping[str, str]
    """Per stage: `ran` or `cached`."""
    changes: Sequence[str]
    revision: str
    experiment: str | None
    notes: Sequence[str]
    verdict: str | None = None
    """What the gate said, if it was asked."""
    criteria: Sequence[Mapping[str, Any]] = ()


def metrics(folder: Path) -> dict[str, float]:
    """`{"ppo/objective/kl": 1.2, …}` of the metrics files that dvc.yaml names."""
    found: dict[str, float] = {}
    for node in dvc_files.graph(folder).values():
        for path in (folder / out for out in node.outs if out.startswith("metrics/")):
            if path.exists():
                tree = config.flatten(json.loads(path.read_text(encoding="utf-8")))
                found |= {f"{path.stem}/{name}": value for name, value in tree.items()}
    return found


def win_rates(values: Mapping[str, float]) -> list[dict[str, str]]:
    """A row per judge and pair, with its 95% interval."""
    rows = []
    for name, rate in values.items():
        if name.startswith("judge/") and name.endswith("/win_rate"):
            key = name.removesuffix("/win_rate")
            judge, pair = key.removeprefix("judge/").rsplit("/", 1)
            interval = f"{values[f'{key}/low']:.1%} – {values[f'{key}/high']:.1%}"
            rows.append(
                {"judge": judge, "pair": pair.replace("_vs_", " vs "), "win rate": f"{rate:.1%}",
                 "95% interval": interval}
            )  # fmt: skip
    return rows


def answers(folder: Path) -> list[dict[str, str]]:
    """The first test prompts, and what each contender said."""
    if not (folder / ANSWERS).exists():
        return []
    from pyarrow import parquet

    names = ["prompt", "reference", "sft", "policy"]
    table = parquet.read_table(folder / ANSWERS, columns=names).slice(0, NUM_ANSWERS)
    return [{name: str(row[name])[:ANSWER_LENGTH] for name in names} for row in table.to_pylist()]


def run_keys(folder: Path, stages: Sequence[str]) -> dict[str, str]:
    """`{stage: key}` of the runs that made what lies here, by models/lineage."""
    found = {}
    for stage in stages:
        path = folder / "models/lineage" / f"{stage}.json"
        if path.exists():
            found[stage] = str(json.loads(path.read_text(encoding="utf-8"))["rlhf.run"])
    return found


def last_metrics() -> dict[str, float]:
    """Of the last run that came to its end, as it told Prefect."""
    artifact: Any = Artifact.get(METRICS_KEY)
    rows = json.loads(str(artifact.data)) if artifact is not None and artifact.data else []
    return {row["metric"]: row["value"] for row in rows}


def show(outcome: Outcome, folder: Path, links: Mapping[str, str]) -> None:
    """Make the table and the page."""
    values, last = metrics(folder), last_metrics()
    rows = [
        {"metric": name, "value": value, "last run": last.get(name), "change": _change(value, last.get(name))}
        for name, value in sorted(values.items())
    ]
    if rows:
        create_table_artifact(
            rows, key=METRICS_KEY, description=f"metrics of {outcome.name} against the run before it"
        )
    create_markdown_artifact(page(outcome, folder, values, last, links), key=RESULTS_KEY)


def _change(value: float, last: float | None) -> float | None:
    return None if last is None else value - last


def page(
    outcome: Outcome,
    folder: Path,
    values: Mapping[str, float],
    last: Mapping[str, float],
    links: Mapping[str, str],
) -> str:
    """The run on one page, in markdown."""
    outs = {stage: node.outs for stage, node in dvc_files.graph(folder).items()}
    locked = dvc_files.locked(folder)
    parts = [f"# {outcome.name}", *(f"> {note}\n" for note in outcome.notes)]
    where = f"commit `{outcome.revision}`"
    if outcome.experiment:
        where += f", experiment `{outcome.name}`: `dvc exp apply {outcome.name}` brings it back"
    parts.append(f"{where}. {'[MLflow](' + links['pipeline'] + ')' if 'pipeline' in links else ''}")
    if outcome.verdict is not None:
        parts.append(f"## Promotion\n\n{outcome.verdict}")
        parts += [_markdown(outcome.criteria)] if outcome.criteria else []
    if rates := win_rates(values):
        parts.append("## Win rates\n\nTies count half.\n\n" + _markdown(rates))
    shown = [name for name in HEADLINES if name in values]
    if shown:
        headline = [
            {"metric": name, "this run": f"{values[name]:.4g}",
             "last run": f"{last[name]:.4g}" if name in last else "–"}
            for name in shown
        ]  # fmt: skip
        parts.append("## Metrics\n\n" + _markdown(headline))
    if outcome.changes:
        changes = "\n".join(f"- {_code(change)}" for change in outcome.changes)
        parts.append(f"## Changes asked for\n\n{changes}")
    stages = [
        {"stage": stage, "how": outcome.how.get(stage, "–"),
         "MLflow": f"[run]({links[stage]})" if stage in links else "–",
         "outs": ", ".join(f"{out} `{locked[out]}`" for out in outs[stage] if out in locked)}
        for stage in outs
    ]  # fmt: skip
    parts.append("## Stages\n\n" + _markdown(stages))
    if said := answers(folder):
        parts.append("## Answers\n\n" + _markdown(said))
    return "\n\n".join(parts) + "\n"


HEADLINES = (
    "ppo/objective/kl",
    "ppo/objective/scores",
    "ppo/objective/rlhf_reward",
    "ppo/policy/clipfrac_avg",
    "reward/accuracy",
    "sft/perplexity",
)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    """A code span, whatever the text holds."""
    fence = "`"
    while fence in text:
        fence += "`"
    return f"`{text}`" if len(fence) == 1 else f"{fence} {text} {fence}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")

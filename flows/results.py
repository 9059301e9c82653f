"""What a finished run shows in Prefect: metrics, win rates, responses, verdict and links. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import Artifact, create_markdown_artifact, create_table_artifact

from flows.outcome import Outcome
from rlhf_tasks import config
from rlhf_tasks.config import STAGES
from rlhf_tasks.evaluation.results import EvaluationResults
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import catalogue

METRICS_KEY, RESULTS_KEY, PROGRESS_KEY = "rlhf-metrics", "rlhf-results", "rlhf-progress"
NUM_RESPONSES, RESPONSE_LENGTH = 5, 300  # rows, characters


def metrics(folder: Path) -> dict[str, float]:
    """`{"ppo/objective/kl": 1.2, …}` of the metrics files that dvc.yaml names."""
    values: dict[str, float] = {}
    for node in dvc_files.graph(folder).values():
        for path in (folder / out for out in node.outs if out.startswith("metrics/")):
            if path.exists():
                tree = config.flatten(json.loads(path.read_text(encoding="utf-8")))
                values |= {f"{path.stem}/{name}": value for name, value in tree.items()}
    return values


def win_rates(folder: Path) -> list[dict[str, str]]:
    """A row per judge and pair, with its 95% interval."""
    file = Paths(folder).evaluation_results
    if not file.exists():
        return []
    return [
        {
            "judge": one.judge,
            "pair": f"{one.a} vs {one.b}",
            "win rate": f"{one.win_rate.value:.1%}",
            "95% interval": f"{one.win_rate.low:.1%} – {one.win_rate.high:.1%}",
        }
        for one in EvaluationResults.read(file).comparisons
    ]


def responses(folder: Path) -> list[dict[str, str]]:
    """The first test prompts, and the response of each contender."""
    file = Paths(folder).judged_responses
    if not file.exists():
        return []
    from pyarrow import parquet

    names = ["prompt", "reference", "sft", "policy"]
    table = parquet.read_table(file, columns=names).slice(0, NUM_RESPONSES)
    return [{name: str(row[name])[:RESPONSE_LENGTH] for name in names} for row in table.to_pylist()]


def run_keys(folder: Path, stages: Sequence[str]) -> dict[str, str]:
    """`{stage: key}` of the runs that made what the folder holds, by models/lineage."""
    keys = {}
    for stage in stages:
        path = folder / "models/lineage" / f"{stage}.json"
        if path.exists():
            keys[stage] = str(json.loads(path.read_text(encoding="utf-8"))["rlhf.run"])
    return keys


def last_metrics() -> dict[str, float]:
    """The metrics of the last completed run, from its artifact in Prefect."""
    artifact: Any = Artifact.get(METRICS_KEY)
    rows = json.loads(str(artifact.data)) if artifact is not None and artifact.data else []
    return {row["metric"]: row["value"] for row in rows}


def show(outcome: Outcome, folder: Path, pages: Mapping[str, str]) -> None:
    """Create the artifacts: a table of all metrics, and one page."""
    values, last = metrics(folder), last_metrics()
    if rows := metric_rows(values, last):
        create_table_artifact(
            rows, key=METRICS_KEY, description=f"metrics of {outcome.name} and of the run before it"
        )
    create_markdown_artifact(page(outcome, folder, values, last, pages), key=RESULTS_KEY)


def metric_rows(values: Mapping[str, float], last: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row per metric, headlines first: its value, that of the last run, and the change."""
    chosen = headlines(values)
    return [
        {
            "metric": name,
            "value": values[name],
            "last run": last.get(name),
            "change": values[name] - last[name] if name in last else None,
        }
        for name in [*chosen, *sorted({*values} - {*chosen})]
    ]


def page(
    outcome: Outcome,
    folder: Path,
    values: Mapping[str, float],
    last: Mapping[str, float],
    pages: Mapping[str, str],
) -> str:
    """The run on one page, in markdown."""
    where = f"commit `{outcome.revision}`"
    if outcome.experiment:
        where += f", experiment `{outcome.name}`: `dvc exp apply {outcome.name}` restores it"
    mlflow = f" [MLflow]({pages['pipeline']})" if "pipeline" in pages else ""
    parts = [f"# {outcome.name}", *(f"> {note}\n" for note in outcome.notes), f"{where}.{mlflow}"]
    if outcome.verdict is not None:
        parts += [f"## Promotion\n\n{outcome.promotion}", *_table(outcome.criteria)]
    sections = {
        "Win rates": _table(win_rates(folder), "Ties count half."),
        "Metrics": _metrics(values, last),
        "Changes": ["\n".join(f"- {_code(change)}" for change in outcome.changes)],
        "Stages": _table(_stages(outcome, folder, pages)),
        "Responses": _table(responses(folder)),
    }
    for title, content in sections.items():
        if any(content):
            parts += [f"## {title}", *content]
    return "\n\n".join(parts) + "\n"


def headlines(names: Iterable[str]) -> list[str]:
    """Those of the metrics `STAGE/NAME` that an overview shows, in the catalogue's order."""
    logged = list(names)
    return [
        f"{stage}/{name}"
        for stage in STAGES
        for name in catalogue.select_headlines(
            stage, [name.removeprefix(f"{stage}/") for name in logged if name.startswith(f"{stage}/")]
        )
    ]


def _metrics(values: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """The headlines as a table, and how many metrics it leaves out."""
    rows = [
        {
            "metric": name,
            "this run": f"{values[name]:.4g}",
            "last run": f"{last[name]:.4g}" if name in last else "–",
        }
        for name in headlines(values)
    ]
    others = len(values) - len(rows)
    return [*_table(rows), *([f"{others} more: artifact `{METRICS_KEY}`"] if others else [])]


def _stages(outcome: Outcome, folder: Path, pages: Mapping[str, str]) -> list[dict[str, str]]:
    locked = dvc_files.locked(folder)
    return [
        {
            "stage": stage,
            "how": outcome.how.get(stage, "–"),
            "MLflow": f"[run]({pages[stage]})" if stage in pages else "–",
            "outs": ", ".join(f"{out} `{locked[out]}`" for out in node.outs if out in locked),
        }
        for stage, node in dvc_files.graph(folder).items()
        if stage != dvc_files.INPUTS
    ]


def _table(rows: Sequence[Mapping[str, Any]], caption: str = "") -> list[str]:
    """The paragraphs of a table in markdown; none without rows."""
    if not rows:
        return []
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return [*([caption] if caption else []), "\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _code(text: str) -> str:
    """A code span, whatever the text holds."""
    fence = "`"
    while fence in text:
        fence += "`"
    return f"`{text}`" if len(fence) == 1 else f"{fence} {text} {fence}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")

"""What came out of a run, and what Prefect shows of it: state, metrics, verdict, stages, links. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import Artifact, create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rlhf_tasks import config
from rlhf_tasks.project import dvc_files
from rlhf_tasks.promotion.verdict import make_table
from rlhf_tasks.report import run_facts
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.record import PIPELINE, REPORT

PROMOTED, NOT_PROMOTED, DEFERRED = VERDICTS = ("Promoted", "Not promoted", "Deferred")
"""The names of states in which the gate ends. Each is completed: the run has its results."""
METRICS_KEY, RESULTS_KEY = "rlhf-metrics", "rlhf-results"
PAGES: Mapping[str, str] = {"Report": REPORT, "MLflow": PIPELINE}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a run in which no stage failed."""

    name: str  # of the experiment, or of the run if it has none
    how: Mapping[str, str]  # per stage: `ran` or `cached`
    revision: str
    experiment: str | None = None  # its commit
    changes: Sequence[str] = ()  # of the parameters, as the user requested them
    notes: Sequence[str] = ()
    verdict: str | None = None
    """The state of the promotion (one of VERDICTS), if there was something to promote."""
    reason: str = ""  # of the verdict
    criteria: Sequence[Mapping[str, Any]] = ()
    card: Mapping[str, str] = field(default_factory=dict)
    """What came out, as the card at the end of `rlhf run` has it: see `run_facts.outcome`."""
    unpushed: str | None = None  # why the DVC remote lacks outs of the run, although they were to be pushed

    @property
    def promotion(self) -> str:
        return f"{self.verdict}: {self.reason}"

    @property
    def lines(self) -> list[str]:
        """The verdict, its reason first, and what else came out, as the card has it."""
        verdict = self.promotion if self.verdict else self.card.get("Verdict")
        others = [f"{title} {text}" for title, text in self.card.items() if title != "Verdict"]
        return [verdict, *others] if verdict else others

    def tags(self) -> dict[str, str]:
        """The tags by which the run in MLflow, DVC and git refer to each other."""
        return {
            "git.rev": self.revision,
            **({"dvc.exp": self.name, "dvc.exp_rev": self.experiment} if self.experiment else {}),
        }

    def state(self) -> State[Any]:
        """The final state of the flow run."""
        ran = ", ".join(stage for stage, result in self.how.items() if result == "ran")
        parts = [*self.lines, f"ran {ran}" if ran else "nothing had to run"]
        parts += [f"experiment {self.name}"] if self.experiment else []
        parts += [f"not pushed: {self.unpushed}"] if self.unpushed else []
        name = "Unpushed" if self.unpushed and self.verdict in (None, PROMOTED) else self.verdict
        return Completed(name=name or "Completed", message="; ".join(parts))


def metrics(folder: Path) -> dict[str, float]:
    """`{"ppo/objective/kl": 1.2, …}`: the numbers in the JSON files of metrics/ that dvc.yaml names.

    A stage of the user's may write texts, NaN and other kinds of files there too.
    """
    outs = [out for node in dvc_files.graph(folder).values() for out in node.outs]
    files = [folder / out for out in outs if out.startswith("metrics/") and out.endswith(".json")]
    trees = {file.stem: config.flatten(run_facts.read_json(file)) for file in files}
    return {
        f"{stage}/{name}": value
        for stage, tree in trees.items()
        for name, value in tree.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def run_keys(folder: Path, stages: Sequence[str]) -> dict[str, str]:
    """`{stage: key}` of the runs that made what the folder holds, by models/lineage."""
    read = {stage: run_facts.read_json(folder / f"models/lineage/{stage}.json") for stage in stages}
    return {stage: str(lineage["rlhf.run"]) for stage, lineage in read.items() if lineage}


def show(outcome: Outcome, folder: Path, pages: Mapping[str, str], project: str) -> None:
    """Create the artifacts: a table of all metrics beside those of the last run, and one page.

    The last run on a server may be one of another `project`.
    """
    artifact: Any = Artifact.get(METRICS_KEY)
    is_ours = artifact is not None and artifact.data and str(artifact.description).endswith(f", of {project}")
    rows = json.loads(str(artifact.data)) if is_ours else []
    values, last = metrics(folder), {row["metric"]: row["value"] for row in rows}
    if values:
        caption = f"metrics of {outcome.name} and of the run before it, of {project}"
        create_table_artifact(metric_rows(values, last), key=METRICS_KEY, description=caption)
    # Hard breaks, since the list of artifacts cuts long lines; no link works there.
    summary = "  \n".join(outcome.lines).replace("; ", ";  \n").replace(": ", ":  \n", 1)
    create_markdown_artifact(page(outcome, folder, pages), key=RESULTS_KEY, description=summary)
    addresses = (f"{name}: {pages[key]}" for name, key in PAGES.items() if key in pages)
    for line in (*outcome.notes, *outcome.lines, *addresses):  # the end of the log
        get_run_logger().info("%s", line)


def metric_rows(values: Mapping[str, float], last: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row per metric, headlines first: its value, that of the last run, and the change."""
    return [
        {
            "metric": name,
            "value": values[name],
            "last run": last.get(name),
            "change": values[name] - last[name] if name in last else None,
        }
        for name in dict.fromkeys([*catalogue.headlines(values), *sorted(values)])
    ]


def page(outcome: Outcome, folder: Path, pages: Mapping[str, str]) -> str:
    """The run on one page, in markdown. `pages`: the addresses in MLflow of `pipeline` and of stages."""
    where = f"commit `{outcome.revision}`"
    if outcome.experiment:
        where += f", experiment `{outcome.name}`: `dvc exp apply {outcome.name}` restores it"
    links = ", ".join(f"[{name}]({pages[key]})" for name, key in PAGES.items() if key in pages)
    parts = [f"# {outcome.name}", *(f"> {note}\n" for note in outcome.notes), f"{where}. {links}"]
    locked = dvc_files.locked(folder)
    stages = [
        {
            "stage": stage,
            "how": outcome.how.get(stage, "–"),
            "MLflow": f"[run]({pages[stage]})" if stage in pages else "–",
            "outs": ", ".join(f"{out} `{locked[out]}`" for out in node.outs if out in locked),
        }
        for stage, node in dvc_files.graph(folder).items()
        if stage != dvc_files.INPUTS
    ]
    sections = {
        "Results": ["\n".join(f"- {line}" for line in outcome.lines), make_table(outcome.criteria)],
        "Changes": ["\n".join(f"- `` {change} ``" for change in outcome.changes)],
        "Stages": [make_table(stages)],
    }
    for title, content in sections.items():
        if any(content):
            parts += [f"## {title}", *filter(None, content)]
    return "\n\n".join(parts) + "\n"

"""The report's page. Its words and the order of its sections are in page.html; here are its values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import STAGES, ReportView, flatten
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, run_facts
from rlhf_tasks.report.document import number
from rlhf_tasks.report.rollouts import Rows
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.curves import CURVES, Curve, Figure, figures, read_csv

RESPONDERS = ("reference", "sft", "policy")  # the origins of judged responses, in the order of the columns
NUM_SAMPLES = 5  # won most, and lost most
NUM_TRAINING_SAMPLES = 3  # of an episode, for the first, middle and last that were kept
JUDGE_FACTS = ("kappa/", "human/", "position_bias", "first_share", "cost/replies", "cost/tokens")
READERS: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    ".json": ("an object of JSON", lambda file: dict(json.loads(file.read_bytes()))),
    ".csv": ("a table of numbers", lambda file: read_csv(file.read_text("utf-8"))),
    ".parquet": ("a Parquet table", lambda file: pq.read_table(file).to_pylist()),
}
"""By suffix, what a file of another stage is, and what reads it."""


def context(paths: Paths, view: ReportView, name: str = "") -> dict[str, Any]:
    """What page.html shows of the project at `paths`, whose parameters are `view`. Equal files, equal values.

    Raises UserError if the results of stage judge are missing, or a file exists and cannot be read.
    """
    stages, missing = [stage for stage in STAGES if stage != "report"], list[str]()

    def read(path: Path) -> Any:
        """The content of a file, or None, and a note, where it is missing."""
        if not path.exists():
            missing.append(paths.relative(path))
            return None
        kind, parse = READERS[path.suffix]
        try:
            return parse(path)
        except PermissionError:
            raise
        except (OSError, ValueError, TypeError) as error:
            # The file, or its folder, is named after the stage that writes it.
            stage = path.stem if path.stem in STAGES else path.parent.name
            raise UserError(f"{path} is not {kind} ({error}); run `rlhf {stage}` again") from None

    judge_folder, ppo_folder = paths.judge_results, paths.ppo_samples
    results = EvaluationResults.read(paths.evaluation_results)
    judged, judge = results.metrics(), results.first_judge
    metrics: dict[str, Any] = {s: found for s in stages if (found := read(paths.metrics(s)))}
    curves = {s: read(paths.curves(s)) or [] for s in CURVES}
    lineage: dict[str, Any] = {s: found for s in stages if (found := read(paths.lineage(s)))}
    if view.data.source != "files":  # then data.path is a dep that no stage reads
        for tree in lineage.values():
            tree.get("inputs", {}).pop(view.data.path, None)
    graph = dvc_files.graph(paths.root) if paths.dvc_yaml.exists() else {}
    makers = {out: stage for stage, node in graph.items() for out in node.outs}
    guards = read(ppo_folder / "guards.json")
    words = catalogue.words_of(view.judge.judges)
    words |= {} if view.ppo.train else {"reward": "models/reward"}  # which nothing optimizes
    parts = ("time/generate_seconds", "time/score_seconds", "time/train_seconds")
    seconds = sum(row.get(part, 0.0) for row in curves["ppo"] for part in parts)
    sampled: Rows = read(ppo_folder / "samples.parquet") or []
    episodes = sorted({row["episode"] for row in sampled})
    some = sorted({episodes[i] for i in (0, len(episodes) // 2, -1)}) if episodes else []
    first, more = document.split(
        figure for stage, points in curves.items() for figure in figures(stage, points, words)
    )
    return {
        # 1. The story.
        "run": run_facts.facts(view, lineage, name, paths.root),
        "view": view,
        "task": run_facts.task(view.data),
        "base": run_facts.base_model(view.model),
        "gate": read(paths.verdict),
        "metrics": metrics,
        "results": results,
        "judge": judge,
        "words": words,
        "duration": run_facts.duration(lineage),
        "ppo_duration": console.duration(seconds) if seconds else None,
        # 2. Samples, and 3. curves.
        "samples": _samples(
            read(paths.judged_responses) or [], read(judge_folder / "comparisons.parquet") or [], judge
        ),
        "first_figures": first,
        "more_figures": more,
        "trips": None if guards is None else guards["trips"],
        # 4. The evidence.
        "judge_facts": {
            document.in_words(f"judge/{name}", words): document.metric(judged, name)
            for name in document.without_ends(judged)
            if any(part in name for part in JUDGE_FACTS)
        },
        "measured": _tabulate_measures(judged, words),
        "trust": _tabulate_trust(metrics.get("reward", {}), judged),
        "audit": read(audit) if (audit := ppo_folder / "audit.json").exists() else {},
        "reward_figures": list(_calibration(read(judge_folder / "calibration.parquet") or [], words)),
        "training_samples": [
            row for at in some for row in [r for r in sampled if r["episode"] == at][:NUM_TRAINING_SAMPLES]
        ],
        "rollouts": read(ppo_folder / "rollouts.parquet") or [],
        "lineage": {stage: _links(tree, makers) for stage, tree in lineage.items()},
        "missing": missing,
    }


def _samples(responses: Rows, comparisons: Rows, judge: str) -> dict[str, Rows]:
    """Prompts on which the policy leads the references most, the one in the middle, and where it lags most.

    It is compared with SFT where the data has no references.
    """
    by_index = {row["index"]: row for row in responses}
    for opponent in ("reference", "sft"):
        found = []
        for row in comparisons:
            pair = row["judge"], row["a"], row["b"]
            own = by_index.get(row["index"])
            outcome = math.nan if row["outcome"] is None else row["outcome"]  # of a judge that failed
            if pair != (judge, "policy", opponent) or own is None or math.isnan(outcome):
                continue
            lead, text = _lead(row)
            texts = [(who, own[who] or "", own.get(f"{judge}/{who}")) for who in RESPONDERS if who in own]
            found.append({**own, "lead": lead, "lead_text": text, "responses": texts})
        if found:
            won = sorted(found, key=lambda one: (-one["lead"], one["index"]))
            lost = sorted(found, key=lambda one: (one["lead"], one["index"]))
            return {
                "Where the policy won most": [one for one in won if one["lead"] > 0][:NUM_SAMPLES],
                "In the middle": [won[len(won) // 2]],
                "Where the policy lost most": [one for one in lost if one["lead"] < 0][:NUM_SAMPLES],
            }
    return {}


def _lead(row: Mapping[str, Any]) -> tuple[float, str]:
    """How far A is ahead: by score; by its mean probability over both orders, less ½; by the bare outcome."""
    orders = [float(p) for name in ("a_shown_first", "a_shown_second") if (p := row.get(name)) is not None]
    lead, text = float(row["outcome"]) - 0.5, ""
    if row["score_a"] is not None and row["score_b"] is not None:
        lead = float(row["score_a"] - row["score_b"])
        text = f" by {number(abs(lead))}"
    elif orders and row["outcome"] != 0.5:
        lead = sum(orders) / len(orders) - 0.5
        text = f" with {document.share(abs(lead) + 0.5)}"
    return lead, f"ahead{text}" if lead > 0 else f"behind{text}" if lead < 0 else "level"


def _tabulate_trust(trained: Mapping[str, float], judged: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """How far the two reward models can be trusted: quantity → model → value."""
    table: dict[str, dict[str, str]] = {}
    for name in document.without_ends(trained):
        model = "reward_heldout" if name.startswith("heldout/") else "reward"
        words = document.in_words(f"reward/{name.removeprefix('heldout/')}")
        table.setdefault(words, {})[model] = document.metric(trained, name)
    for name in document.without_ends(judged):
        kind, model, *_ = name.split("/")
        if kind in ("agreement", "calibration"):
            words = document.in_words(f"judge/{name}").replace(f" of {catalogue.WORDS[model]}", "")
            table.setdefault(words, {})[model] = document.metric(judged, name)
    return dict(sorted(table.items()))


def _tabulate_measures(judged: Mapping[str, float], names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What was measured of each model and of its responses: measure → model → value."""
    table: dict[str, dict[str, str]] = {}
    for name in document.without_ends(judged):
        metric = catalogue.find("judge", name)
        words, _, who = document.in_words(f"judge/{name}", names).rpartition(": ")
        if metric and "MODEL" in metric.placeholders:
            table.setdefault(words, {})[who.lower()] = document.metric(judged, name)
        elif name.startswith("task_drop/"):
            table[document.in_words(f"judge/{name}", names)] = {"policy": document.metric(judged, name)}
    return dict(sorted(table.items()))


def _calibration(rows: Rows, words: Mapping[str, str]) -> Iterator[Figure]:
    """A figure per reward model, with a line per origin of pairs."""
    for model in dict.fromkeys(row["model"] for row in rows):
        curves = []
        for origin in dict.fromkeys(row["origin"] for row in rows if row["model"] == model):
            own = [row for row in rows if (row["model"], row["origin"]) == (model, origin)]
            points = ([row[key] for row in own] for key in ("confidence", "right", "low", "high"))
            curves.append(Curve(catalogue.placeholder_in_words(origin), *points))
        title = f"Calibration: {catalogue.placeholder_in_words(model, words)}"
        yield Figure(title, "", "confidence", curves, guide="y = x")


def _links(tree: Mapping[str, Any], makers: Mapping[str, str]) -> list[tuple[str, str, str | None]]:
    """A stage's lineage: each path that it read with its hash and the stage that wrote it, then the rest."""
    read = [(path, md5, makers.get(path)) for path, md5 in tree.get("inputs", {}).items()]
    rest = flatten({key: value for key, value in tree.items() if key != "inputs"})
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in rest.items()}
    return [*read, *((key, text, None) for key, text in texts.items())]

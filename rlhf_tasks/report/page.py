"""The report's page. Its words and the order of its sections are in page.html; here are its values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_tasks.config import ReportView, flatten
from rlhf_tasks.config.scorers import OPTIMISED
from rlhf_tasks.judging.results import ComparisonResult, EvaluationResults
from rlhf_tasks.report import document, figures, identity
from rlhf_tasks.report.document import number
from rlhf_tasks.report.figures import Curve, Figure
from rlhf_tasks.report.inputs import Inputs, Rows
from rlhf_tasks.tracking import catalogue

RESPONDERS = ("reference", "sft", "policy")
"""The origins of judged responses, in the order of the columns."""
NUM_SAMPLES = 5  # won most, and lost most
NUM_TRAINING_SAMPLES = 3  # of an episode, for the first, middle and last that were kept
OPTIMIZED_JUDGE = " (the reward that PPO optimized: its win rate is no evidence that the policy got better)"
Table = Mapping[str, str]
"""Text by the words for a metric."""


def render(inputs: Inputs, view: ReportView, facts: Mapping[str, str]) -> str:
    """The whole page as one HTML document that loads nothing. Equal inputs give equal text.

    `facts` say which run this is: see `identity.facts`.
    """
    return document.render("page.html", {"run": facts, **context(inputs, view)})


def context(inputs: Inputs, view: ReportView) -> dict[str, Any]:
    """The template's variables."""
    results, judge = inputs.results, leading_judge(inputs.results)
    judged, reward = results.metrics(), inputs.metrics.get("reward", {})
    first, more = figures.split(figures.of_run(inputs.curves))
    return {
        # 1. The story.
        "gate": inputs.verdict,
        "failed": _failed_criteria(inputs.verdict or {"criteria": []}),
        "view": view,
        "base": identity.base_model(view.model),
        "judge_name": document.judge(judge),
        "headlines": {other: results.comparison(judge, "policy", other) for other in ("sft", "reference")},
        "values": inputs.metrics,
        "duration": _duration(inputs),
        "ppo_duration": _ppo_duration(inputs.curves.get("ppo", ())),
        # 2. Samples, and 3. curves.
        "samples": _samples(inputs, judge),
        "first_figures": first,
        "more_figures": more,
        "trips": inputs.trips,
        # 4. The evidence.
        "rates": _rates(results),
        "judge_facts": _facts("judge", judged, "kappa/", "human/", *_compared(results)),
        "measured": _measured(judged),
        "reward_facts": _facts("reward", reward, "")
        | _facts("judge", judged, "agreement/", "calibration/", "reward_gap/"),
        "audit": {
            kind.replace("_", " "): {
                "score": number(one["score"]),
                "beats": document.share(one["beats_reference"]),
            }
            for kind, one in inputs.audit.items()
        },
        "reward_figures": [
            *_diagnostics(
                inputs.calibration,
                "model",
                "origin",
                "confidence",
                "right",
                "Share of pairs that the model orders right, by the probability that it gives its order. "
                "Below the dashed line the model is too confident. Bands are 95% intervals.",
                lambda x: x,
            ),
            *_diagnostics(
                inputs.lengths,
                "judge",
                "who",
                "length",
                "score",
                "Mean score of responses by their length in characters, with its 95% interval. Rising lines "
                "show that length is rewarded; the distance between them is what length does not explain.",
            ),
        ],
        "training_samples": _of_training(inputs.ppo_samples),
        "metrics": {
            stage: {key: document.metric(values, key) for key in document.without_ends(values)}
            for stage, values in inputs.metrics.items()
        },
        "lineage": {stage: _links(tree, inputs.makers) for stage, tree in inputs.lineage.items()},
        "missing": inputs.missing,
    }


def leading_judge(results: EvaluationResults) -> str:
    """The judge of the story: gold if there is one, and none that PPO optimized if there is another."""
    judges = sorted(one.judge for one in results.comparisons)
    return min(judges, key=lambda name: (name != "gold", name in results.optimised_judges), default="")


def _failed_criteria(verdict: Mapping[str, Any]) -> list[str]:
    """The first word of the key of each criterion that failed: `over` of `over_sft/gold`."""
    failed = [one["key"] for one in verdict["criteria"] if not one["passed"]]
    return list(dict.fromkeys(key.partition("/")[0].partition("_")[0] for key in failed))


def _duration(inputs: Inputs) -> str | None:
    """From the start of the first stage to that of the verdict; None if a stage is older than its inputs."""
    times = list(identity.starts(inputs.lineage).values())
    if len(times) < 2 or times != sorted(times):
        return None
    return _span((times[-1] - times[0]).total_seconds())


def _ppo_duration(points: figures.Points) -> str | None:
    names = ("time/generate_seconds", "time/score_seconds", "time/train_seconds")
    seconds = sum(row.get(name, 0.0) for row in points for name in names)
    return _span(seconds) if seconds else None


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.0f} seconds"


# --------------------------------------------------------------------------------------- samples


def _samples(inputs: Inputs, judge: str) -> dict[str, Rows]:
    """Prompts on which the policy leads the references most, the one in the middle, and where it lags most.

    It is compared with SFT where the data has no references.
    """
    by_index = {row["index"]: row for row in inputs.responses}
    for opponent in ("reference", "sft"):
        found = []
        for row in inputs.comparisons:
            pair = row["judge"], row["a"], row["b"]
            if pair != (judge, "policy", opponent) or row["index"] not in by_index or _failed(row):
                continue
            lead, text = _lead(row)
            own = by_index[row["index"]]
            responses = [(who, own[who] or "", own.get(f"{judge}/{who}")) for who in RESPONDERS if who in own]
            found.append({**own, "lead": lead, "lead_text": text, "responses": responses})
        if found:
            found.sort(key=lambda one: (-one["lead"], one["index"]))
            lost = sorted(found, key=lambda one: (one["lead"], one["index"]))
            return {
                "Where the policy won most": [one for one in found if one["lead"] > 0][:NUM_SAMPLES],
                "In the middle": [found[len(found) // 2]],
                "Where the policy lost most": [one for one in lost if one["lead"] < 0][:NUM_SAMPLES],
            }
    return {}


def _failed(row: Mapping[str, Any]) -> bool:
    return row["outcome"] is None or math.isnan(row["outcome"])


def _lead(row: Mapping[str, Any]) -> tuple[float, str]:
    """How far A is ahead: by score; by its mean probability over both orders, less ½; by the bare outcome."""
    orders = [row.get("a_shown_first"), row.get("a_shown_second")]
    if row["score_a"] is not None and row["score_b"] is not None:
        lead = float(row["score_a"] - row["score_b"])
        text = f" by {number(abs(lead))}"
    elif None not in orders and row["outcome"] != 0.5:
        lead = sum(orders) / 2 - 0.5
        text = f" with {document.share(abs(lead) + 0.5)}"
    else:
        lead, text = float(row["outcome"]) - 0.5, ""
    return lead, f"ahead{text}" if lead > 0 else f"behind{text}" if lead < 0 else "level"


def _of_training(rows: Rows) -> Rows:
    """A few samples of PPO's evaluations, at the first, the middle and the last of their episodes."""
    episodes = sorted({row["episode"] for row in rows})
    chosen = sorted({episodes[i] for i in (0, len(episodes) // 2, -1)}) if episodes else []
    return [row for at in chosen for row in [r for r in rows if r["episode"] == at][:NUM_TRAINING_SAMPLES]]


# -------------------------------------------------------------------------------------- evidence


def _rates(results: EvaluationResults) -> dict[str, list[ComparisonResult]]:
    """The comparisons by the judge's name in words, which marks a judge that PPO optimized."""
    groups: dict[str, list[ComparisonResult]] = {}
    for one in sorted(results.comparisons, key=lambda one: one.stem):
        warning = OPTIMIZED_JUDGE if one.judge in results.optimised_judges else ""
        groups.setdefault(f"{document.judge(one.judge)}{warning}", []).append(one)
    return groups


def _compared(results: EvaluationResults) -> list[str]:
    """Metrics of judges that see both responses, which may prefer the first one, and cost replies."""
    names = ("position_bias", "first_share", "cost/replies", "cost/tokens")
    return [f"{one.stem}/{name}" for one in results.comparisons for name in names]


def _facts(stage: str, metrics: Mapping[str, float], *starts: str) -> Table:
    """The metrics whose names start so, with their intervals."""
    names = (name for name in document.without_ends(metrics) if name.startswith(starts))
    return {document.in_words(f"{stage}/{name}"): document.metric(metrics, name) for name in names}


def _measured(judged: Mapping[str, float]) -> Mapping[str, Table]:
    """What was measured of each model and of its responses: measure → model → value."""
    table: dict[str, dict[str, str]] = {}
    for name in document.without_ends(judged):
        metric = catalogue.find("judge", name)
        words, _, who = document.in_words(f"judge/{name}").rpartition(": ")
        if metric and {"ANSWERER", "MODEL"} & {*metric.placeholders}:
            table.setdefault(words, {})[who.lower()] = document.metric(judged, name)
        elif name.startswith("task_drop/"):
            table[document.in_words(f"judge/{name}")] = {"policy": document.metric(judged, name)}
    return dict(sorted(table.items()))


def _diagnostics(
    rows: Rows, by: str, line: str, x: str, y: str, note: str, guide: Callable[[float], float] | None = None
) -> Iterator[Figure]:
    """A figure per value of the column `by`, with a line and its band per value of the column `line`."""
    for one in dict.fromkeys(row[by] for row in rows):
        curves = []
        for name in dict.fromkeys(row[line] for row in rows if row[by] == one):
            own = [row for row in rows if (row[by], row[line]) == (one, name)]
            xs, ys, low, high = ([row[key] for row in own] for key in (x, y, "low", "high"))
            curves.append(Curve(catalogue.placeholder_in_words(name), xs, ys, low, high))
        scorer = "the reward that PPO optimized" if one == OPTIMISED else document.judge(one)
        title = f"{'Calibration' if by == 'model' else 'Score by length'}: {scorer}"
        yield figures.draw(title, note, x, curves, guide=guide)


def _links(tree: Mapping[str, Any], makers: Mapping[str, str]) -> Sequence[tuple[str, str, str | None]]:
    """A stage's lineage: each path that it read with its hash and the stage that wrote it, then the rest."""
    read = [(path, md5, makers.get(path)) for path, md5 in tree.get("inputs", {}).items()]
    rest = flatten({key: value for key, value in tree.items() if key != "inputs"})
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in rest.items()}
    return [*read, *((key, text, None) for key, text in texts.items())]

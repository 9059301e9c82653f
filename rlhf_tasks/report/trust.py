"""Figures of how far the reward models can be trusted: calibration, and score by length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_tasks.config.judge import OPTIMISED
from rlhf_tasks.report import charts
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.inputs import Curve, Rows

MODELS = {"reward": "the reward model that PPO optimises", "reward_heldout": "the held-out reward model"}
ORIGINS = {"given": "given pairs", "sft_samples": "SFT samples", "policy_samples": "policy samples"}


def calibration(rows: Rows, judge: Mapping[str, float]) -> Iterator[Figure]:
    """One figure a model, a line an origin of the pairs; the errors are from metrics/judge.json."""
    for model, own in _grouped(rows, "model").items():
        groups = _grouped(own, "origin")
        curves = [_curve(ORIGINS.get(o, o), part, "confidence", "right") for o, part in groups.items()]
        errors = [
            f"{ORIGINS.get(o, o)} {charts.percent(judge[f'calibration/{model}/{o}'])}"
            for o in groups
            if f"calibration/{model}/{o}" in judge
        ]
        note = (
            "Share of pairs ordered right, by the probability that the model gave to its order; on the "
            "dashed line it means what it says, below it is too sure of itself. Bands are 95% intervals."
        )
        if errors:
            note += f" Expected calibration error: {', '.join(errors)}."
        title = f"Calibration of {MODELS.get(model, model)}"
        svg = charts.line_chart(title, "confidence", curves, diagonal=True)
        yield Figure(title, note, svg, [curve.name for curve in curves])


def lengths(rows: Rows, judge_names: Mapping[str, str], answerers: Mapping[str, str]) -> Iterator[Figure]:
    """One figure a judge that scores, a line for each of `answerers` (names by key), in their order."""
    for judge, own in _grouped(rows, "judge").items():
        groups = _grouped(own, "who")
        curves = [_curve(name, groups[who], "length", "score") for who, name in answerers.items()
                  if who in groups]  # fmt: skip
        whose = "the reward that PPO optimised" if judge == OPTIMISED else judge_names.get(judge, judge)
        note = (
            "Mean score of answers of like length, with its 95% interval. Lines that rise say that length "
            "is rewarded; between the lines is what length does not explain."
        )
        title = f"Score by length: {whose}"
        svg = charts.line_chart(title, "characters", curves)
        yield Figure(title, note, svg, [curve.name for curve in curves])


def _grouped(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(dict(row))
    return groups


def _curve(name: str, rows: Rows, x: str, y: str) -> Curve:
    values = {key: tuple(row[key] for row in rows) for key in (x, y, "low", "high")}
    return Curve(name, values[x], values[y], low=values["low"], high=values["high"])

"""Figures that show how far the reward models can be trusted: calibration, and scores by length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_tasks.config.scorers import OPTIMISED
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.report import charts, names, numbers
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.inputs import Curve, Rows
from rlhf_tasks.tracking.catalogue import placeholder_in_words

CALIBRATION_NOTE = (
    "Share of pairs that the model orders right, by the probability that it gives its order. Below the "
    "dashed line the model is too confident. Bands are 95% intervals."
)
LENGTH_NOTE = (
    "Mean score of responses of similar length, with its 95% interval. Rising lines show that length is "
    "rewarded. The distance between the lines is what length does not explain."
)


def calibration(rows: Rows, results: EvaluationResults) -> Iterator[Figure]:
    """One figure per reward model, with a line per origin of the pairs."""
    errors = {(one.model, one.origin): one.calibration_error for one in results.reward_diagnostics}
    for model, own in _grouped(rows, "model").items():
        groups = _grouped(own, "origin")
        curves = [_curve(placeholder_in_words(o), part, "confidence", "right") for o, part in groups.items()]
        known = [
            f"{placeholder_in_words(o)} {numbers.percent(errors[model, o])}"
            for o in groups
            if (model, o) in errors
        ]
        note = (
            f"{CALIBRATION_NOTE} Expected calibration error: {', '.join(known)}."
            if known
            else CALIBRATION_NOTE
        )
        title = f"Calibration of {placeholder_in_words(model)}"
        svg = charts.line_chart(title, "confidence", curves, diagonal=True)
        yield Figure(title, note, svg, [curve.name for curve in curves])


def lengths(rows: Rows) -> Iterator[Figure]:
    """One figure per judge that scores, with a line for the policy, SFT and the reference."""
    for judge, own in _grouped(rows, "judge").items():
        groups = _grouped(own, "who")
        responders = [who for who in reversed(names.RESPONDERS) if who in groups]
        curves = [_curve(names.model(who), groups[who], "length", "score") for who in responders]
        scorer = "the reward that PPO optimised" if judge == OPTIMISED else names.judge(judge)
        title = f"Score by length: {scorer}"
        svg = charts.line_chart(title, "characters", curves)
        yield Figure(title, LENGTH_NOTE, svg, [curve.name for curve in curves])


def _grouped(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(dict(row))
    return groups


def _curve(name: str, rows: Rows, x: str, y: str) -> Curve:
    values = {key: tuple(row[key] for row in rows) for key in (x, y, "low", "high")}
    return Curve(name, values[x], values[y], low=values["low"], high=values["high"])

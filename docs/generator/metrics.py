"""metrics.md, from the catalogue of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from docs.generator.text import Lines, sentence
from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.catalogue import Metric


def metrics() -> Lines:
    yield "# Metrics"
    yield ""
    yield (
        "Each stage writes its final values to `metrics/STAGE.json` and its curves, where it has any, to "
        "`plots/STAGE.csv`. MLflow holds both under the same names. In MLflow, `final/NAME` is a final value "
        "that differs from the last point of its curve."
    )
    yield ""
    yield "Words in capitals stand for a part of the name:"
    yield ""
    yield from (f"- `{word}`: {meaning}" for word, (_, meaning) in catalogue.PLACEHOLDERS.items())
    for stage in STAGES:
        own = catalogue.metrics(stage)
        if own:
            yield ""
            yield f"## {stage}"
            yield from _metrics_of(stage, own)


def _metrics_of(stage: Stage, own: Sequence[Metric]) -> Lines:
    for panel in catalogue.panels(stage):
        band = "" if panel.band is None else f" Usual range: {panel.band[0]:g} to {panel.band[1]:g}."
        yield ""
        yield f"### {panel.title}"
        if len(panel.metrics) > 1:
            yield ""
            yield panel.note + band
        yield ""
        yield from (_metric(metric) for metric in panel.metrics)
    rest = {
        "Other curves": [metric for metric in own if metric.curve and metric.panel is None],
        "Final values": [metric for metric in own if not metric.curve],
    }
    for title, those in rest.items():
        if those:
            yield ""
            yield f"### {title} of {stage}"
            yield ""
            yield from (_metric(metric) for metric in those)


def _metric(metric: Metric) -> str:
    unit = f" ({metric.unit})" if metric.unit else ""
    parts = [f"- **`{metric.name}`**{unit}: {sentence(metric.formula)}", metric.reading]
    if metric.when:
        parts.append(f"Condition: {metric.when}.")
    if metric.interval:
        parts.append(f"`{metric.name}/low` and `{metric.name}/high` are its 95% interval.")
    if metric.heldout:
        parts.append(f"`heldout/{metric.name}` is the same for models/reward_heldout.")
    return " ".join(part for part in parts if part)

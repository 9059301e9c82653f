"""The figures of the catalogue's panels, drawn from the curves of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rlhf_tasks.config import Stage
from rlhf_tasks.report import charts
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.inputs import Curves
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.catalogue import Panel


def of_stages(curves: Mapping[str, Curves], stages: Sequence[Stage]) -> list[Figure]:
    """One figure for each panel of these stages that has a point."""
    return [
        figure
        for stage in stages
        if stage in curves
        for panel in catalogue.panels(stage)
        for figure in _figure(stage, curves[stage], panel)
    ]


def _figure(stage: Stage, curves: Curves, panel: Panel) -> Iterator[Figure]:
    known = (curves.by_name[name] for name in panel.select(curves.by_name))
    drawn = [replace(curve, name=catalogue.in_words(stage, curve.name)) for curve in known if curve.x]
    if not drawn:
        return
    not_drawn = sum(curve.num_not_finite for curve in drawn)
    note = f"{panel.note} {not_drawn} value(s) are not finite and not drawn." if not_drawn else panel.note
    svg = charts.line_chart(panel.title, curves.axis, drawn, band=panel.band, guide=panel.guide)
    yield Figure(panel.title, note, svg, [curve.name for curve in drawn])

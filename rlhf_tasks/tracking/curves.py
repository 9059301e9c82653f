"""A stage's curves as a CSV table and as one fixed figure. No torch; matplotlib only when drawing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks.config import Stage
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.catalogue import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES: tuple[Stage, ...] = ("base", "sft", "reward", "ppo", "judge")
"""The stages with a plots/STAGE.csv."""
HEADLINES = (
    *(metric.name for metric in catalogue.metrics("ppo") if metric.headline and metric.curve),
    "val/ratio",
)
"""PPO curves copied to the parent run."""


def axis(stage: Stage | None) -> str:
    """What the x axis counts."""
    return "episode" if stage in ("ppo", "judge") else "step"


def results(stage: Stage, values: Mapping[str, float]) -> dict[str, float]:
    """Those of a stage's final values that the run of the pipeline has too, under the names that it uses."""
    names = catalogue.select_headlines(stage, values)
    return {
        name if "/" in name else f"{stage}/{name}": values[name]
        for name in names
        if not (stage == "ppo" and name in HEADLINES)
    }


def csv_text(rows: Sequence[Mapping[str, float]], axis: str) -> str:
    """One column per metric, `axis` first; a cell is empty where a step has no value."""
    names = [axis, *(n for n in dict.fromkeys(name for row in rows for name in row) if n != axis)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_csv(text: str) -> list[dict[str, float]]:
    """The rows that `csv_text` wrote.

    Raises:
        ValueError: if a cell is no number.
    """
    rows = csv.DictReader(io.StringIO(text), restval="no cell")
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def draw(rows: Sequence[Mapping[str, float]], stage: Stage, path: Path) -> None:
    """Write a PNG with the stage's panels that have values; the same rows give the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row))
    drawn = [panel for panel in catalogue.panels(stage) if panel.select(names)]
    width = min(3, max(len(drawn), 1))
    height = math.ceil(max(len(drawn), 1) / width)
    # 780 pixels: MLflow shows a picture in a description as wide as it is, beside the facts of the run.
    figure = Figure(figsize=(2.6 * width, 2.1 * height + 0.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(drawn):
        axes = figure.add_subplot(height, width, index + 1)
        _draw_panel(axes, panel, panel.select(names), rows, axis(stage))
    figure.suptitle(stage)
    figure.savefig(path, metadata={"Software": None})


def _draw_panel(
    axes: Axes, panel: Panel, names: Sequence[str], rows: Sequence[Mapping[str, float]], axis: str
) -> None:
    """One line per metric; a legend names them."""
    for name in names:
        points = [(row[axis], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name, lw=1.2, marker="." if len(points) < 20 else "")
    if panel.guide is not None:
        axes.axhline(panel.guide, color="gray", linewidth=0.8, linestyle="--")
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(axis, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.locator_params(axis="x", nbins=5)
    axes.legend(fontsize=6)
    axes.grid(alpha=0.3)

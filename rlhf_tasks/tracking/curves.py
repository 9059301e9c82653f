"""A stage's curves: the CSV table, MLflow's picture, the report's figures. One function draws the latter two.

No torch; matplotlib only when drawing.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_tasks.config import Stage
from rlhf_tasks.tracking import catalogue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[Mapping[str, float]]  # rows of a plots/STAGE.csv: the x axis first, "step" or "episode"

CURVES: tuple[Stage, ...] = ("ppo", "judge", "value", "dpo", "reward", "sft", "base")
"""The stages with a plots/STAGE.csv, in the order in which a reader needs them."""
PPO_HEADLINES = (
    "objective/kl",
    *(metric.name for metric in catalogue.metrics("ppo") if metric.headline and metric.curve),
    "val/ratio",
)
HEADLINES: Mapping[str, Mapping[str, str]] = {
    "ppo": {name: name for name in PPO_HEADLINES},
    "dpo": {name: f"dpo/{name}" for name in ("eval/heldout_scores", "eval/kl", "eval/loss")},
}
"""Curves of the policy's training that the parent run has too: stage → name → the name there."""
MAX_BUCKETS = 120  # of a line with more than twice as many points
COLORS = {
    "ahead": "#1f6f66",
    "second": "#b4762a",
    "soft": "#5c646d",
    "third": "#6a4fa3",
    "fourth": "#b03a6f",
    "ink": "#22262b",
    "rule": "#dfdcd3",
    "band": "#e4efe6",
}  # by their names in the report's style sheet; first those of the lines, of which a figure has six at most
STYLE: Any = {
    "axes.prop_cycle": f"cycler(color={list(COLORS.values())[:6]}, linestyle={['-', '--', ':'] * 2})",
    "font.sans-serif": "DejaVu Sans",  # which matplotlib brings
    "axes.grid": True,
    "grid.color": COLORS["rule"],
    "axes.edgecolor": COLORS["soft"],
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top", "ytick.left"), False),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), COLORS["soft"]),
    "axes.xmargin": 0.01,
    "lines.linewidth": 1.8,
    "lines.solid_joinstyle": "round",
}


def axis(stage: Stage) -> str:
    """What the x axis counts."""
    return "episode" if stage in ("ppo", "judge") else "step"


def results(stage: Stage, values: Mapping[str, float]) -> dict[str, float]:
    """Those of a stage's final values that the run of the pipeline has too, under the names that it uses."""
    names = catalogue.select_headlines(stage, values)
    return {
        name if "/" in name else f"{stage}/{name}": values[name]
        for name in names
        if name not in HEADLINES.get(stage, ())
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
    """The rows that `csv_text` wrote. Raises ValueError if a cell is no number."""
    rows = csv.DictReader(io.StringIO(text), restval="no cell")
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


@dataclass(frozen=True)
class Curve:
    """One line: finite points in order. `low` and `high`, if not empty, are a band around each point."""

    name: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def condense(self) -> Curve:
        """The curve with at most 2 × MAX_BUCKETS points. A longer one is reduced to the means of buckets.

        The band goes from a bucket's lowest to its highest value, so that no spike is lost.
        """
        import numpy as np

        if len(self.x) <= 2 * MAX_BUCKETS:
            return self
        columns = (self.x, self.y, self.low or self.y, self.high or self.y)
        x, y, low, high = (np.array_split(np.asarray(column), MAX_BUCKETS) for column in columns)
        return Curve(
            self.name,
            [float(part.mean()) for part in x],
            [float(part.mean()) for part in y],
            [float(part.min()) for part in low],
            [float(part.max()) for part in high],
        )


@dataclass(frozen=True)
class Figure:
    """Curves over one x axis, at least one of them with a point.

    Args:
        title: What the curves are.
        note: How to read them.
        axis: The name of the x axis.
        curves: Each is drawn with its own band, if it has one. A curve without points keeps its color.
        band: A range of y that is shaded, as far as it is in the plot.
        guide: The y of a dashed line, or the diagonal.
    """

    title: str
    note: str
    axis: str
    curves: Sequence[Curve]
    band: tuple[float, float] | None = None
    guide: float | Literal["y = x"] | None = None


def figures(stage: Stage, points: Points, words: Mapping[str, str] = catalogue.WORDS) -> Iterator[Figure]:
    """A figure for each panel of the catalogue that has a finite point; `words` are those of the judges."""
    known = list(dict.fromkeys(name for row in points for name in row))  # the x axis first
    for panel in catalogue.panels(stage):
        curves, num_lost = list[Curve](), 0
        for name in panel.select(known):
            values = [(row[known[0]], row[name]) for row in points if name in row]
            finite = [(x, y) for x, y in values if math.isfinite(y)]
            num_lost += len(values) - len(finite)
            curves.append(Curve(catalogue.in_words(stage, name, words), *zip(*finite, strict=True)))
        if any(curve.x for curve in curves):
            lost = f" {num_lost} value(s) are not finite and not drawn." if num_lost else ""
            yield Figure(panel.title, panel.note + lost, known[0], curves, panel.band, panel.guide)


def draw(points: Points, stage: Stage, path: Path) -> None:
    """Write a PNG with the stage's figures; the same points give the same bytes."""
    import matplotlib as mpl
    from matplotlib import figure

    panels = list(figures(stage, points))
    width = min(3, max(len(panels), 1))
    height = math.ceil(max(len(panels), 1) / width)
    with mpl.rc_context(STYLE | {"font.size": 7.5, "lines.linewidth": 1.3}):
        # 780 pixels: MLflow shows a picture in a description as wide as it is, beside the facts of the run.
        picture = figure.Figure(figsize=(2.6 * width, 2.1 * height + 0.4), dpi=100, layout="constrained")
        for index, panel in enumerate(panels):
            axes = picture.add_subplot(height, width, index + 1)
            _draw(axes, panel)
            axes.set_title(panel.title)
            axes.legend(fontsize=6)
        picture.suptitle(stage)
        picture.savefig(path, metadata={"Software": None})


def draw_svg(one: Figure) -> str:
    """What is inside an SVG element of 360 × 220; the same figure gives the same text.

    It is about as large as on a phone, so that labels stay readable there. Colors are CSS variables with the
    names of `COLORS`, so that one figure serves light and dark pages. No id is that of another figure.
    """
    import matplotlib as mpl
    from matplotlib import figure

    text = io.StringIO()
    with mpl.rc_context(STYLE | {"font.size": 11.5, "svg.fonttype": "none", "svg.hashsalt": repr(one)}):
        picture = figure.Figure(figsize=(5, 220 / 72), layout="constrained")
        _draw(picture.add_subplot(), one)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        picture.savefig(text, format="svg", transparent=True, metadata=nothing)
    inside = text.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]  # the first is a style of all
    inside = re.sub(r'<g id="[^"]*"', "<g", inside)
    for name, color in COLORS.items():
        inside = inside.replace(color, f"var(--{name})")
    return inside


def _draw(axes: Axes, figure: Figure) -> None:
    xs = [x for curve in figure.curves for x in curve.x]
    for curve in (curve.condense() for curve in figure.curves):
        marker = "o" if len(curve.x) == 1 else ""
        (line,) = axes.plot(curve.x, curve.y, label=curve.name, marker=marker)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.16, linewidth=0)
    guide: Any = {"color": COLORS["soft"], "linewidth": 1, "linestyle": "--"}
    if figure.guide == "y = x":
        axes.plot(ends := (min(xs), max(xs)), ends, **guide)
    elif figure.guide is not None:
        axes.axhline(figure.guide, **guide)
    axes.set_ylim(axes.get_ylim())  # the band does not stretch it
    if figure.band:
        axes.axhspan(*figure.band, color=COLORS["band"], linewidth=0, zorder=0)
    axes.set_xlabel(figure.axis)
    axes.locator_params(nbins=5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.ticklabel_format(axis="y", useOffset=False)

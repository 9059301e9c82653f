"""Figures of curves: the geometry; the macro `chart` of macros.html draws it as SVG.

Colors come from the style sheet by class, so that one figure serves light and dark pages. Figures are about
as large as on a phone, so that labels stay readable there. matplotlib fixes colors, and is slow for twenty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from rlhf_tasks.config import Stage
from rlhf_tasks.report.document import number
from rlhf_tasks.tracking import catalogue

STAGES: tuple[Stage, ...] = ("ppo", "judge", "reward", "sft", "base")
"""The stages with curves, in the order in which a reader needs them."""
NUM_FIRST = 3  # figures of PPO that a page shows unfolded: KL, reward, clip fraction
LEFT, RIGHT, TOP, BOTTOM = 48, 346, 12, 182  # edges of the plot, in an image of 360 × 220
ROUNDING = 1e-4  # of a step: a value this far outside of a tick, such as a KL of −1e-7, needs no other
MAX_BUCKETS = 120  # of a line with more than twice as many points

Points = Sequence[Mapping[str, float]]
"""Rows of a plots/STAGE.csv: the x axis first, "step" or "episode"."""


@dataclass(frozen=True)
class Curve:
    """One line: finite points in order. `low` and `high`, if not empty, are a band around each point."""

    name: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @property
    def condensed(self) -> Curve:
        """The curve with at most 2 × MAX_BUCKETS points. A longer one is reduced to the means of buckets.

        The band goes from a bucket's lowest to its highest value, so that no spike is lost.
        """
        count = len(self.x)
        if count <= 2 * MAX_BUCKETS:
            return self
        ends = [k * count // MAX_BUCKETS for k in range(MAX_BUCKETS + 1)]
        parts = [slice(start, end) for start, end in pairwise(ends)]
        return replace(
            self,
            x=[statistics.fmean(self.x[part]) for part in parts],
            y=[statistics.fmean(self.y[part]) for part in parts],
            low=[min((self.low or self.y)[part]) for part in parts],
            high=[max((self.high or self.y)[part]) for part in parts],
        )


@dataclass(frozen=True)
class Figure:
    """Curves over one x axis, at least one of them with a point.

    Args:
        title: It and the ends of the curves are the text for readers who do not see the figure.
        note: How to read it.
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

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest x."""
        xs = [x for curve in self.curves for x in curve.x]
        return min(xs), max(xs)

    @cached_property
    def guide_ends(self) -> Sequence[float]:
        """The y of the guide at the ends."""
        return () if self.guide is None else self.ends if isinstance(self.guide, str) else [self.guide] * 2

    @cached_property
    def y_ticks(self) -> dict[float, str]:
        ys = [y for curve in self.curves for y in (*curve.y, *curve.low, *curve.high)]
        return ticks(min([*ys, *self.guide_ends]), max([*ys, *self.guide_ends]))

    @property
    def x_ticks(self) -> dict[float, str]:
        low, high = self.ends
        return {x: text for x, text in ticks(low, high).items() if low <= x <= high}

    def x(self, value: float) -> float:
        """The x of a value in the image."""
        low, high = self.ends
        share = (value - low) / (high - low) if high > low else 0.5
        return round(LEFT + (RIGHT - LEFT) * share, 1)

    def y(self, value: float) -> float:
        low, high = min(self.y_ticks), max(self.y_ticks)
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in zip(xs, ys, strict=True))

    @property
    def text(self) -> str:
        values = (
            f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}, lowest {number(min(c.y))}, "
            f"highest {number(max(c.y))}"
            for c in self.curves
            if c.y
        )
        return f"{self.title}, by {self.axis}: {'; '.join(values)}"


def ticks(low: float, high: float, count: int = 5) -> dict[float, str]:
    """About `count` round values from at most `low` to at least `high`, with their labels.

    Steps are 1, 2 or 5 × 10^k. Labels have as many decimals as the step needs: 0.00, 0.05; 1e−6.
    """
    if high <= low:
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + ROUNDING), math.ceil(high / step - ROUNDING)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    found = {}
    for value in (k * step for k in range(first, last + 1)):
        text = f"{value:,.{decimals}f}" if decimals < 5 else f"{value:.12g}".replace("e-0", "e-")
        found[value] = text.replace("-", "−")
    return found


def split(found: Iterable[Figure]) -> tuple[list[Figure], list[Figure]]:
    """Figures in the order of `STAGES`: those that a page shows at once, and the rest."""
    titles = [panel.title for panel in catalogue.panels("ppo")[:NUM_FIRST]]
    first, more = list[Figure](), list[Figure]()
    for figure in found:
        (first if figure.title in titles else more).append(figure)
    return first, more


def of_run(curves: Mapping[str, Points]) -> Iterator[Figure]:
    """A figure for each panel of the catalogue that has a point; `curves` by stage."""
    for stage, points in ((stage, curves.get(stage, ())) for stage in STAGES):
        known = list(dict.fromkeys(name for row in points for name in row))  # the x axis first
        for panel in catalogue.panels(stage):
            drawn, num_lost = list[Curve](), 0
            for name in panel.select(known):
                values = [(row[known[0]], row[name]) for row in points if name in row]
                finite = [(x, y) for x, y in values if math.isfinite(y)]
                num_lost += len(values) - len(finite)
                drawn.append(Curve(catalogue.in_words(stage, name), *zip(*finite, strict=True)))
            if any(curve.x for curve in drawn):
                lost = f" {num_lost} value(s) are not finite and not drawn." if num_lost else ""
                yield Figure(panel.title, panel.note + lost, known[0], drawn, panel.band, panel.guide)

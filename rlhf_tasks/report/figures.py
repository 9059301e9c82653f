"""The drawer: curves as inline SVG, and the figures of the catalogue's panels.

Colors come from the page's style sheet by class, so that one figure serves light and dark pages. Figures are
about as large as on a phone, so that labels stay readable there. Coordinates have one decimal, so that equal
numbers give equal bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup

from rlhf_tasks.config import Stage
from rlhf_tasks.report.document import number
from rlhf_tasks.tracking import catalogue

STAGES: tuple[Stage, ...] = ("ppo", "judge", "reward", "sft", "base")
"""The stages with curves, in the order in which a reader needs them."""
NUM_FIRST = 3  # figures of PPO that a page shows unfolded: KL, reward, clip fraction
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 346, 12, 182  # edges of the plot
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


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, a note on how to read it, and the names of its lines."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[str]


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
        known = dict.fromkeys(name for row in points for name in row)
        for panel in catalogue.panels(stage):
            drawn, num_lost = list[Curve](), 0
            for name in panel.select(known):
                values = [(x_of(row), row[name]) for row in points if name in row]
                finite = [(x, y) for x, y in values if math.isfinite(y)]
                num_lost += len(values) - len(finite)
                drawn.append(Curve(catalogue.in_words(stage, name), *zip(*finite, strict=True)))
            if any(curve.x for curve in drawn):
                lost = f" {num_lost} value(s) are not finite and not drawn." if num_lost else ""
                yield of_panel(panel, panel.note + lost, next(iter(known)), drawn)


def x_of(row: Mapping[str, float]) -> float:
    """The value of the x axis, which comes first in a row."""
    return next(iter(row.values()))


def of_panel(panel: catalogue.Panel, note: str, axis: str, curves: Sequence[Curve]) -> Figure:
    guide = None if (level := panel.guide) is None else (lambda _: level)
    return draw(panel.title, note, axis, curves, band=panel.band, guide=guide)


# --------------------------------------------------------------------------------------- drawing


def draw(
    title: str,
    note: str,
    axis: str,
    curves: Sequence[Curve],
    *,
    band: tuple[float, float] | None = None,
    guide: Callable[[float], float] | None = None,
) -> Figure:
    """Curves over one x axis.

    Args:
        title: It and the ends of the curves are the text for readers who do not see the figure.
        note: How to read it.
        axis: The name of the x axis.
        curves: Each is drawn with its own band, if it has one. A curve without points keeps its color.
        band: A range of y that is shaded, as far as it is among the values.
        guide: The y of a dashed line at each x.

    Raises:
        ValueError: if no curve has a point.
    """
    xs = [x for curve in curves for x in curve.x]
    if not xs:
        raise ValueError(f"nothing to draw in {title!r}")
    ys = [y for curve in curves for y in (*curve.y, *curve.low, *curve.high)]
    low_x, high_x = min(xs), max(xs)
    ys += [guide(low_x), guide(high_x)] if guide else []
    y_ticks = ticks(min(ys), max(ys))
    low_y, high_y = y_ticks[0], y_ticks[-1]

    def to_x(value: float) -> float:
        share = (value - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return LEFT + (RIGHT - LEFT) * share

    def to_y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low_y) / (high_y - low_y)

    def path(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in zip(xs, ys, strict=True))

    # 1. The background: band, axes, guide.
    parts = []
    if band and band[0] < high_y and band[1] > low_y:
        top, bottom = to_y(min(band[1], high_y)), to_y(max(band[0], low_y))
        parts.append(_tag("rect", "band", x=LEFT, y=top, width=RIGHT - LEFT, height=bottom - top))
    for y, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        parts.append(_line("grid", LEFT, to_y(y), RIGHT, to_y(y)))
        parts.append(_text(LEFT - 7, to_y(y) + 3.8, "end", text))
    parts.append(_line("axis", LEFT, BOTTOM, RIGHT, BOTTOM))
    x_ticks = [x for x in ticks(low_x, high_x, 4) if low_x <= x <= high_x] or [low_x]
    for x, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        parts.append(_line("axis", to_x(x), BOTTOM, to_x(x), BOTTOM + 4))
        parts.append(_text(to_x(x), BOTTOM + 16, "middle" if to_x(x) < RIGHT - 10 else "end", text))
    parts.append(_text((LEFT + RIGHT) / 2, HEIGHT - 5, "middle", axis))
    if guide:
        parts.append(_line("guide", LEFT, to_y(guide(low_x)), RIGHT, to_y(guide(high_x))))

    # 2. The bands of the curves, then the curves; a dot and a whisker for a single point.
    drawn = [_condensed(curve) for curve in curves]
    for order, curve in enumerate(drawn):
        if len(curve.low) > 1:
            around = f"{path(curve.x, curve.high)} {path(curve.x[::-1], curve.low[::-1])}"
            parts.append(_tag("polygon", f"ribbon s{order}", points=around))
        elif curve.low:
            x = to_x(curve.x[0])
            parts.append(_line(f"line s{order}", x, to_y(curve.low[0]), x, to_y(curve.high[0])))
    for order, curve in enumerate(drawn):
        if len(curve.x) > 1:
            parts.append(_tag("polyline", f"line s{order}", points=path(curve.x, curve.y)))
        elif curve.x:
            parts.append(_tag("circle", f"dot s{order}", cx=to_x(curve.x[0]), cy=to_y(curve.y[0]), r=3))

    # 3. The same as text.
    ends = "; ".join(
        f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}, lowest {number(min(c.y))}, "
        f"highest {number(max(c.y))}"
        for c in curves
        if c.y
    )
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, f"{title}, by {axis}: {ends}", Markup("").join(parts)
    )
    return Figure(title, note, svg, [curve.name for curve in curves])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values from at most `low` to at least `high`; steps are 1, 2 or 5 × 10^k."""
    if high <= low:
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + ROUNDING), math.ceil(high / step - ROUNDING)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of one axis, with as many decimals as its step needs: 0.00, 0.05; 1e−6."""
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    texts = [f"{v:,.{decimals}f}" if decimals < 5 else f"{v:.2g}".replace("e-0", "e-") for v in values]
    return [text.replace("-", "−") for text in texts]


def _condensed(curve: Curve) -> Curve:
    """A curve of at most 2 × MAX_BUCKETS points. A longer one is reduced to the means of buckets.

    The band goes from a bucket's lowest to its highest value, so that no spike is lost.
    """
    count = len(curve.x)
    if count <= 2 * MAX_BUCKETS:
        return curve
    ends = [k * count // MAX_BUCKETS for k in range(MAX_BUCKETS + 1)]
    parts = [slice(start, end) for start, end in pairwise(ends)]
    return replace(
        curve,
        x=[statistics.fmean(curve.x[part]) for part in parts],
        y=[statistics.fmean(curve.y[part]) for part in parts],
        low=[min((curve.low or curve.y)[part]) for part in parts],
        high=[max((curve.high or curve.y)[part]) for part in parts],
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return _tag("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)


def _tag(tag: str, kind: str, **attributes: float | str) -> Markup:
    """An element of one of the style sheet's classes."""
    texts = {k: v if isinstance(v, str) else f"{v:.1f}" for k, v in {"class": kind, **attributes}.items()}
    inside = Markup(" ").join(Markup('{}="{}"').format(key, text) for key, text in texts.items())
    return Markup("<{} {}/>").format(Markup(tag), inside)


def _text(x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)

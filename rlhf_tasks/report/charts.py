"""Figures as inline SVG: a line chart, a win-rate bar, a band gauge. Text in, escaped markup out.

Colours come from the page's style sheet by class, so that one figure serves light and dark pages. Figures
are about as large as on a phone, so that labels stay readable there. Coordinates have one decimal, so that
equal numbers give equal bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup

from rlhf_tasks.report.inputs import Curve
from rlhf_tasks.report.numbers import number, percent

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 38
ROUNDING = 1e-4  # of a step: a value this far outside of a tick, such as a KL of −1e-7, needs no other
MAX_BUCKETS = 120  # of a line with more than twice as many points


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, a note on how to read it, and the names of its lines."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[str]


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
    """Labels of one axis, with as many decimals as its step needs: 0, 2k, 4k; 0.00, 0.05; 1e−6."""
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    largest = max((abs(v) for v in values), default=0.0)
    if largest and largest < 1e-3:
        return [f"{v:.2g}".replace("e-0", "e-").replace("-", "−") if v else "0" for v in values]
    unit, suffix = next(
        ((u, s) for u, s in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 2 * u), (1, "")
    )
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [f"{v / unit:.{decimals}f}{suffix if v else ''}".replace("-", "−") for v in values]


def _condensed(curve: Curve) -> Curve:
    """A curve of at most 2 × MAX_BUCKETS points. A longer one is reduced to the means of buckets.

    The band goes from a bucket's lowest to its highest value, so that no spike is lost.
    """
    count = len(curve.x)
    if count <= 2 * MAX_BUCKETS:
        return curve
    ends = [k * count // MAX_BUCKETS for k in range(MAX_BUCKETS + 1)]
    parts = [slice(start, end) for start, end in pairwise(ends)]

    def means(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(statistics.fmean(values[part]) for part in parts)

    low, high = curve.low or curve.y, curve.high or curve.y
    return replace(
        curve,
        x=means(curve.x),
        y=means(curve.y),
        low=tuple(min(low[part]) for part in parts),
        high=tuple(max(high[part]) for part in parts),
    )


@dataclass(frozen=True)
class _Frame:
    """Maps the values of a line chart to its coordinates."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        span = (self.high_x - self.low_x) or 1.0
        share = (value - self.low_x) / span if self.high_x > self.low_x else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, value: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - height * (value - self.low_y) / (self.high_y - self.low_y)


def line_chart(
    label: str,
    axis: str,
    curves: Sequence[Curve],
    *,
    band: tuple[float, float] | None = None,
    guide: float | None = None,
    diagonal: bool = False,
) -> Markup:
    """Curves over one x axis.

    Args:
        label: The figure's text for readers who do not see it; the ends of the curves are appended.
        axis: The name of the x axis.
        curves: Each is drawn with its own band, if it has one.
        band: A range of y that is shaded, as far as it is among the values.
        guide: The y of a dashed line.
        diagonal: Whether to draw a dashed line on which y equals x.

    Raises:
        ValueError: if no curve has a point.
    """
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in (*curve.y, *curve.low, *curve.high)]
    if not xs:
        raise ValueError(f"nothing to draw in {label!r}")
    shown = [*ys, *([guide] if guide is not None else [])]
    shown += [min(xs), max(xs)] if diagonal else []
    y_ticks = ticks(min(shown), max(shown))
    frame = _Frame(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    parts = _background(frame, axis, y_ticks, band, guide)
    if diagonal:
        low, high = frame.low_x, frame.high_x
        parts.append(_line("guide", frame.x(low), frame.y(low), frame.x(high), frame.y(high)))
    drawn = [_condensed(curve) for curve in curves]
    for order, curve in enumerate(drawn):
        parts += _ribbon(order, curve, frame)
    for order, curve in enumerate(drawn):
        points = [(frame.x(x), frame.y(y)) for x, y in zip(curve.x, curve.y, strict=True)]
        parts += _curve(order, points)
    return _svg("chart", WIDTH, HEIGHT, f"{label}, by {axis}: {_ends(curves)}", parts)


def _background(
    frame: _Frame,
    axis: str,
    y_ticks: Sequence[float],
    band: tuple[float, float] | None,
    guide: float | None,
) -> list[Markup]:
    """The shaded band, both axes, and the guide."""
    parts = []
    if band and band[0] < frame.high_y and band[1] > frame.low_y:
        top, bottom = frame.y(min(band[1], frame.high_y)), frame.y(max(band[0], frame.low_y))
        rectangle = Markup('<rect class="band" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>')
        parts.append(rectangle.format(LEFT, top, WIDTH - LEFT - RIGHT, bottom - top))
    parts += _y_axis([(frame.y(y), text) for y, text in zip(y_ticks, tick_labels(y_ticks), strict=True)])
    low, high = frame.low_x, frame.high_x
    x_ticks = [x for x in ticks(low, high, 4) if low <= x <= high] or [low]
    parts += _x_axis(
        [(frame.x(x), text) for x, text in zip(x_ticks, tick_labels(x_ticks), strict=True)], axis
    )
    if guide is not None:
        parts.append(_line("guide", LEFT, frame.y(guide), WIDTH - RIGHT, frame.y(guide)))
    return parts


def _ends(curves: Sequence[Curve]) -> str:
    """The first, last, lowest and highest value of each curve, as text."""
    return "; ".join(
        f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}, lowest {number(min(c.y))}, "
        f"highest {number(max(c.y))}"
        for c in curves
        if c.y
    )


def _ribbon(order: int, curve: Curve, frame: _Frame) -> list[Markup]:
    """The band around a curve; a whisker if the curve is a single point."""
    if not curve.low:
        return []
    if len(curve.x) == 1:
        x = frame.x(curve.x[0])
        return [_line(f"line s{order}", x, frame.y(curve.low[0]), x, frame.y(curve.high[0]))]
    above = [(frame.x(x), frame.y(y)) for x, y in zip(curve.x, curve.high, strict=True)]
    below = [(frame.x(x), frame.y(y)) for x, y in zip(curve.x, curve.low, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*above, *reversed(below)])
    return [Markup('<polygon class="ribbon s{}" points="{}"/>').format(order, path)]


def _curve(order: int, points: list[tuple[float, float]]) -> list[Markup]:
    if len(points) == 1:
        return [Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(order, *points[0])]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [Markup('<polyline class="line s{}" points="{}"/>').format(order, path)] if points else []


def _y_axis(marks: Sequence[tuple[float, str]]) -> list[Markup]:
    parts = []
    for y, text in marks:
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 7, y + 3.8, "end", text))
    return parts


def _x_axis(marks: Sequence[tuple[float, str]], name: str) -> list[Markup]:
    floor = HEIGHT - BOTTOM
    parts = [_line("axis", LEFT, floor, WIDTH - RIGHT, floor)]
    for x, text in marks:
        parts.append(_line("axis", x, floor, x, floor + 4))
        anchor = "end" if x > WIDTH - RIGHT - 10 else "middle"
        parts.append(_text(x if anchor == "middle" else WIDTH - RIGHT + 4, floor + 16, anchor, text))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "middle", name))
    return parts


def rate_bar(label: str, value: float, low: float, high: float, tone: str) -> Markup:
    """A win rate as a bar from 0 to 100% with its interval; the dashed line is 50%.

    `tone` is the style sheet's "ahead", "behind" or "level".
    """

    def to_x(share: float) -> float:
        return 8 + 224 * share

    parts = [
        _line("axis", to_x(0), 2, to_x(0), 26),
        Markup('<rect class="track" x="8" y="7" width="224" height="14" rx="2"/>'),
        Markup('<rect class="bar {}" x="8" y="7" width="{:.1f}" height="14" rx="2"/>').format(
            tone, 224 * value
        ),
        _line("half", to_x(0.5), 2, to_x(0.5), 26),
        _line("whisker", to_x(low), 14, to_x(high), 14),
        _line("whisker", to_x(low), 10, to_x(low), 18),
        _line("whisker", to_x(high), 10, to_x(high), 18),
    ]
    text = f"{label}: {percent(value)}, 95% interval {percent(low)} to {percent(high)}"
    return _svg("rate", 240, 28, text, parts)


def rate_scale() -> Markup:
    """The scale above a column of `rate_bar`s; screen readers skip it, because they read the numbers."""
    marks = ((0, "start", "0%"), (0.5, "middle", "50%"), (1, "end", "100%"))
    parts = [_text(8 + 224 * at, 13, anchor, text) for at, anchor, text in marks]
    body = Markup("").join(parts)
    return Markup(
        '<svg class="rate" viewBox="0 0 240 16" width="240" height="16" aria-hidden="true">{}</svg>'
    ).format(body)


def gauge(label: str, value: float, band: tuple[float, float]) -> Markup:
    """A value on a scale that contains it and the shaded band."""
    marks = ticks(min(value, band[0]), max(value, band[1] * 1.2), 6)
    low, high = marks[0], marks[-1]

    def to_x(x: float) -> float:
        return 12 + 236 * (x - low) / (high - low)

    parts = [
        Markup('<rect class="band" x="{:.1f}" y="8" width="{:.1f}" height="14"/>').format(
            to_x(band[0]), to_x(band[1]) - to_x(band[0])
        ),
        _line("axis", to_x(low), 22, to_x(high), 22),
    ]
    for x, text in zip(marks, tick_labels(marks), strict=True):
        parts += [_line("axis", to_x(x), 22, to_x(x), 26), _text(to_x(x), 38, "middle", text)]
    parts.append(_line("needle", to_x(value), 3, to_x(value), 22))
    return _svg("gauge", 260, 42, label, parts)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
        kind, x1, y1, x2, y2
    )


def _text(x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _svg(kind: str, width: int, height: int, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">{}</svg>'
    ).format(kind, width, height, width, height, label, Markup("").join(parts))

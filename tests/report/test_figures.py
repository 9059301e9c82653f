"""Ticks, labels and the geometry of the figures."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rlhf_tasks.report import document, figures
from rlhf_tasks.report.figures import Curve
from tests.report import workspace


def curve(*points: tuple[float, float], name: str = "m") -> Curve:
    return Curve(name, [x for x, _ in points], [y for _, y in points])


def draw(title: str, axis: str, curves: list[Curve], **marks: Any) -> str:
    figure = figures.Figure(title, "", axis, curves, **marks)
    template = '{% from "macros.html" import chart %}{{ chart(figure) }}'
    return document.environment().from_string(template).render(figure=figure)


def drawn(svg: str) -> list[tuple[float, float]]:
    """The points of the first line in a chart."""
    match = re.search(r'<polyline class="line s0" points="([^"]+)"', svg)
    assert match
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in match[1].split())]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.3, 4.7, [0, 1, 2, 3, 4, 5]),
        (-0.03, 0.02, [-0.03, -0.02, -0.01, 0, 0.01, 0.02]),
        (7, 7, [6, 6.5, 7, 7.5, 8]),
        (-1e-7, 3.2, [0, 1, 2, 3, 4]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low: float, high: float, expected: list[float]) -> None:
    """Up to rounding: a KL starts a little below 0."""
    marks = list(figures.ticks(low, high))
    assert marks == pytest.approx(expected)
    assert marks[0] - 1e-6 <= low <= high <= marks[-1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 4000, ["0", "1,000", "2,000", "3,000", "4,000"]),
        (-0.05, 0.05, ["−0.06", "−0.04", "−0.02", "0.00", "0.02", "0.04", "0.06"]),
        (0, 2e-6, ["0", "5e−7", "1e−6", "1.5e−6", "2e−6"]),
    ],
)
def test_labels_have_the_decimals_their_step_needs(low: float, high: float, expected: list[str]) -> None:
    assert list(figures.ticks(low, high).values()) == expected


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (8192.0, None, "8,192"),
        (-0.5, None, "−0.500"),
        (0.81234, None, "0.812"),
        (99.96, None, "100"),
        (12345.678, None, "12,346"),
        (math.nan, None, "not a number"),
        (2.1005, 0.0712, "2.10 ± 0.07"),
        (2.1005, 0.0, "2.10"),
        (1234.5, 30.0, "1,234 ± 30"),
    ],
)
def test_numbers_have_the_digits_that_their_error_deserves(
    value: float, error: float | None, expected: str
) -> None:
    assert document.number(value, error) == expected


def test_an_interval_decides_the_digits_and_no_end_is_rounded_to_one_half() -> None:
    assert document.interval(workspace.interval(0.6592, 0.6373, 0.6821)) == "0.66 (0.64 to 0.68)"
    assert document.interval(workspace.interval(1.0)) == "1.000 (1.000 to 1.000)"
    assert document.share(workspace.interval(0.7125, 0.684, 0.741)) == "71% (68% to 74%)"
    assert document.share(workspace.interval(0.97, 0.9614, 0.9786)) == "97.0% (96.1% to 97.9%)"
    assert document.share(workspace.interval(0.53, 0.5021, 0.56)) == "53.0% (50.2% to 56.0%)"
    assert document.share(0.125) == "12.5%"


def test_a_line_goes_from_edge_to_edge_and_larger_values_are_higher() -> None:
    points = drawn(draw("x", "step", [curve((0, 0), (5, 10), (10, 5))]))
    left, right = figures.LEFT, figures.RIGHT
    top, floor = figures.TOP, figures.BOTTOM
    assert points == [(left, floor), ((left + right) / 2, top), (right, (top + floor) / 2)]


def test_a_band_covers_its_range_of_the_axis() -> None:
    svg = draw("KL", "episode", [curve((0, 1), (1, 20))], band=(0, 10))
    match = re.search(r'<rect class="band" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
    assert match
    assert float(match[2]) == pytest.approx((figures.BOTTOM - figures.TOP) / 2, abs=0.1)


def test_the_axis_fits_the_curve_and_the_band_is_shaded_as_far_as_it_is_seen() -> None:
    svg = draw("KL", "episode", [curve((0, 0), (1, 2))], band=(0, 10))
    match = re.search(r'<rect class="band" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
    assert match
    assert float(match[1]) == figures.TOP
    assert float(match[2]) == figures.BOTTOM - figures.TOP, "all of 0 to 2"
    assert drawn(svg)[-1][1] == figures.TOP, "2 is at the top, not a fifth of the way up"
    beyond = draw("KL", "episode", [curve((0, 20), (1, 30))], band=(0, 10))
    match = re.search(r'<rect class="band" x="\S+" y="\S+" width="\S+" height="(\S+)"', beyond)
    assert match
    assert float(match[1]) == 0


def test_a_long_line_is_drawn_as_means_with_a_band_that_keeps_a_spike() -> None:
    steps = 24_000  # 200 to a bucket
    points = [(float(k), 100.0 if k == 12_345 else float(k % 2)) for k in range(steps)]
    svg = draw("x", "step", [curve(*points)])
    line = drawn(svg)
    assert len(line) == figures.MAX_BUCKETS
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    match = re.search(r'<polygon class="ribbon s0" points="([^"]+)"', svg)
    assert match
    heights = [float(pair.split(",")[1]) for pair in match[1].split()]
    assert min(heights) == figures.TOP, "100 is the top tick"
    floor, height = figures.BOTTOM, figures.BOTTOM - figures.TOP
    spiked, *others = sorted(y for _, y in line)
    assert spiked == pytest.approx(floor - height * 0.995 / 100, abs=0.06), "(100 + 99 · 1 + 100 · 0) / 200"
    assert others == pytest.approx([floor - height * 0.5 / 100] * len(others), abs=0.06)
    assert "highest 100" in svg


def test_a_curves_own_band_and_the_diagonal_are_at_their_values() -> None:
    one = Curve("m", (0.0, 1.0), (0.4, 0.6), (0.2, 0.4), (0.6, 1.0))
    svg = draw("x", "confidence", [one], guide="y = x")
    left, right, floor = figures.LEFT, figures.RIGHT, figures.BOTTOM
    height = floor - figures.TOP

    def y(value: float) -> str:
        return f"{floor - height * value:.1f}"

    expected = [(left, 0.6), (right, 1.0), (right, 0.4), (left, 0.2)]
    corners = " ".join(f"{x:.1f},{y(value)}" for x, value in expected)
    assert f'<polygon class="ribbon s0" points="{corners}"/>' in svg
    assert f'<polyline class="guide" points="{left:.1f},{y(0)} {right:.1f},{y(1)}"/>' in svg


def test_one_point_is_a_dot() -> None:
    assert "<circle" in draw("x", "step", [curve((3, 4))])


def test_names_in_figures_are_escaped() -> None:
    svg = draw("<b>", 'a"b', [curve((0, 1), (1, 2), name="<i>")])
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert 'a"b' not in svg

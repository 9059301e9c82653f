"""Ticks, labels and the geometry of the figures."""

from __future__ import annotations

import math
import re

import pytest

from rlhf_tasks.report import charts, numbers
from rlhf_tasks.report.inputs import Curve


def curve(*points: tuple[float, float], name: str = "m") -> Curve:
    return Curve(name, tuple(x for x, _ in points), tuple(y for _, y in points), 0)


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
    marks = charts.ticks(low, high)
    assert marks == pytest.approx(expected)
    assert marks[0] - 1e-6 <= low <= high <= marks[-1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 2000, 4000], ["0", "2k", "4k"]),
        ([0, 500_000, 1_000_000, 2_000_000], ["0.0", "0.5M", "1.0M", "2.0M"]),
        ([-0.05, 0.0, 0.05], ["−0.05", "0.00", "0.05"]),
        ([0, 1e-6, 2e-6], ["0", "1e−6", "2e−6"]),
        ([0, 5e-7, 1e-6, 1.5e-6], ["0", "5e−7", "1e−6", "1.5e−6"]),
        ([2], ["2"]),
    ],
)
def test_labels_have_the_decimals_their_step_needs(values: list[float], expected: list[str]) -> None:
    assert charts.tick_labels(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8192.0, "8,192"),
        (-0.5, "−0.5"),
        (0.81234, "0.8123"),
        (12345.678, "12,345.7"),
        (math.nan, "not a number"),
    ],
)
def test_numbers_are_rounded_for_people(value: float, expected: str) -> None:
    assert numbers.number(value) == expected


def test_a_line_goes_from_edge_to_edge_and_larger_values_are_higher() -> None:
    points = drawn(charts.line_chart("x", "step", [curve((0, 0), (5, 10), (10, 5))]))
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    top, floor = charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert points == [(left, floor), ((left + right) / 2, top), (right, (top + floor) / 2)]


def test_a_band_covers_its_range_of_the_axis() -> None:
    svg = charts.line_chart("KL", "episode", [curve((0, 1), (1, 20))], band=(0, 10))
    match = re.search(r'<rect class="band" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
    assert match
    assert float(match[2]) == pytest.approx((charts.HEIGHT - charts.TOP - charts.BOTTOM) / 2, abs=0.1)


def test_the_axis_fits_the_curve_and_the_band_is_shaded_as_far_as_it_is_seen() -> None:
    svg = charts.line_chart("KL", "episode", [curve((0, 0), (1, 2))], band=(0, 10))
    match = re.search(r'<rect class="band" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
    assert match
    assert float(match[1]) == charts.TOP
    assert float(match[2]) == charts.HEIGHT - charts.TOP - charts.BOTTOM, "all of 0 to 2"
    assert drawn(svg)[-1][1] == charts.TOP, "2 is at the top, not a fifth of the way up"
    beyond = charts.line_chart("KL", "episode", [curve((0, 20), (1, 30))], band=(0, 10))
    assert 'class="band"' not in beyond


def test_a_long_line_is_drawn_as_means_with_a_band_that_keeps_a_spike() -> None:
    steps = 24_000  # 200 to a bucket
    points = [(float(k), 100.0 if k == 12_345 else float(k % 2)) for k in range(steps)]
    svg = charts.line_chart("x", "step", [curve(*points)])
    line = drawn(svg)
    assert len(line) == charts.MAX_BUCKETS
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    match = re.search(r'<polygon class="ribbon s0" points="([^"]+)"', svg)
    assert match
    heights = [float(pair.split(",")[1]) for pair in match[1].split()]
    assert min(heights) == charts.TOP, "100 is the top tick"
    floor, height = charts.HEIGHT - charts.BOTTOM, charts.HEIGHT - charts.BOTTOM - charts.TOP
    spiked, *others = sorted(y for _, y in line)
    assert spiked == pytest.approx(floor - height * 0.995 / 100, abs=0.06), "(100 + 99 · 1 + 100 · 0) / 200"
    assert others == pytest.approx([floor - height * 0.5 / 100] * len(others), abs=0.06)
    assert "highest 100" in svg


def test_a_curves_own_band_and_the_diagonal_are_at_their_values() -> None:
    one = Curve("m", (0.0, 1.0), (0.4, 0.6), low=(0.2, 0.4), high=(0.6, 1.0))
    svg = charts.line_chart("x", "confidence", [one], diagonal=True)
    left, right, floor = charts.LEFT, charts.WIDTH - charts.RIGHT, charts.HEIGHT - charts.BOTTOM
    height = floor - charts.TOP

    def y(value: float) -> str:
        return f"{floor - height * value:.1f}"

    expected = [(left, 0.6), (right, 1.0), (right, 0.4), (left, 0.2)]
    corners = " ".join(f"{x:.1f},{y(value)}" for x, value in expected)
    assert f'<polygon class="ribbon s0" points="{corners}"/>' in svg
    assert f'<line class="guide" x1="{left:.1f}" y1="{y(0)}" x2="{right:.1f}" y2="{y(1)}"/>' in svg


def test_one_point_is_a_dot_and_no_point_is_an_error() -> None:
    assert "<circle" in charts.line_chart("x", "step", [curve((3, 4))])
    with pytest.raises(ValueError, match="nothing to draw"):
        charts.line_chart("x", "step", [curve()])


def test_a_bar_and_its_whisker_are_at_their_values() -> None:
    svg = charts.rate_bar("A against B", 0.75, 0.5, 1.0, "level")
    assert 'class="bar level" x="8" y="7" width="168.0"' in svg  # ¾ of 224
    assert '<line class="whisker" x1="120.0" y1="14.0" x2="232.0" y2="14.0"/>' in svg


def test_names_in_figures_are_escaped() -> None:
    svg = charts.line_chart("<b>", 'a"b', [curve((0, 1), (1, 2), name="<i>")])
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert 'a"b' not in svg

"""Numbers as text, and the figures."""

from __future__ import annotations

import math
import re

import pytest

from rlhf_tasks.report import document
from rlhf_tasks.tracking.curves import COLORS, MAX_BUCKETS, Curve, Figure, draw_svg
from tests.report import workspace


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (8192.0, None, "8,192"),
        (-0.5, None, "−0.500"),
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


def test_a_figure_is_the_same_text_each_time_in_the_colors_of_the_page_with_ids_of_its_own() -> None:
    banded = Curve("m", (0.0, 1.0), (0.4, 0.6), (0.2, 0.4), (0.6, 0.9))
    one, other = (Figure("x", "", axis, [banded], (0.5, 7), "y = x") for axis in ("confidence", "step"))
    drawn = draw_svg(one)
    assert drawn == draw_svg(one)
    assert not re.search(r"#[0-9a-f]{6};", drawn), "each color is a variable of the style sheet"
    ids = [re.findall(r'id="([^"]*)"', text) for text in (drawn, draw_svg(other))]
    assert len({*ids[0], *ids[1]}) == len([*ids[0], *ids[1]]) > 0
    labels = re.findall(r">([^<>]+)</text>", drawn)
    assert labels[-1] == "1.00", "a band does not stretch the plot"
    assert "confidence" in labels


def test_a_curve_without_points_keeps_its_color_and_a_single_point_is_seen() -> None:
    drawn = draw_svg(Figure("x", "", "step", [Curve("without points"), Curve("m", (3,), (4,))]))
    assert "var(--second)" in drawn
    assert "var(--ahead)" not in drawn


def test_colors_and_their_order_are_those_of_the_pages_style_sheet() -> None:
    style = (document.FOLDER / "page.css").read_text(encoding="utf-8")
    assert {f"--{name}: {color};" for name, color in COLORS.items()} <= {*re.findall("--[^;]*;", style)}
    lines = [f".s{i} {{ --series: var(--{name}); }}" for i, name in enumerate(list(COLORS)[:6])]
    assert "\n".join(lines) in style


def test_a_long_line_is_drawn_as_means_with_a_band_that_keeps_a_spike() -> None:
    steps = 24_000  # 200 to a bucket
    long = Curve("m", range(steps), [100.0 if k == 12_345 else float(k % 2) for k in range(steps)])
    short = long.condense()
    assert len(short.x) == MAX_BUCKETS
    assert list(short.x) == sorted(short.x)
    *others, spiked = sorted(short.y)
    assert spiked == 0.995, "(100 + 99 · 1 + 100 · 0) / 200"
    assert others == [0.5] * len(others)
    assert (min(short.low), max(short.high)) == (0, 100)
    assert "highest 100" in document.describe(Figure("x", "", "step", [long]))

"""Numbers as text, ticks, and the geometry of the figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf_tasks.report import document
from rlhf_tasks.report.figures import MAX_BUCKETS, Curve, Figure, ticks
from tests.report import workspace


def svg(title: str, axis: str, *curves: Curve, **marks: Any) -> str:
    template = '{% from "macros.html" import chart %}{{ chart(figure) }}'
    figure = Figure(title, "", axis, curves, **marks)
    return document.environment().from_string(template).render(figure=figure)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (0.3, 4.7, ["0", "1", "2", "3", "4", "5"]),
        (-0.03, 0.02, ["−0.03", "−0.02", "−0.01", "0.00", "0.01", "0.02"]),
        (7, 7, ["6.0", "6.5", "7.0", "7.5", "8.0"]),
        (-1e-7, 3.2, ["0", "1", "2", "3", "4"]),
        (0, 4000, ["0", "1,000", "2,000", "3,000", "4,000"]),
        (0, 2e-6, ["0", "5e−7", "1e−6", "1.5e−6", "2e−6"]),
        (1e-5, 1e-5, ["9e−6", "9.5e−6", "1e−5", "1.05e−5", "1.1e−5"]),
        (1, 1.000039, ["1", "1.00001", "1.00002", "1.00003", "1.00004"]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low: float, high: float, expected: list[str]) -> None:
    """Up to rounding: a KL starts a little below 0."""
    marks = ticks(low, high)
    assert list(marks.values()) == expected
    assert min(marks) - 1e-6 <= low <= high <= max(marks)
    assert list(marks) == pytest.approx([float(x.replace("−", "-").replace(",", "")) for x in expected])


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


def test_lines_bands_and_guides_are_at_their_values() -> None:
    """The plot is from 48 to 346 and, downwards, from 12 to 182: y is 182 − 170 · value from 0 to 1."""
    drawn = svg("x", "step", Curve("m", (0, 5, 10), (0, 1, 0.5)), band=(0.5, 7), guide=0.2)
    assert '<polyline class="line s0" points="48.0,182.0 197.0,12.0 346.0,97.0"/>' in drawn
    assert '<rect class="band" x="48" y="12.0" width="298" height="85.0"/>' in drawn, "as far as it is seen"
    assert '<polyline class="guide" points="48.0,148.0 346.0,148.0"/>' in drawn
    banded = Curve("m", (0.0, 1.0), (0.4, 0.6), (0.2, 0.4), (0.6, 1.0))
    drawn = svg("x", "confidence", banded, band=(3, 4), guide="y = x")
    assert '<polygon class="ribbon s0" points="48.0,80.0 346.0,12.0 346.0,114.0 48.0,148.0"/>' in drawn
    assert '<polyline class="guide" points="48.0,182.0 346.0,12.0"/>' in drawn
    assert 'height="0"' in drawn, "the band is above the plot"
    assert '<circle class="dot s1" cx="197.0"' in svg(
        "x", "step", Curve("without points"), Curve("m", (3,), (4,))
    )


def test_a_long_line_is_drawn_as_means_with_a_band_that_keeps_a_spike() -> None:
    steps = 24_000  # 200 to a bucket
    long = Curve("m", range(steps), [100.0 if k == 12_345 else float(k % 2) for k in range(steps)])
    short = long.condensed
    assert len(short.x) == MAX_BUCKETS
    assert list(short.x) == sorted(short.x)
    *others, spiked = sorted(short.y)
    assert spiked == 0.995, "(100 + 99 · 1 + 100 · 0) / 200"
    assert others == [0.5] * len(others)
    assert (min(short.low), max(short.high)) == (0, 100)
    assert "highest 100" in Figure("x", "", "step", [long]).text

"""What the long run calls growth, on samples of known sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import soak
from benchmarks.soak import Sample


def samples(**growth: float) -> Sequence[Sample]:
    """Sixteen samples, ten updates apart; each thing grows by so much from one to the next."""
    first = {"memory": 1e9, "files": 100.0, "snapshots": 4e5, "record": 1e6, "step": 0.0}
    rates = {"step": 10.0, **growth}
    return [
        Sample(**{name: int(x + rates.get(name, 0.0) * number) for name, x in first.items()})
        for number in range(16)
    ]


def test_a_run_whose_disk_grows_by_a_row_of_the_curves_an_update_is_within_its_bounds() -> None:
    found = soak.changes(samples(snapshots=9_000, record=150_000))
    assert soak.rates(found) == {"snapshots": 900.0, "record": 15_000.0}
    assert soak.problems(found) == []


@pytest.mark.parametrize(
    ("growth", "problem"),
    [
        ({"memory": 3e6}, "memory grew by 2.4%, and 2% is allowed"),  # 24 MB more than 1,016.5
        ({"files": 1}, "files grew by 7.6%, and 2% is allowed"),  # 8 more than 105.5
        ({"snapshots": 21_000}, "snapshots grew by 2100 bytes an update, and 2000 are allowed"),
        ({"record": 260_000}, "record grew by 26000 bytes an update, and 25000 are allowed"),
    ],
)
def test_what_grows_by_more_than_is_allowed_is_a_problem(growth: dict[str, float], problem: str) -> None:
    assert soak.problems(soak.changes(samples(**growth))) == [problem]


def test_the_page_shows_both_quarters_and_the_bounds() -> None:
    text = soak.section(soak.changes(samples(snapshots=9_000)), updates=2000, seconds=300.0)
    assert "It took 2,000\nupdates in 300 seconds" in text
    assert "| memory of the stage, MB | 1,000.00 | 1,000.00 | +0.0% | 2% |" in text
    assert "| snapshots, KB | 449.50 | 521.50 | 0.9 KB an update | 2.0 KB an update |" in text

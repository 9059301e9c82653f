"""The win rate while PPO trained: a point per look, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.evaluation import progress
from rlhf_tasks.evaluation.judges.scoring import Scoring
from rlhf_tasks.tracking import NullTracker


class Length:
    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        return [float(len(answer)) if answer != "broken" else float("nan") for answer in answers]

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return {}


def looked_at(*looks: tuple[int, list[str]]) -> None:
    rows = [
        {"episode": episode, "prompt": f"p{i}", "reference": "four", "response": answer}
        for episode, answers in looks
        for i, answer in enumerate(answers)
    ]
    progress.ANSWERS.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), progress.ANSWERS)


def test_each_look_is_a_point_of_the_win_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    looked_at((0, ["a", "b", "four", "longer"]), (256, ["longer"] * 4), (512, ["broken", "longer", "a", "a"]))
    tracker = NullTracker("judge")
    progress.log([Scoring("long", Length())], tracker)
    points = [(row["episode"], row["long/win_rate"]) for row in tracker.history()]
    assert points == [(0, 1.5 / 4), (256, 1.0), (512, pytest.approx(1 / 3))]
    assert all(row["long/low"] <= row["long/win_rate"] <= row["long/high"] for row in tracker.history())


def test_a_look_that_could_not_be_judged_has_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    looked_at((0, ["broken"] * 3), (256, ["longer"] * 3))
    tracker = NullTracker("judge")
    progress.log([Scoring("long", Length())], tracker)
    assert [row["episode"] for row in tracker.history()] == [256]

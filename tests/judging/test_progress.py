"""The win rate over the course of PPO's training, computed by hand."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.judging import summary
from rlhf_tasks.judging.judges.build import ScoringJudge
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.tracking import NullTracker


def score_length(rows: Responses) -> torch.Tensor:
    return torch.tensor([float(len(text)) if text != "broken" else float("nan") for text in rows.texts])


def curve(root: Path, *evaluations: tuple[int, list[str]]) -> list[dict[str, float]]:
    """The curve of `(episode, responses)`; every reference is four characters long."""
    rows = [
        {"episode": episode, "prompt": f"p{i}", "reference": "four", "response": response}
        for episode, responses in evaluations
        for i, response in enumerate(responses)
    ]
    paths, tracker = Paths(root), NullTracker("judge")
    paths.ppo_samples.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), paths.ppo_responses)
    summary.log_curve(paths, [ScoringJudge("long", score_length)], tracker)
    return tracker.history()


def test_each_evaluation_is_a_point_of_the_win_rate(tmp_path: Path) -> None:
    rows = curve(
        tmp_path,
        (0, ["a", "b", "four", "longer"]),
        (256, ["longer"] * 4),
        (512, ["broken", "longer", "a", "a"]),
    )
    points = [(row["episode"], row["long/win_rate"]) for row in rows]
    assert points == [(0, 1.5 / 4), (256, 1.0), (512, pytest.approx(1 / 3))]
    assert all(row["long/low"] <= row["long/win_rate"] <= row["long/high"] for row in rows)


def test_an_evaluation_of_failures_only_has_no_point(tmp_path: Path) -> None:
    rows = curve(tmp_path, (0, ["broken"] * 3), (256, ["longer"] * 3))
    assert [row["episode"] for row in rows] == [256]

"""Columns of the prompts in stages ppo and judge: aligned with the prompts, and shown in the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import judge, ppo
from rlhf_tasks.tracking import NullTracker
from tests import small

CODE = """
def reward(prompts, responses, *, place, tests, **columns):
    assert not columns
    for prompt, p, test in zip(prompts, place, tests, strict=True):
        assert set(p.split()) <= set(prompt.split()) or '<unk>' in prompt
        assert test == [p, 1]
    return [float(len(response)) for response in responses]

def judged(prompts, responses, *, place, tests=None):
    return reward(prompts, responses, place=place, tests=tests)

def lost(prompts, responses, *, label):
    return [0.0 for _ in prompts]
"""
OWN = {"kind": "function", "weight": 1.0, "function": "my_columns:reward"}
JUDGE = {"kind": "function", "name": "own", "function": "my_columns:judged"}
SETTINGS = {
    "ppo.total_episodes": 32, "ppo.rollout_batch_size": 16, "ppo.num_mini_batches": 2,
    "ppo.response_length": 8, "ppo.num_selections": 1, "ppo.num_selection_prompts": 8,
    "ppo.num_sample_generations": 1, "ppo.critic_init": "sft", "ppo.scorers": [OWN],
    "ppo.select_by": {"judge": JUDGE, "max_failure_share": 0.05},
}  # fmt: skip


@pytest.fixture
def project(models_here: Path) -> Path:
    """Prompts that keep a part of their text, which the functions look for in it."""
    (models_here / "my_columns.py").write_text(CODE, encoding="utf-8")
    for split in ("train", "validation", "test"):
        rows = read_table(Paths(), "prompts", split)  # type: ignore[arg-type]
        for row in rows:
            place = " ".join(row["prompt"].split()[-9:-2])
            row["columns"] = {"place": place, "tests": [place, 1]}
        small.write_rows(models_here, "prompts", split, [columns.encoded(row) for row in rows])
    return models_here


def test_scorers_selection_and_judges_get_the_columns_of_their_prompts(project: Path) -> None:
    tracker = NullTracker("ppo")
    ppo.run(small.view("ppo", SETTINGS), Paths(), tracker)
    assert len(tracker.history()) == 3
    samples: list[dict[str, Any]] = pq.read_table(Paths().ppo_samples / "samples.parquet").to_pylist()
    assert samples
    assert all(row["column/place"] in row["prompt"] for row in samples)
    changes = {
        "judge.judges": [small.GOLD, JUDGE, {"kind": "all_of", "name": "both", "judges": ["gold", "own"]}]
    }
    judge.run(small.view("judge", changes), Paths(), NullTracker("judge"))
    rows = pq.read_table(Paths().judged_responses).to_pylist()
    assert rows
    assert all(json.loads(row["column/tests"]) == [row["column/place"], 1] for row in rows)


def test_a_function_that_asks_for_another_column_stops_the_stage_before_training(project: Path) -> None:
    lost = {"ppo.scorers": [OWN | {"function": "my_columns:lost"}]}
    with pytest.raises(UserError, match=r"asks for the column label, and data.columns.keep has place, tests"):
        ppo.run(small.view("ppo", SETTINGS | lost), Paths(), NullTracker("ppo"))
    view = small.view("judge", {"judge.judges": [JUDGE | {"function": "my_columns:lost"}]})
    with pytest.raises(UserError, match=r"judge.judges: function my_columns:lost asks for the column label"):
        judge.run(view, Paths(), NullTracker("judge"))

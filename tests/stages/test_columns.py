"""Columns of the prompts in stages ppo and judge: aligned with the prompts, and shown in the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import NullTracker
from tests import small

CODE = """
def reward(prompts, responses, *, place, tests, **columns):
    assert set(columns) <= {"first"}
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
FIRST_WORD = {"kind": "regex", "column": "first"}
KEEP = {"data.columns.keep": ["first"]}
VERIFIER = {"kind": "verifier", "checks": [FIRST_WORD], "format": {"pattern": "(.*)", "weight": 0.5}}
PPO = {"total_episodes": 32, "rollout_batch_size": 16, "num_mini_batches": 2, "response_length": 8}
SAMPLES = {"num_selections": 1, "num_selection_prompts": 8, "num_sample_generations": 1}
SETTINGS = {
    **{f"ppo.{key}": value for key, value in (PPO | SAMPLES).items()},
    **{"ppo.advantages.critic.init": "sft", "ppo.scorers": [OWN], "ppo.select_by": {"judge": JUDGE}},
}


@pytest.fixture
def project(models_here: Path) -> Path:
    """Prompts that keep a part of their text, which the functions look for in it."""
    (models_here / "my_columns.py").write_text(CODE, encoding="utf-8")
    for split in ("train", "validation", "test"):
        rows = list(read_table(Paths(), "prompts", split))
        for row in rows:
            place = " ".join(row["prompt"].split()[-9:-2])
            row["columns"] = {"place": place, "tests": [place, 1], "first": r"(my|so) .*"}
        small.write_rows(models_here, "prompts", split, [columns.encoded(row) for row in rows])
    return models_here


def test_scorers_selection_and_judges_get_the_columns_of_their_prompts(project: Path) -> None:
    tracker = NullTracker("ppo")
    small.run("ppo", SETTINGS, tracker)
    assert len(tracker.history()) == 3
    samples: list[dict[str, Any]] = pq.read_table(Paths().ppo_samples / "samples.parquet").to_pylist()
    assert samples
    assert all(row["column/place"] in row["prompt"] for row in samples)
    both = {"kind": "all_of", "name": "both", "judges": ["gold", "own"]}
    changes = {"judge.judges": [small.GOLD, JUDGE, both]}
    small.run("judge", changes)
    rows = pq.read_table(Paths().judged_responses).to_pylist()
    assert rows
    assert all(json.loads(row["column/tests"]) == [row["column/place"], 1] for row in rows)


def test_a_function_that_asks_for_another_column_stops_the_stage_before_training(project: Path) -> None:
    lost = {"ppo.scorers": [OWN | {"function": "my_columns:lost"}]}
    message = r"nothing is left for label; .* of .*, place, tests, first\."
    with pytest.raises(UserError, match=message):
        small.run("ppo", SETTINGS | lost)
    with pytest.raises(UserError, match=rf"judge.judges: function my_columns:lost\(.*\): {message}"):
        small.run("judge", {"judge.judges": [JUDGE | {"function": "my_columns:lost"}]})


def test_a_verifier_rewards_and_measures_accuracy(project: Path) -> None:
    changes = SETTINGS | KEEP | {"ppo.scorers": [VERIFIER | {"weight": 2.0}], "ppo.select_by": None}
    changes |= {"judge.judges": [VERIFIER | {"name": "verifier"}], "reward.train": False}
    small.run("ppo", changes)
    metrics = small.run("judge", changes)
    texts = [row["sft"].strip() for row in pq.read_table(Paths().judged_responses).to_pylist()]
    assert metrics["verifier/accuracy/reference"] == 1
    assert metrics["verifier/accuracy/sft"] == sum(t.startswith(("my ", "so ")) for t in texts) / len(texts)
    gain = metrics["verifier/accuracy/policy"] - metrics["verifier/accuracy/sft"]
    assert metrics["verifier/accuracy_gain"] == pytest.approx(gain)
    assert metrics["verifier/accuracy_gain/low"] <= gain <= metrics["verifier/accuracy_gain/high"]
    assert metrics["verifier/format/policy"] == 1
    assert metrics["verifier/reference/score"] == 1.5


def test_a_verifier_on_a_missing_or_malformed_column_is_refused_before_training(project: Path) -> None:
    changes = {"ppo.scorers": [VERIFIER | {"weight": 1.0}], "ppo.select_by": None}
    with pytest.raises(ConfigError, match=r"ppo.scorers: verifier needs the column first; add it to data"):
        small.view("ppo", SETTINGS | changes)
    judges = {"judge.judges": [VERIFIER | {"name": "verifier", "by": ["kind"]}]}
    with pytest.raises(ConfigError, match=r"judge.judges: verifier needs the column kind; add it to data"):
        small.view("judge", KEEP | judges)
    rows = list(read_table(Paths(), "prompts", "validation"))
    rows[2]["columns"]["first"] = "("
    small.write_rows(project, "prompts", "validation", [columns.encoded(row) for row in rows])
    with pytest.raises(UserError, match=r"ppo.scorers: .*validation\): .*\n  synthetic row 3: first: '\('"):
        small.run("ppo", SETTINGS | changes | KEEP)
    small.write_rows(project, "prompts", "test", [columns.encoded(row) for row in rows])
    with pytest.raises(UserError, match=r"judge.judges: right: 2 value\(s\) cannot"):
        small.run("judge", {"judge.judges": [VERIFIER | {"name": "right"}, small.HELDOUT], **KEEP})

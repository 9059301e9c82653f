"""The examples run in the stages that a user would name them in."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples import judge as own_judge
from examples import reward
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.small import ROOT
from tests.stages.test_columns import SETTINGS

SHORTER = {"kind": "function", "name": "shorter", "function": "examples.judge:shorter", "pairwise": True}
BREVITY = {"kind": "function", "weight": 1.0, "function": "examples.reward:brevity"}


@pytest.mark.parametrize("name", ["cispo", "estimator", "gspo", "judge", "reward", "whole_response"])
def test_an_example_is_short_and_imports_nothing_private(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    (start, *_) = (node.lineno for node in tree.body[1:])  # after the docstring
    assert len([line for line in text.splitlines()[start - 1 :] if line.strip()]) <= 15
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name.name for node in imported for name in node.names if name.name.startswith("_")]


def test_the_reward_falls_with_each_word_and_the_judge_prefers_fewer() -> None:
    assert reward.brevity(["p"] * 3, ["", "one", "one two three"]) == [1.0, 0.5, 0.25]
    assert own_judge.shorter(["p"] * 3, ["a b c", "a", ""], ["a", "b", ""]) == [0.25, 0.5, None]


def test_ppo_optimizes_the_reward_and_the_judge_selects_and_judges(models_here: Path) -> None:
    shutil.copytree(ROOT / "examples", models_here / "examples")
    selection = {"judge": SHORTER, "max_failure_share": 0.5}
    tracker = NullTracker("ppo")
    small.run("ppo", SETTINGS | {"ppo.scorers": [BREVITY], "ppo.select_by": selection}, tracker)
    samples = pq.read_table(Paths().ppo_samples / "samples.parquet").to_pylist()
    assert samples
    metrics = small.run("judge", {"judge.judges": [small.GOLD, SHORTER]})
    assert 0 <= metrics["shorter/policy_vs_sft/win_rate"] <= 1

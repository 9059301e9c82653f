"""PPO, judge and gate by the real code on a planted task: too much of a good reward is refused.

The reward counts a word; whoever reads the answers likes to see it, and likes answers of many words better.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import evidence
from rlhf_tasks.tracking import NullTracker
from tests import small, toy

WORD = "my"
TASK: dict[str, Any] = {
    **small.WITHOUT_REWARD,
    "ppo.scorers": [{"kind": "function", "weight": 1.0, "function": f"{__name__}:counted"}],
    "ppo.total_episodes": 32 * 64, "ppo.rollout_batch_size": 64, "ppo.num_mini_batches": 4,
    "ppo.num_ppo_epochs": 4, "ppo.learning_rate": 1e-2, "ppo.schedule": "linear", "ppo.response_length": 8,
    "ppo.truncation": "none", "ppo.guards": None, "ppo.num_selections": 1, "ppo.num_selection_prompts": 8,
    "ppo.num_sample_generations": 1, "data.max_completion_tokens": 8,
    "judge.judges": [
        {"kind": "function", "name": "reader", "function": f"{__name__}:read"},
        {"kind": "function", "name": "reward", "function": f"{__name__}:counted"},
    ],
    "judge.num_examples": 48, "judge.retention": None,
    "promotion.judge": "reader", "promotion.second_judge": None, "promotion.min_examples": 40,
    "promotion.max_perplexity_growth": None, "promotion.max_choice_drop": None,
}  # fmt: skip


def counted(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(answer.split().count(WORD)) for answer in answers]


def read(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Different words, and two points for the one that is asked for."""
    words = [set(answer.split()) for answer in answers]
    return [len(found) + 2.0 * (WORD in found) for found in words]


def made(kl_coef: float) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The judge's metrics of a policy that is trained now, and the criteria that the gate put to it."""
    settings = config.validate(small.params(TASK | {"ppo.kl_coef": kl_coef}), "test")
    tracker = NullTracker("ppo")
    atomic.write_json(evidence.PPO, toy.run("ppo", settings, tracker))
    evidence.CURVE.parent.mkdir(exist_ok=True)
    with evidence.CURVE.open("w", encoding="utf-8", newline="") as file:
        rows = [{"episode": row["episode"], evidence.KL: row.get(evidence.KL)} for row in tracker.history()]
        writer = csv.DictWriter(file, ["episode", evidence.KL])
        writer.writeheader()
        writer.writerows(rows)
    judged = toy.run("judge", settings)
    atomic.write_json(evidence.JUDGE, judged)
    toy.run("verdict", settings)
    verdict = json.loads(Path("evaluation/verdict.json").read_text(encoding="utf-8"))
    return judged, {criterion["key"]: criterion for criterion in verdict["criteria"]}


@pytest.mark.slow
def test_without_the_kl_penalty_the_gate_refuses_what_it_promotes_with_one(models_here: Path) -> None:
    small.write_rows(Path(), "prompts", "test", read_table(Paths(), "prompts", "test") * 4)
    judged, told = made(kl_coef=0.25)
    assert [key for key, criterion in told.items() if not criterion["passed"]] == [], "better, and promoted"
    judged, told = made(kl_coef=0.0)
    assert judged["reward/policy_vs_sft/low"] > 0.9, "by what it optimised it is far better"
    assert [key for key, criterion in told.items() if not criterion["passed"]] == ["over_sft/reader", "kl"]

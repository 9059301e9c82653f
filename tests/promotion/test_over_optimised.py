"""PPO, judge and gate by the real code on a planted task: over-optimization of a reward is refused.

The reward counts a word. The judge prefers responses with that word, and responses of many different words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from tests import small, toy

WORD = "my"
TASK: dict[str, Any] = {
    **small.WITHOUT_REWARD,
    "ppo.scorers": [{"kind": "function", "weight": 1.0, "function": f"{__name__}:counted"}],
    **{"ppo.total_episodes": 32 * 64, "ppo.rollout_batch_size": 64, "ppo.num_mini_batches": 4},
    **{"ppo.num_ppo_epochs": 4, "ppo.learning_rate": 1e-2, "ppo.schedule": "linear", "ppo.guards": None},
    **{"ppo.response_length": 8, "data.max_completion_tokens": 8, "ppo.truncation.kind": "none"},
    **{"ppo.num_selections": 1, "ppo.num_selection_prompts": 8, "ppo.num_sample_generations": 1},
    "judge.judges": [
        {"kind": "function", "name": "reader", "function": f"{__name__}:read"},
        {"kind": "function", "name": "reward", "function": f"{__name__}:counted"},
    ],
    **{"judge.num_examples": 60, "judge.retention": None},
    **{"promotion.judge": "reader", "promotion.second_judge": None, "promotion.max_choice_drop": None},
    **{"promotion.min_examples": 47, "promotion.detects": 0.7, "promotion.max_perplexity_growth": None},
}


def counted(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(answer.split().count(WORD)) for answer in answers]


def read(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The number of different words, and two points for WORD."""
    words = [set(answer.split()) for answer in answers]
    return [len(one) + 2.0 * (WORD in one) for one in words]


def trained(kl_coef: float) -> tuple[EvaluationResults, dict[str, dict[str, Any]]]:
    """Train and judge a policy; its results, and the gate's criteria by key."""
    settings, paths = config.validate(small.params(TASK | {"ppo.kl_coef": kl_coef}), "test"), Paths()
    atomic.write_json(paths.metrics("ppo"), toy.run("ppo", settings))
    toy.run("judge", settings)
    toy.run("verdict", settings)
    verdict = json.loads(paths.verdict.read_text(encoding="utf-8"))
    criteria = {criterion["key"]: criterion for criterion in verdict["criteria"]}
    return EvaluationResults.read(paths.evaluation_results), criteria


def missed(criteria: dict[str, dict[str, Any]]) -> list[str]:
    return [key for key, criterion in criteria.items() if not criterion["passed"]]


@pytest.mark.slow
def test_without_the_kl_penalty_the_gate_refuses_what_it_passes_with_one(models_here: Path) -> None:
    small.write_rows(Path(), "prompts", "test", [*read_table(Paths(), "prompts", "test")] * 4)
    _, criteria = trained(kl_coef=0.25)
    assert missed(criteria) == []
    results, criteria = trained(kl_coef=0.0)
    by_reward = results.comparison("reward", "policy", "sft")
    assert by_reward is not None
    assert by_reward.win_rate.low > 0.9, "by what PPO optimized the policy is far better"
    assert missed(criteria) == ["over_sft/reader", "over_base/reader", "kl"]

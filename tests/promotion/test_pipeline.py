"""Judge, gate and promotion by the real code: small random models, real judges, DVC's cache, MLflow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, console
from rlhf_tasks.config import schema
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import save_checkpoint
from rlhf_tasks.project import atomic, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.command import verdict_file
from rlhf_tasks.tracking.store import embedded_uri
from tests import small, toy
from tests.conftest import Command
from tests.promotion import planted

LENIENT = {
    **{"promotion.over_sft": 0.0, "promotion.over_bar": 0.0, "promotion.over_champion": 0.0},
    **{"promotion.max_perplexity_growth": 100.0, "promotion.max_response_perplexity_growth": 100.0},
    **{"promotion.min_distinct_ratio": 0.0, "promotion.max_choice_drop": 1.0},
    **{"promotion.min_examples": 12, "judge.num_examples": 12},
}


def judged(folder: Path, seed: int) -> str:
    """Write and judge a policy as the pipeline does; returns its md5. All of them are nearly equal."""
    words = load_tokenizer(folder / "models/sft")
    shutil.rmtree(folder / "models/policy")
    (folder / "models/policy").mkdir()
    identity = {"parents": {"sft": contracts.fingerprint(folder / "models/sft")}, "kl": [1.25, 0.1]}
    policy, generator = small.causal("gpt_neox", 2, words), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=1e-4)
    save_checkpoint(policy, words, folder / "models/policy", identity=identity, card="a")
    atomic.write_json(folder / "metrics/ppo.json", {})
    atomic.write_json(folder / "models/lineage/ppo.json", {"rlhf.run": f"ppo-{seed}"})
    toy.run("judge", config.load())
    planted.lock(folder)
    planted.cached(folder / "models/policy", folder / ".dvc/cache")
    return hashing.dvc_md5(folder / "models/policy")


@pytest.mark.slow
def test_policies_are_judged_promoted_refused_and_rolled_back(
    models_here: Path, home: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(schema, "LEAST_BOUND", 0.0)  # the policies differ by chance
    monkeypatch.setattr(schema.Promotion, "least_examples", 12)
    console.set_quiet(False)
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, check=True)
    shutil.copy(planted.ROOT / "dvc.yaml", models_here)
    planted.params(models_here, LENIENT)
    first = judged(models_here, seed=2)
    rlhf("promote")
    second = judged(models_here, seed=7)
    said = rlhf("promote").out
    assert f"models/policy vs .rlhf/policies/{first}" in said
    verdict = json.loads(verdict_file(home, second).read_text(encoding="utf-8"))
    criteria = {criterion["key"]: criterion for criterion in verdict["criteria"]}
    assert criteria["kl"]["value"] == 1.25
    assert 0 < criteria["over_champion/gold"]["value"] <= 1
    assert criteria["examples"]["value"] == 12
    third = judged(models_here, seed=8)
    planted.params(models_here, {**LENIENT, "promotion.over_champion": 1.0})
    rlhf("promote", status=3)
    store = MlflowClient(embedded_uri(home))

    def aliases() -> dict[str, str]:
        versions = store.get_registered_model("rlhf-policy").aliases
        return {a: store.get_model_version("rlhf-policy", v).tags["dvc.md5"] for a, v in versions.items()}

    assert aliases() == {"champion": second, "challenger": third}
    rlhf("promote --rollback")
    assert aliases()["champion"] == first


# ---------- PPO, judge and gate by the real code on a planted task: over-optimization of a reward is refused


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

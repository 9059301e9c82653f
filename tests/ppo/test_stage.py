"""Stage ppo in small: what it refuses, which weights it keeps, what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks import models
from rlhf_tasks.ppo import stage
from rlhf_tasks.tracking import NullTracker
from tests import small

SETTINGS = {
    "ppo.total_episodes": 48, "ppo.rollout_batch_size": 16, "ppo.num_mini_batches": 2,
    "ppo.response_length": 8, "ppo.num_selections": 3, "ppo.num_selection_prompts": 12,
    "ppo.num_sample_generations": 2,
}  # fmt: skip


@pytest.fixture
def project(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(**changes: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    tracker = NullTracker("ppo")
    return stage.run(small.view("ppo", SETTINGS | changes), tracker), tracker.history()


@pytest.mark.parametrize("role", ["reward", "reward_heldout"])
def test_a_reward_model_of_another_sft_model_is_refused_before_training(role: str, project: Path) -> None:
    folder = project / "models" / role
    identity = (folder / models.IDENTITY).read_text(encoding="utf-8")
    parent = models.fingerprint(project / "models/sft")
    (folder / models.IDENTITY).write_text(identity.replace(parent, "0" * 16), encoding="utf-8")
    before = models.fingerprint(project / "models/policy")
    with pytest.raises(models.ContractError, match=f"models/{role} was made from another sft model"):
        run()
    assert models.fingerprint(project / "models/policy") == before


def test_a_reward_model_without_its_head_is_refused_before_training(project: Path) -> None:
    shutil.rmtree(project / "models/reward")
    shutil.copytree(project / "models/sft", project / "models/reward")
    with pytest.raises(models.ContractError, match="models/reward lacks its trained head"):
        run()


def test_the_kept_weights_are_those_the_heldout_reward_model_liked_best(project: Path) -> None:
    metrics, history = run(**{"ppo.learning_rate": 1e-2})
    tried = {row["episode"]: row["eval/heldout_scores"] for row in history if "eval/heldout_scores" in row}
    assert set(tried) == {0, 16, 32, 48}
    assert metrics["selected_episode"] == max(tried, key=lambda episode: tried[episode])
    assert metrics["selected_heldout_score"] == pytest.approx(max(tried.values()))


def test_weights_are_kept_from_before_training_where_all_of_it_made_them_worse(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = iter([4.0, 3.0, 2.0, 1.0])
    original = stage.Watch._answered

    def worse(self: stage.Watch, prompts: list[str]) -> Any:
        answers, scores, _ = original(self, prompts)
        found = next(falling) if len(prompts) > stage.NUM_SAMPLE_PROMPTS else 0.0
        return answers, scores, torch.full((len(prompts),), found)

    monkeypatch.setattr(stage.Watch, "_answered", worse)
    metrics, _ = run()
    assert metrics["selected_episode"] == 0
    assert models.fingerprint(project / "models/policy") == models.fingerprint(project / "models/sft")


def test_metrics_have_the_names_of_the_field_and_samples_their_columns(project: Path) -> None:
    metrics, history = run()
    names = {
        "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
        "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
        "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var",
        "val/num_eos_tokens", "lr", "episode",
    }  # fmt: skip
    assert names <= set(metrics)
    assert [row["episode"] for row in history] == [0, 16, 32, 48]
    assert metrics["objective/rlhf_reward"] == pytest.approx(
        metrics["objective/scores"] + metrics["objective/non_score_reward"]
    )
    rows = pq.read_table(stage.SAMPLES / "samples.parquet").to_pylist()
    assert {row["episode"] for row in rows} == {0, 24 + 8, 48}  # at the start, and at 2 of 3 updates
    assert list(rows[0]) == ["episode", "prompt", "response", "score", "reward_heldout"]
    assert models.load_causal(stage.OUT) is not None
    assert models.identity_of(stage.OUT)["parents"]["sft"] == models.fingerprint(Path("models/sft"))


def test_the_same_seed_writes_the_same_bytes(project: Path) -> None:
    def written() -> dict[str, bytes]:
        run()
        files = [*stage.OUT.iterdir(), *stage.SAMPLES.iterdir()]
        return {file.name: file.read_bytes() for file in sorted(files)}

    assert written() == written()

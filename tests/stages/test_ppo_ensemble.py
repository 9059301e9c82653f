"""Stage ppo with several reward models: what it logs and records, and what it rejects before training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.config import Judging
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import find_optimized_judges
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import add_score_head, from_scratch, save_checkpoint
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import NullTracker, catalogue
from tests import small
from tests.scoring.test_reward_model import bytes_tokenizer

SETTINGS = {
    "ppo.total_episodes": 16,
    "ppo.rollout_batch_size": 16,
    "ppo.num_mini_batches": 2,
    "ppo.response_length": 8,
    "ppo.num_selections": 1,
    "ppo.num_selection_prompts": 4,
}
OWN = {"kind": "reward_model", "weight": 1.0}
SECOND = {**OWN, "path": "rewards/second", "name": "second"}
FOREIGN = {**OWN, "path": "rewards/foreign", "name": "foreign"}


def run(scorers: list[Any], **changes: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    tracker = NullTracker("ppo")
    metrics = small.run("ppo", SETTINGS | {"ppo.scorers": scorers} | changes, tracker)
    return metrics, tracker.history()


@pytest.fixture
def ensemble(models_here: Path) -> Path:
    """rewards/second has the policy's tokenizer, rewards/foreign another one."""
    made = add_score_head(models_here / "models/sft", torch.Generator().manual_seed(9))
    second = models_here / "rewards/second"
    shutil.copytree(models_here / "models/reward", second)
    made.model.save_pretrained(second)
    words = bytes_tokenizer()
    shape = small.shape("qwen2")
    causal = from_scratch(shape, words, max_positions=1000)
    save_checkpoint(causal, words, models_here / "base", identity={}, card="")
    foreign = add_score_head(models_here / "base", torch.Generator().manual_seed(5))
    save_checkpoint(foreign.model, words, models_here / "rewards/foreign", identity={}, card="")
    return models_here


def test_each_reward_model_is_logged_and_their_sum_is_optimised(ensemble: Path) -> None:
    _, history = run([OWN, SECOND, FOREIGN])
    names = {f"objective/scores/{name}" for name in ("reward_model", "second", "foreign")}
    row = next(row for row in history if names <= set(row))
    assert row["objective/raw_scores"] == pytest.approx(sum(row[name] for name in names), rel=1e-5)
    assert all(catalogue.find("ppo", name) is not None for name in names)
    (panel,) = (one for one in catalogue.panels("ppo") if one.title == "Score by scorer")
    assert set(panel.select(row)) == names, "the report draws one curve for each"
    samples = pq.read_table(Paths().ppo_samples / "samples.parquet").to_pylist()
    columns = ["score", "reward_model", "second", "foreign", "reward_heldout"]
    assert list(samples[0]) == ["episode", "prompt", "response", *columns]


def test_no_model_that_ppo_optimised_counts_as_a_judge(ensemble: Path) -> None:
    """By its weights, so that a copy elsewhere is recognised too."""
    run([OWN, SECOND, FOREIGN])
    parents = contracts.read_parents(Paths().policy)
    assert parents["reward/second"] == contracts.fingerprint(ensemble / "rewards/second")
    assert set(parents) == {"sft", "reward", "reward/second", "reward/foreign"}
    shutil.copytree(ensemble / "rewards/second", ensemble / "copy")
    listed = [
        {"kind": "reward_model", "name": name, "path": path}
        for name, path in (("a", "copy"), ("b", "models/reward"), ("c", "models/reward_heldout"))
    ]
    settings = Judging.model_validate(small.params()["judge"] | {"judges": listed})
    found = find_optimized_judges(settings, Paths().policy, ensemble)
    assert found == {"a": "copy", "b": "models/reward"}
    card = (Paths().policy / "README.md").read_text(encoding="utf-8")
    assert f"| rewards/second | `{parents['reward/second']}` |" in card
    assert contracts.fingerprint(Paths().reward) in contracts.optimized_rewards(Paths().policy)


def test_without_models_reward_only_the_folders_are_optimised(ensemble: Path) -> None:
    run([SECOND, FOREIGN])
    assert set(contracts.read_parents(Paths().policy)) == {"sft", "reward/second", "reward/foreign"}
    assert contracts.fingerprint(Paths().reward) not in contracts.optimized_rewards(Paths().policy)


@pytest.mark.parametrize(
    ("copied", "why"),
    [
        ("models/reward_heldout", "rewards/copy has the weights of models/reward_heldout"),
        ("models/reward", "rewards/copy has the weights of models/reward;"),
        ("rewards/second", "rewards/copy has the weights of rewards/second"),
    ],
)
def test_the_same_weights_under_another_name_are_refused(ensemble: Path, copied: str, why: str) -> None:
    shutil.copytree(ensemble / copied, ensemble / "rewards/copy")
    with pytest.raises(UserError, match=why):
        run([OWN, SECOND, {**OWN, "path": "rewards/copy"}])


def test_a_selection_judge_with_the_weights_of_any_reward_model_is_refused(ensemble: Path) -> None:
    shutil.copytree(ensemble / "rewards/second", ensemble / "copy")
    chosen = {"judge": {"kind": "reward_model", "name": "copy", "path": "copy"}, "max_failure_share": 0.05}
    with pytest.raises(UserError, match="copy has the weights of rewards/second, which PPO optimizes"):
        run([OWN, SECOND], **{"ppo.select_by": chosen})


def test_an_untrained_head_and_an_empty_folder_are_refused(ensemble: Path) -> None:
    (ensemble / "rewards/empty").mkdir()
    with pytest.raises(UserError, match="rewards/empty holds no model"):
        run([OWN, {**OWN, "path": "rewards/empty"}])
    shutil.copytree(ensemble / "models/base", ensemble / "rewards/base")
    with pytest.raises(UserError, match="rewards/base lacks its trained head"):
        run([OWN, {**OWN, "path": "rewards/base"}])

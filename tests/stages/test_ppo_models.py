"""Stage ppo refuses a model that answers otherwise in sampling than in training, before it trains it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import load_causal, load_reward, save_checkpoint
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import ppo
from tests import families, small
from tests.models.test_checks import unmask, wrap
from tests.stages.test_ppo import SETTINGS


def run_with(
    family: str,
    value_model: str = "separate",
    settings: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> None:
    """The stage without a reward model, its SFT model replaced by a random one of this family."""
    folder = Paths().sft
    words = load_tokenizer(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    model = families.causal(family, vocab_size=len(words), eos_token_id=words.eos_token_id, **changes)
    save_checkpoint(model, words, folder, identity={}, card="a card")
    given = SETTINGS | dict(small.WITHOUT_REWARD) | {"ppo.advantages.critic.kind": value_model, **settings}
    small.run("ppo", given)


@pytest.mark.slow
def test_ppo_trains_a_family_with_linear_attention(models_here: Path) -> None:
    run_with("qwen3_next")
    assert load_causal(models_here / "models/policy").config.model_type == "qwen3_next"


def test_a_family_whose_state_keeps_rows_that_have_ended_is_refused(models_here: Path) -> None:
    with pytest.raises(UserError) as error:
        run_with("recurrent_gemma", "shared")
    assert "models/sft fails the check before training" in str(error.value)
    assert "ended rows do not change the others: off by " in str(error.value)


def test_a_held_out_reward_model_that_answers_otherwise_in_a_batch_is_refused(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_reward

    def load_unmasked(folder: Path) -> TokenScores:
        scores = load(folder)
        if folder == Paths().reward_heldout:
            wrap(scores.model.base_model, unmask)
        return scores

    monkeypatch.setattr(ppo, "load_reward", load_unmasked)
    with pytest.raises(UserError, match="models/reward_heldout fails the check before training"):
        small.run("ppo", SETTINGS)


def test_positions_that_depend_on_the_longest_row_are_refused(models_here: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="models/sft rescales its rotary positions for a whole batch"):
        run_with("llama", max_position_embeddings=16, rope_parameters=rope)


def test_a_sparse_index_shorter_than_the_rows_is_refused(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"models/sft selects by a sparse index .* exceeds 8 tokens"):
        run_with("deepseek_v32", index_topk=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "jamba", "phimoe", "deepseek_v3"])
def test_ppo_trains_adapters_of_a_family_with_layers_that_get_none(models_here: Path, family: str) -> None:
    run_with(family, settings={"ppo.lora": {"r": 2}, "ppo.advantages.critic.lora": {"r": 2}})
    assert load_causal(models_here / "models/policy").config.model_type == family

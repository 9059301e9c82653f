"""Tasks with a known answer, learned from random weights within a fixed number of updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.batches import Ids
from tests.ppo.test_features import shared, with_lora
from tests.ppo.test_trainer import share_of_token_5, trainer

Score = Callable[[Sequence[Ids], Sequence[Ids]], Tensor]


def near_length_4(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    """1 for an answer of four tokens, its end among them; a quarter less for each one more or less."""
    return torch.tensor([1 - 0.25 * abs(len(r) - 4) for r in responses])


def learned(score: Score, **changes: Any) -> tuple[float, float]:
    """Mean raw score of the first two updates, and of the last three of 24."""
    settings: dict[str, Any] = {
        "total_episodes": 24 * 64, "rollout_batch_size": 64, "learning_rate": 1e-2, "kl_coef": 0.0,
        "num_ppo_epochs": 4, "temperature": 1.0, "missing_eos_score": -0.2,
    }  # fmt: skip
    scores = [m["objective/raw_scores"] for m in trainer(score, **(settings | changes)).updates()]
    return sum(scores[:2]) / 2, sum(scores[-3:]) / 3


TRUNCATIONS = ("eos_trick_replace", "eos_trick_subtract", "bootstrap", "bootstrap_add", "none")


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("value", ["separate", "shared"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_token_is_learned(truncation: str, value: str, adapter: bool) -> None:
    changes: dict[str, Any] = {"truncation": truncation, "value_model": value}
    if adapter:
        changes["actor_critic"], changes["reference"] = with_lora(value)
        changes["lora"] = {"r": 16, "alpha": 64.0, "value": False}
    elif value == "shared":
        changes["actor_critic"] = shared()
    if value == "shared":
        changes["critic_init"] = "sft"
    first, last = learned(share_of_token_5, **changes)
    # under an adapter embeddings and head stay random, and a few weights between them must do
    assert first < 0.05
    assert last > (0.25 if adapter else 0.5), f"from {first:.2f} to {last:.2f} only"


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_a_length_is_learned(truncation: str) -> None:
    first, last = learned(near_length_4, truncation=truncation)
    assert last > first + 0.25, f"from {first:.2f} to {last:.2f} only"

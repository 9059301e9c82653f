"""Before the first optimiser step nothing has been learned: every ratio of new to old probability is 1."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from rlhf_tasks.ppo.rollout import ActorCritic, ValueHead
from tests import families, small
from tests.ppo import toy

RANDOM_PARTS: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {},
    "seed_oss": {},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"hidden_dropout": 0.1},
    "opt": {"layerdrop": 0.5, "dropout": 0.1},
    "biogpt": {"activation_dropout": 0.1, "layerdrop": 0.5},
    "xglm": {"activation_dropout": 0.1},
    "persimmon": {"hidden_dropout": 0.1},
    "gpt_neox_japanese": {"hidden_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "hidden_dropout": 0.1},
}


def first_update(policy: PreTrainedModel) -> dict[str, float]:
    """The metrics of one update of one optimiser step, the first."""
    return next(toy.trainer(actor_critic=ActorCritic(policy, small.scores(seed=3)), **toy.ONE_STEP).updates())


@pytest.mark.parametrize("family", RANDOM_PARTS)
def test_nothing_in_a_model_is_random_while_it_trains(family: str) -> None:
    """Each of these has a part that is random in training mode, under the name that its family gives it."""
    policy = families.causal(family, vocab_size=small.VOCAB, **RANDOM_PARTS[family])
    policy.train()  # prepared models leave this mode
    metrics = first_update(policy)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["val/ratio_var"] < 1e-9
    assert not policy.training


def test_a_shared_trunk_is_not_random_either() -> None:
    policy = families.causal("bloom", vocab_size=small.VOCAB, hidden_dropout=0.1).train()
    one = toy.trainer(actor_critic=ActorCritic(policy, ValueHead(32)), value_model="shared",
                      critic_init="sft", **toy.ONE_STEP)  # fmt: skip
    assert next(one.updates())["val/ratio_var"] < 1e-9

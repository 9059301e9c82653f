"""Before the first optimiser step nothing has been learned: every ratio of new to old probability is 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling.checkpointing import recompute_activations
from rlhf_tasks.ppo.guards import BF16_RATIO_ERROR, FLOAT32_RATIO_ERROR
from rlhf_tasks.ppo.reference import OwnModel
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
    assert metrics["val/first_ratio_error"] < 1e-5
    assert not policy.training


def test_a_shared_trunk_is_not_random_either() -> None:
    policy = families.causal("bloom", vocab_size=small.VOCAB, hidden_dropout=0.1).train()
    one = toy.trainer(
        actor_critic=ActorCritic(policy, ValueHead(32)), advantages__critic__kind="shared", **toy.ONE_STEP
    )
    assert next(one.updates())["val/ratio_var"] < 1e-9


def test_the_error_of_the_first_ratio_is_that_of_the_first_minibatch_alone() -> None:
    """Later minibatches, whose ratios have moved, have no part in it."""
    one = toy.trainer(num_mini_batches=4, num_ppo_epochs=2, learning_rate=1e-2)
    metrics = next(one.updates())
    assert metrics["val/ratio_var"] > 1e-4
    assert metrics["val/first_ratio_error"] < 1e-5


def test_the_error_of_the_first_ratio_is_the_root_of_the_mean_square() -> None:
    """Old log-probs are moved by +δ and −2δ: every ratio is exp(−δ) or exp(2δ)."""
    one = toy.trainer(**toy.ONE_STEP)
    batch = toy.sampled_batch(one)
    rollout, delta = batch.rollout, 0.1
    moved = torch.where(torch.arange(rollout.mask.shape[1]) % 2 == 0, delta, -2 * delta).expand(
        rollout.mask.shape
    )
    expected = ((-moved[rollout.mask].double()).exp() - 1).square().mean().sqrt()
    changed = replace(batch, rollout=replace(rollout, logprobs=rollout.logprobs + moved * rollout.mask))
    assert one.optimiser.optimise(changed)["val/first_ratio_error"] == pytest.approx(
        float(expected), rel=1e-4
    )


class Noisy(nn.Module):
    """Noise in every mode, as the router's jitter or a dropout that no mode turns off."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, training=True)


def test_a_model_that_is_random_in_every_mode_trips_the_guard() -> None:
    policy = families.causal("bloom", vocab_size=small.VOCAB)
    layers: Any = policy.base_model.h
    for layer in layers:
        layer.mlp.gelu_impl = nn.Sequential(layer.mlp.gelu_impl, Noisy())
    assert first_update(policy)["val/first_ratio_error"] > 10 * FLOAT32_RATIO_ERROR


def test_gradient_checkpointing_turns_nothing_random_on() -> None:
    """transformers itself computes layers again in training mode only, where their dropout is on."""
    policy = families.causal("bloom", vocab_size=small.VOCAB, hidden_dropout=0.1)
    recompute_activations(policy)
    assert first_update(policy)["val/first_ratio_error"] < 1e-5


def test_a_family_that_cannot_compute_its_layers_again_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"ppo\.gradient_checkpointing: CTRLLMHeadModel does not support it"):
        recompute_activations(families.causal("ctrl"))


# --------------------------------------------------------------------------------------------- bf16

ONE_BIT = 0.01
"""Nats: on a CPU a tensor's place in memory changes the last bit of some sums, which bf16 enlarges."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate allows one precision a process there")
@pytest.mark.parametrize("family", small.FAMILIES)
def test_in_bf16_the_same_micro_batches_give_ratios_of_1_and_a_kl_of_0(family: small.Family) -> None:
    rt, policy, frozen = small.runtime("bf16"), small.causal(family), small.causal(family)
    rt.freeze(frozen)
    one = toy.trainer(
        rt=rt, actor_critic=ActorCritic(policy, small.scores(seed=3)), reference=OwnModel(frozen),
        **toy.ONE_STEP,
    )  # fmt: skip
    batch = toy.sampled_batch(one)
    kl = batch.rollout.logprobs - batch.rollout.ref_logprobs
    assert kl.abs().max() < ONE_BIT
    assert (kl == 0).float().mean() > 0.7, "one row at most has another last bit"
    assert one.optimiser.optimise(batch)["val/first_ratio_error"] < ONE_BIT / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate allows one precision a process there")
def test_in_bf16_another_cut_stays_within_the_guards_bound() -> None:
    """The rollout is scored in one micro-batch, and trained on in many."""
    one = toy.trainer(rt=small.runtime("bf16"), **toy.ONE_STEP)
    batch = toy.sampled_batch(one)
    one.optimiser.budget.max_tokens = 12
    assert one.optimiser.optimise(batch)["val/first_ratio_error"] < BF16_RATIO_ERROR / 4

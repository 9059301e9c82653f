"""The optional parts of PPO: the effect of each on one update equals its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_tasks.data.batches import collate
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.reference import OwnModel
from rlhf_tasks.ppo.trainer import Trainer
from tests import small
from tests.ppo.toy import (
    DEMONSTRATIONS,
    ONE_STEP,
    QUERIES,
    sampled_batch,
    sampled_rollout,
    shared,
    trainer,
    with_lora,
    without_gains,
)
from tests.small import EOS, PAD


def policy_kl(one: Trainer, ppo_batch: PPOBatch) -> float:
    """Mean k3 of the response tokens from the current policy to the reference."""
    with torch.no_grad():
        batch = collate(QUERIES, ppo_batch.rollout.responses, PAD)
        new = one.reference.logprobs(batch, 0.8)
        logits = small.response_logits(one.actor_critic.policy, batch) / 0.8
        log_ratio = new - logits.log_softmax(-1).gather(2, batch.responses[..., None]).squeeze(2)
        return float((log_ratio.exp() - 1 - log_ratio)[batch.response_mask].mean())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_pulls_the_policy_to_the_reference(estimator: str) -> None:
    one = trainer(
        reference_seed=7, kl__kind="in_loss", kl__estimator=estimator, kl_coef=1.0, num_ppo_epochs=8
    )
    ppo_batch = sampled_batch(one)
    before = policy_kl(one, ppo_batch)
    metrics = one.optimiser.optimise(without_gains(ppo_batch))
    assert policy_kl(one, ppo_batch) < 0.9 * before
    assert metrics["loss/kl_avg"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_adaptive_coefficient_follows_k1_from_the_next_rollout(estimator: str) -> None:
    one = trainer(
        reference_seed=7, kl_coef=0.1, kl__estimator=estimator, total_episodes=32, **ONE_STEP,
        adaptive_kl={"target": 0.5, "horizon": 1600, "clip": 50.0},
    )  # fmt: skip
    first, second = one.updates()
    error = first["objective/kl_k1"] / 0.5 - 1
    assert abs(error) < 50, "the error is not clipped"
    assert first["objective/kl_coef"] == 0.1
    assert second["objective/kl_coef"] == pytest.approx(0.1 * (1 + error * 16 / 1600))
    assert first["objective/non_score_reward"] == pytest.approx(-0.1 * first["objective/kl"])
    alike = first["objective/kl"] == pytest.approx(first["objective/kl_k1"], rel=0.01)
    assert alike == (estimator == "k1")


def test_the_ppo_penalty_keeps_the_policy_near_the_one_that_sampled() -> None:
    def approxkl(**changes: Any) -> float:
        one = trainer(num_ppo_epochs=8, learning_rate=5e-3, **changes)
        return one.optimiser.optimise(sampled_batch(one))["policy/approxkl_avg"]

    assert approxkl(kl_penalty={"beta": 20.0, "target": 0.01}) < 0.7 * approxkl()


def test_beta_follows_the_kl_of_the_policy_after_its_epochs() -> None:
    one = trainer(
        learning_rate=5e-3, kl_penalty={"beta": 1.0, "target": 1e-4}, **ONE_STEP | {"num_mini_batches": 2}
    )
    ppo_batch = sampled_batch(one)
    metrics = one.optimiser.optimise(ppo_batch)
    total, tokens = 0.0, 0
    for row, (query, response) in enumerate(zip(QUERIES, ppo_batch.rollout.responses, strict=True)):
        new = (small.logits_alone(one.actor_critic.policy, query, response) / 0.8).log_softmax(-1)
        log_ratio = new[range(len(response)), response] - ppo_batch.rollout.logprobs[row, : len(response)]
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
        tokens += len(response)
    assert metrics["policy/penalty_kl_avg"] == pytest.approx(total / tokens, rel=1e-4)
    assert total / tokens > 1.5e-4
    assert (metrics["policy/penalty_beta"], one.optimiser.penalty.beta) == (1.0, 2.0)


def test_beta_does_not_change_in_the_critics_warm_up() -> None:
    one = trainer(
        kl_penalty={"beta": 1.0, "target": 0.01},
        advantages__critic__warmup={"max_updates": 3, "settled": 0.01},
    )
    one.optimiser.optimise(sampled_batch(one), critic_only=True)
    assert one.optimiser.penalty.beta == 1


def test_epochs_end_when_the_policy_exceeds_target_kl() -> None:
    def epochs(target_kl: float | None) -> float:
        one = trainer(num_ppo_epochs=6, learning_rate=1e-3, target_kl=target_kl)
        return one.optimiser.optimise(sampled_batch(one))["train/num_epochs"]

    assert epochs(None) == 6
    assert epochs(1e-9) == 1
    assert 1 < epochs(1e-2) < 6


def test_the_reference_moves_towards_the_policy_every_so_many_updates() -> None:
    one = trainer(reference_sync={"every": 2, "alpha": 0.25}, total_episodes=48, learning_rate=1e-2)
    start = {k: v.clone() for k, v in small.causal().state_dict().items()}
    updates = one.updates()
    next(updates)
    assert all(torch.equal(value, start[key]) for key, value in one.reference.state_dict().items())
    next(updates)
    reference, policy = one.reference.state_dict(), one.actor_critic.policy.state_dict()
    for key, value in reference.items():
        torch.testing.assert_close(value, 0.75 * start[key] + 0.25 * policy[key])


def test_with_ratio_from_reference_the_ratio_is_to_the_references_log_probs() -> None:
    one = trainer(reference_seed=7, ratio_from="reference", **ONE_STEP)
    ppo_batch = sampled_batch(one)
    rollout, mask = ppo_batch.rollout, ppo_batch.rollout.mask
    ratio = (rollout.logprobs - rollout.ref_logprobs)[mask].exp()
    gain = -ppo_batch.advantages[mask]
    unclipped, clipped = gain * ratio, gain * ratio.clamp(0.8, 1.2)
    metrics = one.optimiser.optimise(ppo_batch)
    assert metrics["loss/policy_avg"] == pytest.approx(
        torch.maximum(unclipped, clipped).mean().item(), rel=1e-4
    )
    assert metrics["policy/clipfrac_avg"] == pytest.approx(
        (clipped > unclipped).float().mean().item(), abs=1e-4
    )
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5), "the policy still equals the one that sampled"


# -------------------- other losses, and models


def test_the_entropy_bonus_flattens_the_policy() -> None:
    def entropy_after(coef: float) -> float:
        one = trainer(entropy_coef=coef, num_ppo_epochs=4, learning_rate=5e-3)
        ppo_batch = without_gains(sampled_batch(one))
        one.optimiser.optimise(ppo_batch)
        return one.optimiser.optimise(ppo_batch)["policy/entropy_avg"]

    assert entropy_after(1.0) > entropy_after(0.0) + 1e-3


def test_ptx_adds_the_language_modelling_loss_of_the_demonstrations() -> None:
    """With no other gradient, the step's gradient is that of the LM loss times the coefficient."""
    one = trainer(demonstrations=DEMONSTRATIONS, ptx={"coef": 0.3, "text": None}, **ONE_STEP)
    assert one.optimiser.ptx_queue is not None
    one.optimiser.ptx_queue.waiting = list(range(16))
    metrics = one.optimiser.optimise(without_gains(sampled_batch(one)))
    model = small.causal()
    losses = []
    for query, response in zip(DEMONSTRATIONS.queries[:16], DEMONSTRATIONS.responses[:16], strict=True):
        logits = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
        losses.append(-logits.log_softmax(-1)[range(len(response)), response])
    loss = torch.cat(losses).mean()
    (0.3 * loss).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert metrics["loss/ptx_avg"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(gradients.norm().item(), rel=1e-3)


def test_every_demonstration_comes_once_before_any_comes_again() -> None:
    one = trainer(demonstrations=DEMONSTRATIONS, ptx={"coef": 0.3, "text": None}, **ONE_STEP)
    queue = one.optimiser.ptx_queue
    assert queue is not None
    assert sorted(queue.take(16) + queue.take(8)) == list(range(24))


def test_the_critic_can_have_a_learning_rate_of_its_own() -> None:
    def changes(rate: float | None) -> tuple[float, float]:
        one = trainer(
            learning_rate=1e-3, advantages__critic__learning_rate=rate, total_episodes=16, **ONE_STEP
        )
        before = copy.deepcopy(one.actor_critic)
        list(one.updates())
        largest = [
            max(
                float((p - q).detach().abs().max())
                for p, q in zip(new.parameters(), old.parameters(), strict=True)
            )
            for new, old in ((one.actor_critic.policy, before.policy), (one.actor_critic.value, before.value))
        ]
        return largest[0], largest[1]

    one_rate, two_rates = changes(None), changes(1e-2)
    assert two_rates[0] == one_rate[0]
    assert two_rates[1] == pytest.approx(10 * one_rate[1], rel=0.05)  # Adam's first step is the rate


def test_a_shared_value_head_starts_at_zero_and_learns() -> None:
    one = trainer(actor_critic=shared(), advantages__critic__kind="shared", **ONE_STEP)
    rollout = sampled_rollout(one)
    assert (rollout.values == 0).all()
    assert (rollout.last_values == 0).all()
    ppo_batch, _ = one.estimator.estimate(rollout)
    metrics = one.optimiser.optimise(ppo_batch)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert sampled_rollout(one).values.abs().max() > 0


def test_the_policy_with_its_adapters_off_is_the_reference() -> None:
    actor_critic, reference = with_lora()
    one = trainer(
        actor_critic=actor_critic, reference=reference, lora={"r": 16, "alpha": 64.0},
        learning_rate=1e-2, total_episodes=32,
    )  # fmt: skip
    first, second = one.updates()
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert second["objective/kl"] > 1e-3
    batch = collate(QUERIES[:4], [[3, EOS]] * 4, PAD)
    torch.testing.assert_close(reference.logprobs(batch, 0.8), OwnModel(small.causal()).logprobs(batch, 0.8))

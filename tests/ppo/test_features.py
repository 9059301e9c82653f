"""The optional parts of PPO: the effect of each on one update equals its definition."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.config.training import Lora
from rlhf_tasks.data.batches import Batch, Ids, collate
from rlhf_tasks.modeling import models
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel
from rlhf_tasks.ppo.rollout import ActorCritic, ValueHead
from rlhf_tasks.ppo.trainer import Trainer, require_finite
from rlhf_tasks.training.supervised import LanguageModelling
from tests import small
from tests.ppo.test_trainer import QUERIES, hand_made_rollout, parameters, sampled_rollout, trainer
from tests.small import EOS, PAD

ONE_STEP: dict[str, Any] = {"num_mini_batches": 1, "num_ppo_epochs": 1}
DEMONSTRATIONS = LanguageModelling(*small.rows(24, seed=5), pad=PAD)


def shared() -> ActorCritic:
    return ActorCritic(small.causal(), ValueHead(small.HIDDEN))


def with_lora(value: str = "separate") -> tuple[ActorCritic, AdapterOff]:
    policy = models.with_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    critic = small.scores(seed=3) if value == "separate" else ValueHead(small.HIDDEN)
    return ActorCritic(policy, critic), AdapterOff(policy)


def sampled_batch(one: Trainer) -> PPOBatch:
    return one.estimator.estimate(sampled_rollout(one))[0]


def flat(ppo_batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of zero and a critic that is right: only the other losses have a gradient."""
    zero = torch.zeros_like(ppo_batch.advantages)
    return PPOBatch(ppo_batch.rollout, zero, ppo_batch.rollout.values, ppo_batch.kl_coef)


def policy_kl(one: Trainer, ppo_batch: PPOBatch) -> float:
    """Mean k3 of the response tokens from the current policy to the reference."""
    with torch.no_grad():
        batch = collate(QUERIES, ppo_batch.rollout.responses, PAD)
        new = one.reference.logprobs(batch, 0.8)
        logits = models.response_logits(one.actor_critic.policy, batch) / 0.8
        log_ratio = new - logits.log_softmax(-1).gather(2, batch.responses[..., None]).squeeze(2)
        return float((log_ratio.exp() - 1 - log_ratio)[batch.response_mask].mean())


# ------------------------------------------------------------------------------------------ KL


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_pulls_the_policy_to_the_reference(estimator: str) -> None:
    one = trainer(reference_seed=7, kl_in="loss", kl_estimator=estimator, kl_coef=1.0, num_ppo_epochs=8)
    ppo_batch = sampled_batch(one)
    before = policy_kl(one, ppo_batch)
    metrics = one.optimiser.optimise(flat(ppo_batch))
    assert policy_kl(one, ppo_batch) < 0.9 * before
    assert metrics["loss/kl_avg"] > 0


def test_kl_in_the_loss_is_not_in_the_reward() -> None:
    _, metrics = trainer(kl_in="loss", kl_estimator="k3", kl_coef=0.1).estimator.estimate(hand_made_rollout())
    assert metrics["objective/non_score_reward"] == 0
    assert metrics["objective/rlhf_reward"] == metrics["objective/scores"]


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 1.5), ("k2", 0.5 * (1 + 0.25 + 1 + 0.25 + 1) / 2)])
def test_objective_kl_uses_the_chosen_estimator(estimator: str, kl: float) -> None:
    _, metrics = trainer(kl_estimator=estimator).estimator.estimate(hand_made_rollout())
    assert metrics["objective/kl"] == pytest.approx(kl)
    assert metrics["objective/kl_k1"] == pytest.approx(1.5), "guards and adaptive_kl use k1"


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_adaptive_coefficient_follows_k1_from_the_next_rollout(estimator: str) -> None:
    one = trainer(
        reference_seed=7, kl_coef=0.1, kl_estimator=estimator, total_episodes=32, **ONE_STEP,
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
    one = trainer(kl_penalty={"beta": 1.0, "target": 0.01}, critic_warmup={"max_updates": 3, "settled": 0.01})
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


# -------------------------------------------------------------------------------------- the losses


def test_the_entropy_bonus_flattens_the_policy() -> None:
    def entropy_after(coef: float) -> float:
        one = trainer(entropy_coef=coef, num_ppo_epochs=4, learning_rate=5e-3)
        ppo_batch = flat(sampled_batch(one))
        one.optimiser.optimise(ppo_batch)
        return one.optimiser.optimise(ppo_batch)["policy/entropy_avg"]

    assert entropy_after(1.0) > entropy_after(0.0) + 1e-3


def test_ptx_adds_the_language_modelling_loss_of_the_demonstrations() -> None:
    """With no other gradient, the step's gradient is that of the LM loss times the coefficient."""
    one = trainer(demonstrations=DEMONSTRATIONS, ptx={"coef": 0.3, "text": None}, **ONE_STEP)
    assert one.optimiser.ptx_queue is not None
    one.optimiser.ptx_queue.waiting = list(range(16))
    metrics = one.optimiser.optimise(flat(sampled_batch(one)))
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
        one = trainer(learning_rate=1e-3, value_learning_rate=rate, total_episodes=16, **ONE_STEP)
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


def test_the_warm_up_changes_the_critic_alone_and_ends_when_its_loss_has_settled() -> None:
    one = trainer(
        critic_warmup={"max_updates": 12, "settled": 0.3}, learning_rate=3e-3, num_ppo_epochs=4,
        truncation="none", total_episodes=16,
    )  # fmt: skip
    policy = copy.deepcopy(one.actor_critic.policy.state_dict())
    updates, losses = one.updates(), []
    for metrics in updates:
        if "lr" in metrics:
            break
        losses.append(metrics["warmup/value_loss"])
        after = one.actor_critic.policy.state_dict()
        assert all(torch.equal(after[key], policy[key]) for key in policy)
    assert losses == one.warmup_losses
    assert 3 <= len(losses) <= 12
    assert losses[-1] < losses[0]
    settled = [n for n in range(3, len(losses) + 1) if min(losses[n - 2 : n]) > 0.7 * min(losses[: n - 2])]
    assert len(losses) == next(iter(settled), 12)
    assert one.update == 1, "the first update follows the warm-up"


def test_the_policys_first_steps_after_a_warm_up_are_adams_first_steps() -> None:
    """Gradients of zero must not count as steps: Adam would correct the moments for too many."""
    one = trainer(critic_warmup={"max_updates": 3, "settled": 0.01}, total_episodes=16)
    before = copy.deepcopy(one.actor_critic.policy)
    assert [("lr" in metrics) for metrics in one.updates()] == [False, False, False, True]
    steps = [float(one.optimiser.optimizer.state[p]["step"]) for p in one.actor_critic.policy.parameters()]
    assert set(steps) == {4.0}, "2 epochs of 2 minibatches"
    critic = [float(one.optimiser.optimizer.state[p]["step"]) for p in one.actor_critic.value.parameters()]
    assert set(critic) == {16.0}, "3 updates of warm-up before"
    changes = [
        float((p - q).detach().abs().max())
        for p, q in zip(one.actor_critic.policy.parameters(), before.parameters(), strict=True)
    ]
    assert 1e-3 < max(changes) <= 4 * 1e-3 * 1.3, "each of Adam's first steps is about the rate"


# -------------------------------------------------------------------------------- normalisation


def test_advantages_can_stay_unwhitened_and_can_be_clipped() -> None:
    plain, _ = trainer(whiten_advantages=False).estimator.estimate(hand_made_rollout())
    white, _ = trainer().estimator.estimate(hand_made_rollout())
    clipped, _ = trainer(advantage_clip=0.5).estimator.estimate(hand_made_rollout())
    torch.testing.assert_close(plain.advantages, plain.returns)  # the values are zero
    torch.testing.assert_close(clipped.advantages, white.advantages.clamp(-0.5, 0.5))
    assert white.advantages.abs().max() > 0.5


def test_scores_are_scaled_before_the_rule_for_missing_eos() -> None:
    one = trainer(score_scaling={"subtract_mean": True, "clip": None}, missing_eos_score=-1.5)
    _, metrics = one.estimator.estimate(
        hand_made_rollout()
    )  # scores 2 and 6 → −1 and 1; the second did not end
    assert metrics["objective/scores"] == pytest.approx((-1 - 1.5) / 2)
    assert metrics["objective/raw_scores"] == pytest.approx(4)


# -------------------------------------------------------------------------------------- metrics


def test_perplexities_repetition_and_explained_variance_equal_hand_computed_values() -> None:
    one = trainer(truncation="none", kl_coef=0.0, lam=1.0)
    rollout = hand_made_rollout()
    _, metrics = one.estimator.estimate(rollout)
    assert metrics["objective/perplexity"] == pytest.approx(math.exp(8 / 5))
    assert metrics["objective/ref_perplexity"] == pytest.approx(math.exp((2 + 2.5 + 1.5 + 1 + 4) / 5))
    assert metrics["val/truncated_share"] == 0.5
    assert metrics["val/explained_variance"] == pytest.approx(0)  # values of zero explain nothing
    assert metrics["val/distinct_1"] == metrics["val/distinct_2"] == 1
    assert metrics["val/repetition"] == 0


def test_a_critic_that_is_right_explains_all_variance() -> None:
    one = trainer(truncation="none", kl_coef=0.0, lam=1.0)
    values = torch.tensor([[2.0, 2.0, 0, 0], [6.0, 6.0, 6.0, 0]])
    _, metrics = one.estimator.estimate(replace(hand_made_rollout(), values=values))
    assert metrics["val/explained_variance"] == pytest.approx(1)


def test_repetition_is_the_share_of_repeated_trigrams() -> None:
    responses = [[7, 7, 7, 7], [8, 9, 10, 11]]
    mask = torch.ones(2, 4, dtype=torch.bool)
    _, metrics = trainer().estimator.estimate(replace(hand_made_rollout(), responses=responses, mask=mask))
    assert metrics["val/distinct_1"] == pytest.approx((1 / 4 + 1) / 2)
    assert metrics["val/distinct_2"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["val/repetition"] == pytest.approx(1 - (1 / 2 + 1) / 2)


# ----------------------------------------------------------------------------------------- models


def test_a_shared_value_head_starts_at_zero_and_learns() -> None:
    one = trainer(actor_critic=shared(), value_model="shared", critic_init="sft", **ONE_STEP)
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
        actor_critic=actor_critic, reference=reference, lora={"r": 16, "alpha": 64.0, "value": False},
        learning_rate=1e-2, total_episodes=32,
    )  # fmt: skip
    first, second = one.updates()
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert second["objective/kl"] > 1e-3
    batch = collate(QUERIES[:4], [[3, EOS]] * 4, PAD)
    torch.testing.assert_close(reference.logprobs(batch, 0.8), OwnModel(small.causal()).logprobs(batch, 0.8))


def test_the_last_value_is_the_value_of_the_state_after_the_last_token() -> None:
    one = trainer()
    rollout = sampled_rollout(one)
    value = small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        with torch.no_grad():
            alone = value(collate([query], [response], PAD))[0, -1]
        assert rollout.last_values[row].item() == pytest.approx(alone.item(), abs=1e-5)


def test_a_custom_stop_token_ends_responses() -> None:
    one = trainer(stop_token=7, truncation="eos_trick_replace")
    rollout = sampled_rollout(one)
    for response, ended in zip(rollout.responses, rollout.ended.tolist(), strict=True):
        assert ended == (response[-1] == 7)
        assert 7 not in response[:-1]
    assert rollout.ended.any()


# ---------------------------------------------------------------------------------- faults, and resume


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_nan_or_infinite_is_an_error(bad: float) -> None:
    def score(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        return torch.tensor([bad] + [0.0] * (len(queries) - 1))

    with pytest.raises(NonFiniteError, match="scores"):
        sampled_rollout(trainer(score))


def test_no_step_is_taken_on_a_loss_that_is_nan() -> None:
    one = trainer(**ONE_STEP)
    ppo_batch = sampled_batch(one)
    ppo_batch.advantages[0, 0] = math.nan
    before = parameters(one)
    with pytest.raises(NonFiniteError) as caught:
        one.optimiser.optimise(ppo_batch)
    assert torch.equal(parameters(one), before)
    assert len(caught.value.batch["responses"]) == 16
    assert caught.value.batch["advantages"].isnan().sum() == 1
    assert torch.equal(caught.value.batch["returns"], ppo_batch.returns)
    assert sorted(caught.value.batch["rows"]) == list(range(16))


def test_responses_that_the_reference_finds_impossible_are_an_error() -> None:
    """A low temperature gives a rare token −1,000 nats, and no float holds exp(1000)."""

    class Surprised(OwnModel):
        def logprobs(self, batch: Batch, temperature: float) -> Tensor:
            return super().logprobs(batch, temperature) - 1000

    one = trainer(reference=Surprised(small.causal()))
    before = parameters(one)
    with pytest.raises(NonFiniteError, match=r"^objective/ref_perplexity = inf$") as caught:
        next(one.updates())
    assert torch.equal(parameters(one), before)
    assert caught.value.batch["ref_logprobs"].max() == 0, "padding"
    assert caught.value.batch["ref_logprobs"].min() < -1000


def test_a_ratio_whose_square_is_infinite_is_an_error() -> None:
    """The loss takes its ratio from the reference: there it is small, and the step is finite."""
    one = trainer(ratio_from="reference")
    ppo_batch = sampled_batch(one)
    rollout = replace(ppo_batch.rollout, logprobs=ppo_batch.rollout.logprobs - 60)
    metrics = one.optimiser.optimise(replace(ppo_batch, rollout=rollout))
    with pytest.raises(NonFiniteError, match=r"^val/ratio_var = inf$"):
        require_finite(metrics, ppo_batch)


ALL_ON: dict[str, Any] = {
    "total_episodes": 80, "adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "kl_penalty": {"beta": 0.5, "target": 0.001}, "reference_sync": {"every": 2, "alpha": 0.5},
    "score_scaling": {"subtract_mean": True, "clip": 2.0},
    "critic_warmup": {"max_updates": 2, "settled": 0.9}, "ptx": {"coef": 0.1, "text": None},
    "schedule": "linear",
    "truncation": "bootstrap", "value_learning_rate": 2e-3, "entropy_coef": 0.01, "dual_clip": 3.0,
    "cliprange_high": 0.3, "target_kl": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_trainer_resumed_from_its_state_ends_with_the_same_bytes(stop_after: int) -> None:
    whole = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    series = list(whole.updates())
    first = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    updates = first.updates()
    head = [next(updates) for _ in range(stop_after)]
    state = copy.deepcopy(first.state_dict()), first.collector.generator.get_state()
    second = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    second.load_state_dict(state[0])
    second.collector.generator.set_state(state[1])
    tail = list(second.updates())
    assert torch.equal(parameters(second), parameters(whole))
    timed = ("time/", "eps")
    for a, b in zip(series, [*head, *tail], strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }

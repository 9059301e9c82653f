"""From scores to advantages, and the metrics of a rollout, against hand-computed values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.rollout_metrics import standard_error
from tests.ppo.toy import (
    hand_made_rollout,
    sampled_batch,
    trainer,
)


def test_objective_metrics_equal_hand_computed_values() -> None:
    one = trainer(truncation__kind="none", kl_coef=0.1)
    _, metrics = one.estimator.estimate(hand_made_rollout())
    # kl: (1 + 0.5) + (1 − 0.5 + 1) = 3 over two responses; −log p: 3 + 5
    assert metrics["objective/kl"] == pytest.approx(1.5)
    assert metrics["objective/entropy"] == pytest.approx(4.0)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.15)
    assert metrics["objective/scores"] == pytest.approx(4.0)
    assert metrics["objective/rlhf_reward"] == pytest.approx(3.85)
    assert metrics["val/num_eos_tokens"] == 1
    assert metrics["val/response_length"] == pytest.approx(2.5)


def test_the_standard_error_of_the_kl_is_its_deviation_over_the_root_of_the_episodes() -> None:
    """1.5 and 4.5 nats: 3 ± 1.5 / √2. A single episode shows no spread."""
    rollout = hand_made_rollout()
    spread = replace(rollout, ref_logprobs=rollout.ref_logprobs - torch.tensor([[0.0], [1.0]]))
    metrics = trainer().estimator.estimate(spread)[1]
    assert metrics["objective/kl_k1"] == pytest.approx(3.0)
    assert metrics["objective/kl_k1_standard_error"] == pytest.approx(1.5 / 2**0.5)
    assert standard_error(-0.4, 0.16, 1.0) == 0.4


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 1.5), ("k2", 0.5 * (1 + 0.25 + 1 + 0.25 + 1) / 2)])
def test_objective_kl_uses_the_chosen_estimator(estimator: str, kl: float) -> None:
    _, metrics = trainer(kl__estimator=estimator).estimator.estimate(hand_made_rollout())
    assert metrics["objective/kl"] == pytest.approx(kl)
    assert metrics["objective/kl_k1"] == pytest.approx(1.5), "guards and adaptive_kl use k1"


def test_rlhf_reward_includes_the_eos_rule() -> None:
    _, metrics = trainer(truncation__missing_eos_score=-1.0, kl_coef=0.1).estimator.estimate(
        hand_made_rollout()
    )
    assert metrics["objective/scores"] == pytest.approx(0.5)  # (2 − 1) / 2
    assert metrics["objective/raw_scores"] == pytest.approx(4.0)
    assert metrics["objective/rlhf_reward"] == pytest.approx(0.5 - 0.15)


def test_kl_in_the_loss_is_not_in_the_reward() -> None:
    _, metrics = trainer(kl__kind="in_loss", kl__estimator="k3", kl_coef=0.1).estimator.estimate(
        hand_made_rollout()
    )
    assert metrics["objective/non_score_reward"] == 0
    assert metrics["objective/rlhf_reward"] == metrics["objective/scores"]


def test_perplexities_repetition_and_explained_variance_equal_hand_computed_values() -> None:
    one = trainer(truncation__kind="none", kl_coef=0.0, advantages__lam=1.0)
    rollout = hand_made_rollout()
    _, metrics = one.estimator.estimate(rollout)
    assert metrics["objective/perplexity"] == pytest.approx(math.exp(8 / 5))
    assert metrics["objective/ref_perplexity"] == pytest.approx(math.exp((2 + 2.5 + 1.5 + 1 + 4) / 5))
    assert metrics["val/truncated_share"] == 0.5
    assert metrics["val/explained_variance"] == pytest.approx(0)  # values of zero explain nothing
    assert metrics["val/distinct_1"] == metrics["val/distinct_2"] == 1
    assert metrics["val/repetition"] == 0


def test_a_critic_that_is_right_explains_all_variance() -> None:
    one = trainer(truncation__kind="none", kl_coef=0.0, advantages__lam=1.0)
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


# -------------------- advantages


@pytest.fixture(scope="module")
def ppo_batch() -> PPOBatch:
    return sampled_batch(trainer(reference_seed=7))


def test_returns_are_the_scores_minus_the_remaining_kl() -> None:
    ppo_batch, _ = trainer(advantages__lam=1.0, kl_coef=0.1).estimator.estimate(hand_made_rollout())
    expected = torch.tensor([[2 - 0.15, 2 - 0.05, 0, 0], [-1 - 0.15, -1 - 0.05, -1 - 0.1, 0]])
    torch.testing.assert_close(ppo_batch.returns, expected)


def test_advantages_have_mean_0_and_variance_1_over_the_rollout(ppo_batch: PPOBatch) -> None:
    real = ppo_batch.advantages[ppo_batch.rollout.mask]
    assert real.mean().item() == pytest.approx(0, abs=1e-5)
    assert real.var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert (ppo_batch.advantages[~ppo_batch.rollout.mask] == 0).all()


def test_whitened_rewards_keep_their_mean() -> None:
    one = trainer(advantages__whiten_rewards=True, advantages__lam=1.0, kl_coef=0.1)
    ppo_batch, _ = one.estimator.estimate(hand_made_rollout())
    rewards = [-0.1, 2 - 0.05, -0.1, 0.05, -1 - 0.1]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    white = [(r - mean) / std + mean for r in rewards]
    assert ppo_batch.returns[0, 0].item() == pytest.approx(white[0] + white[1], abs=1e-5)
    assert ppo_batch.returns[1, 2].item() == pytest.approx(white[4], abs=1e-5)


@pytest.mark.parametrize("rule", ["bootstrap", "bootstrap_add"])
def test_the_value_of_an_unfinished_responses_last_state_is_not_whitened(rule: str) -> None:
    """With V = 4 and γ = 0.9 the return of the last token is its whitened reward plus 3.6."""
    one = trainer(
        advantages__whiten_rewards=True,
        truncation__kind=rule,
        advantages__gamma=0.9,
        advantages__lam=1.0,
        kl_coef=0.1,
    )
    rollout = replace(hand_made_rollout(), last_values=torch.tensor([5.0, 4.0]))
    ppo_batch, metrics = one.estimator.estimate(rollout)
    score = 6.0 if rule == "bootstrap_add" else 0.0
    rewards = [-0.1, 2 - 0.05, -0.1, 0.05, score - 0.1]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    white = [(r - mean) / std + mean for r in rewards]
    last = white[4] + 3.6
    middle = white[3] + 0.9 * last
    expected = [white[0] + 0.9 * white[1], white[1], 0, 0, white[2] + 0.9 * middle, middle, last, 0]
    assert ppo_batch.returns.flatten().tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["objective/scores"] == pytest.approx((2 + score + 3.6) / 2)


def test_advantages_can_stay_unwhitened_and_can_be_clipped() -> None:
    plain, _ = trainer(whiten_advantages=False).estimator.estimate(hand_made_rollout())
    white, _ = trainer().estimator.estimate(hand_made_rollout())
    clipped, _ = trainer(advantage_clip=0.5).estimator.estimate(hand_made_rollout())
    torch.testing.assert_close(plain.advantages, plain.returns)  # the values are zero
    torch.testing.assert_close(clipped.advantages, white.advantages.clamp(-0.5, 0.5))
    assert white.advantages.abs().max() > 0.5


def test_scores_are_scaled_before_the_rule_for_missing_eos() -> None:
    one = trainer(score_scaling={"subtract_mean": True, "clip": None}, truncation__missing_eos_score=-1.5)
    _, metrics = one.estimator.estimate(
        hand_made_rollout()
    )  # scores 2 and 6 → −1 and 1; the second did not end
    assert metrics["objective/scores"] == pytest.approx((-1 - 1.5) / 2)
    assert metrics["objective/raw_scores"] == pytest.approx(4)

"""The optional parts of PPO: the effect of each on an update equals its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.ppo import train as loop
from rlhf_tasks.ppo.rollout import ReferenceCopy
from rlhf_tasks.ppo.state import ShuffledRows
from tests import small
from tests.ppo.toy import DEMONSTRATIONS, ONE_STEP, QUERIES, log_p_alone, toy, with_lora, without_gains
from tests.small import EOS, PAD


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_adaptive_coefficient_follows_k1_from_the_next_rollout(estimator: str) -> None:
    adaptive = {"target": 0.5, "horizon": 1600, "clip": 50.0}
    changes: dict[str, Any] = {"kl_coef": 0.1, "kl__estimator": estimator, "adaptive_kl": adaptive}
    changes |= {"total_episodes": 32}
    first, second = toy(reference_seed=7, **changes, **ONE_STEP).updates
    error = first["objective/kl_k1"] / 0.5 - 1
    assert abs(error) < 50, "the error is not clipped"
    assert first["objective/kl_coef"] == 0.1
    assert second["objective/kl_coef"] == pytest.approx(0.1 * (1 + error * 16 / 1600))
    for metrics, coef in ((first, 0.1), (second, second["objective/kl_coef"])):
        assert metrics["objective/non_score_reward"] == pytest.approx(-coef * metrics["objective/kl"])
    alike = first["objective/kl"] == pytest.approx(first["objective/kl_k1"], rel=0.01)
    assert alike == (estimator == "k1")


def test_beta_follows_the_kl_of_the_policy_after_its_epochs() -> None:
    penalty: dict[str, Any] = {"kl_penalty": {"beta": 1.0, "target": 1e-4}}
    one = toy(learning_rate=5e-3, num_mini_batches=2, num_ppo_epochs=1, **penalty)
    rollout, _ = one.estimate()
    metrics = one.learn(rollout)
    total, tokens = 0.0, 0
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        new = log_p_alone(one.actor_critic.policy, query, response).detach()
        log_ratio = new[range(len(response)), response] - rollout.logprobs[row, : len(response)]
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
        tokens += len(response)
    assert metrics["policy/penalty_kl_avg"] == pytest.approx(total / tokens, rel=1e-4)
    assert total / tokens > 1.5e-4
    assert (metrics["policy/penalty_beta"], one.state.penalty_beta) == (1.0, 2.0)


def test_out_of_memory_where_the_penaltys_kl_is_measured_cuts_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = list[int]()

    def limited(model: nn.Module, batch: Batch, temperature: float) -> Tensor:
        passes.append(batch.query_response.numel())
        if passes[-1] > 60:
            raise torch.OutOfMemoryError
        return response_logprobs(model, batch, temperature)

    changes: dict[str, Any] = {"kl_penalty": {"beta": 1.0, "target": 1e-4}, "num_mini_batches": 2}
    plain, short = toy(**changes), toy(**changes)
    rollout, _ = toy(**changes).estimate()
    expected = plain.learn(rollout)
    monkeypatch.setattr(loop, "response_logprobs", limited)
    metrics = short.learn(rollout)
    assert max(passes) > 60 >= passes[-1]
    assert metrics["policy/penalty_kl_avg"] == pytest.approx(expected["policy/penalty_kl_avg"], rel=1e-4)


def test_beta_does_not_change_in_the_critics_warm_up() -> None:
    penalty: dict[str, Any] = {"kl_penalty": {"beta": 1.0, "target": 0.01}}
    one = toy(advantages__critic__warmup={"max_updates": 3, "settled": 0.01}, **penalty)
    assert "warmup/value_loss" in next(one.updates)
    assert one.state.penalty_beta == 1


def test_epochs_end_when_the_policy_exceeds_target_kl() -> None:
    def epochs(target_kl: float | None) -> float:
        one = toy(num_ppo_epochs=6, learning_rate=1e-3, target_kl=target_kl)
        return next(one.updates)["train/num_epochs"]

    assert epochs(None) == 6
    assert epochs(1e-9) == 1
    assert 1 < epochs(1e-2) < 6


def test_the_reference_moves_towards_the_policy_every_so_many_updates() -> None:
    one = toy(reference_sync={"every": 2, "alpha": 0.25}, total_episodes=48, learning_rate=1e-2)
    assert isinstance(one.state.reference, ReferenceCopy)
    start, reference = small.causal().state_dict(), one.state.reference.model
    updates = one.updates
    next(updates)
    assert all(torch.equal(value, start[key]) for key, value in reference.state_dict().items())
    next(updates)
    policy = one.actor_critic.policy.state_dict()
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(value, 0.75 * start[key] + 0.25 * policy[key])


@pytest.mark.parametrize("max_tokens", [16384, 25])
def test_ptx_adds_the_language_modeling_loss_of_the_demonstrations(max_tokens: int) -> None:
    """With no other gradient, the step's gradient is that of the LM loss times the coefficient."""
    changes: dict[str, Any] = {"ptx": {"coef": 0.3, "text": None}, "micro_batch_tokens": max_tokens}
    one = toy(text=DEMONSTRATIONS, **changes, **ONE_STEP)
    assert one.state.ptx is not None
    rollout = one.sample()
    one.state.ptx.waiting = list(range(16))
    metrics = one.learn(without_gains(rollout))
    model, losses = small.causal(), []
    for query, response in zip(DEMONSTRATIONS.queries[:16], DEMONSTRATIONS.responses[:16], strict=True):
        logits = 0.8 * log_p_alone(model, query, response)  # at the temperature 1, but for a constant
        losses.append(-logits.log_softmax(-1)[range(len(response)), response])
    loss = torch.cat(losses).mean()
    (0.3 * loss).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert metrics["loss/ptx_avg"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(gradients.norm().item(), rel=1e-3)


def test_every_row_comes_once_before_any_comes_again() -> None:
    queue = ShuffledRows(20, torch.Generator().manual_seed(1))
    seen = [row for _ in range(5) for row in queue.take(8)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_policy_with_its_adapters_off_is_the_reference() -> None:
    actor_critic, reference = with_lora()
    lora: dict[str, Any] = {"lora": {"r": 16, "alpha": 64.0}, "learning_rate": 1e-2, "total_episodes": 32}
    first, second = toy(actor_critic=actor_critic, reference=reference, **lora).updates
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert second["objective/kl"] > 1e-3
    batch = collate(QUERIES[:4], [[3, EOS]] * 4, PAD)
    plain = response_logprobs(small.causal(), batch, 0.8)
    torch.testing.assert_close(reference.logprobs(batch, 0.8), plain)

"""Whole updates: what they learn, measure and reject, and how a trainer is resumed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf_tasks.ppo.reference import OwnModel
from rlhf_tasks.ppo.trainer import require_finite
from torch import Tensor

from rlhf_tasks.data.batches import Batch
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.rollout import ActorCritic
from tests import small
from tests.ppo.toy import (
    DEMONSTRATIONS,
    QUERIES,
    parameters,
    sampled_batch,
    trainer,
)


def test_a_planted_task_is_learned() -> None:
    one = trainer(
        total_episodes=1280, rollout_batch_size=64, learning_rate=5e-3, kl_coef=0.0, num_ppo_epochs=4,
        truncation__kind="none", temperature=1.0,
    )  # fmt: skip
    history = list(one.updates())
    assert [m["episode"] for m in history] == [64 * (n + 1) for n in range(20)]
    assert history[0]["objective/scores"] < 0.15
    assert sum(m["objective/scores"] for m in history[-3:]) / 3 > 0.5
    assert history[-1]["objective/kl"] > 1, "the policy has left the reference"


def test_an_update_measures_the_seconds_of_its_steps() -> None:
    """The clock is read at the start, and after sampling, scoring, estimating and optimising."""
    readings = iter([0.0, 2.0, 6.0, 14.0, 30.0])
    metrics = next(trainer(clock=lambda: next(readings)).updates())
    seconds = [metrics[f"time/{part}_seconds"] for part in ("generate", "score", "train")]
    assert seconds == [2.0, 4.0, 16.0]
    assert metrics["eps"] == pytest.approx(16 / 30)
    assert metrics["time/tokens_per_second"] == pytest.approx(16 * metrics["val/response_length"] / 30)


def test_the_share_of_padding_is_that_of_the_epochs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, padded = trainer(total_episodes=16, micro_batch_tokens=40), list[int]()
    forward = type(one.actor_critic).state_values

    def counted(self: ActorCritic, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            padded.append(batch.query_response.numel())
        return forward(self, batch)

    monkeypatch.setattr(ActorCritic, "state_values", counted)
    metrics = next(one.updates())
    queries = 2 * sum(len(query) for query in QUERIES)  # two epochs
    real = queries + 2 * 16 * metrics["val/response_length"]
    assert metrics["time/padding_share"] == pytest.approx(1 - real / sum(padded))
    assert 0 < metrics["time/padding_share"] < 0.5


def test_the_same_seed_trains_the_same_policy() -> None:
    first, second = trainer(total_episodes=32), trainer(total_episodes=32)
    a, b = list(first.updates()), list(second.updates())
    assert torch.equal(parameters(first), parameters(second))
    timed = ("time/", "eps")
    assert [{k: v for k, v in m.items() if not k.startswith(timed)} for m in a] == [
        {k: v for k, v in m.items() if not k.startswith(timed)} for m in b
    ]


# -------------------- critic warm-up


def test_the_warm_up_changes_the_critic_alone_and_ends_when_its_loss_has_settled() -> None:
    one = trainer(
        advantages__critic__warmup={"max_updates": 12, "settled": 0.3}, learning_rate=3e-3, num_ppo_epochs=4,
        truncation__kind="none", total_episodes=16,
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
    one = trainer(advantages__critic__warmup={"max_updates": 3, "settled": 0.01}, total_episodes=16)
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


# -------------------- faults, and resume


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
    with pytest.raises(NonFiniteError, match=r"^val/ratio_var = inf, val/first_ratio_error = inf$"):
        require_finite(metrics, ppo_batch)


ALL_ON: dict[str, Any] = {
    "total_episodes": 80, "adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "kl_penalty": {"beta": 0.5, "target": 0.001}, "reference_sync": {"every": 2, "alpha": 0.5},
    "score_scaling": {"subtract_mean": True, "clip": 2.0},
    "advantages.critic.warmup": {"max_updates": 2, "settled": 0.9}, "ptx": {"coef": 0.1, "text": None},
    "schedule": "linear",
    "truncation.kind": "bootstrap", "advantages.critic.learning_rate": 2e-3, "entropy_coef": 0.01,
    "dual_clip": 3.0,
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

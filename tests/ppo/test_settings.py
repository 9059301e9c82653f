"""Each numeric setting reaches the arithmetic that it names, checked by hand or by a slow loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.ppo.batch import PPOBatch
from tests import small
from tests.ppo import test_advantages
from tests.ppo.toy import (
    ONE_STEP,
    QUERIES,
    from_older_policy,
    hand_made_rollout,
    parameters,
    sampled_batch,
    trainer,
    without_gains,
)

# ------------------------------------------------------------------------------ from scores to returns

VALUES = [[0.5, -1.0], [2.0, 0.25, 1.5]]
KL_COST = [[-0.1, -0.05], [-0.1, 0.05, -0.1]]
"""−0.1 · (logprobs − ref_logprobs) of `hand_made_rollout`."""


@pytest.mark.parametrize(
    ("changes", "unfinished"),
    [
        ({"truncation.kind": "none"}, 6.0),
        ({"truncation.kind": "eos_trick_replace", "truncation.missing_eos_score": -1.5}, -1.5),
        ({"truncation.kind": "eos_trick_subtract", "truncation.missing_eos_score": -1.5}, 6.0 - 1.5),
        ({"truncation.kind": "bootstrap"}, 0.9 * 3.0),
        ({"truncation.kind": "bootstrap_add"}, 6.0 + 0.9 * 3.0),
        ({"truncation.kind": "none", "advantages.gamma": 1.0, "advantages.lam": 0.5}, 6.0),
        ({"truncation.kind": "none", "kl.kind": "in_loss", "kl.estimator": "k3"}, 6.0),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else None,
)
def test_advantages_and_returns_equal_a_slow_loop(changes: dict[str, Any], unfinished: float) -> None:
    """The finished response scores 2, the rule decides the other's score; KL may be in the reward."""
    settings = {
        "advantages.gamma": 0.9,
        "advantages.lam": 0.8,
        "kl_coef": 0.1,
        "whiten_advantages": False,
    } | changes
    rollout = replace(
        hand_made_rollout(),
        values=torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in VALUES]),
        last_values=torch.tensor([7.0, 3.0]),
    )
    ppo_batch, _ = trainer(**settings).estimator.estimate(rollout)
    costs = KL_COST if settings.get("kl.kind") != "in_loss" else [[0.0] * len(row) for row in KL_COST]
    for row, score in enumerate((2.0, unfinished)):
        rewards = [*costs[row][:-1], costs[row][-1] + score]
        expected = test_advantages.slow(
            rewards, VALUES[row], settings["advantages.gamma"], settings["advantages.lam"]
        )
        n = len(rewards)
        assert ppo_batch.advantages[row, :n].tolist() == pytest.approx(expected, abs=1e-5)
        returns = [a + v for a, v in zip(expected, VALUES[row], strict=True)]
        assert ppo_batch.returns[row, :n].tolist() == pytest.approx(returns, abs=1e-5)


# ------------------------------------------------------------------------------------ other losses

PerToken = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A loss per token of (R, V) log-probs, and (R,) new, old and reference log-probs of the tokens."""

OTHER_LOSSES: dict[str, tuple[dict[str, Any], PerToken]] = {
    "k2 in the loss": (
        {"kl.kind": "in_loss", "kl.estimator": "k2", "kl_coef": 0.3},
        lambda log_p, new, old, ref: 0.3 * 0.5 * (new - ref) ** 2,
    ),
    "k3 in the loss": (
        {"kl.kind": "in_loss", "kl.estimator": "k3", "kl_coef": 0.3},
        lambda log_p, new, old, ref: 0.3 * ((ref - new).exp() - 1 - (ref - new)),
    ),
    "the penalty": (
        {"kl_penalty": {"beta": 0.7, "target": 0.01}},
        lambda log_p, new, old, ref: 0.7 * ((new - old).exp() - 1 - (new - old)),
    ),
    "the entropy bonus": (
        {"entropy_coef": 0.2},
        lambda log_p, new, old, ref: 0.2 * (log_p.exp() * log_p).sum(-1),
    ),
}


@pytest.fixture(scope="module")
def ppo_batch() -> PPOBatch:
    """A batch of a policy that is neither the one in training nor the reference."""
    one = trainer(reference_seed=7)
    batch = without_gains(sampled_batch(one))
    old = torch.where(batch.rollout.mask, batch.rollout.logprobs - 0.3, 0)
    return replace(batch, rollout=replace(batch.rollout, logprobs=old))


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_the_gradient_of_each_other_loss_is_that_of_its_formula(name: str, ppo_batch: PPOBatch) -> None:
    """Advantages are zero and the critic is right; the learning rate is too small to change weights."""
    changes, formula = OTHER_LOSSES[name]
    policy, rollout, losses = small.causal(), ppo_batch.rollout, []
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        logits = policy(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
        log_p = (logits / 0.8).log_softmax(-1)
        new = log_p[range(n), response]
        losses.append(formula(log_p, new, rollout.logprobs[row, :n], rollout.ref_logprobs[row, :n]))
    torch.cat(losses).mean().backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    one = trainer(num_mini_batches=1, num_ppo_epochs=2, learning_rate=1e-12, **changes)
    weighted = replace(ppo_batch, kl_coef=changes.get("kl_coef", 0.05))
    norm = one.optimiser.optimise(weighted)["train/grad_norm"]
    assert norm == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-3)


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 2.0), (1e3, 0.5)])
def test_beta_follows_the_kl_of_the_penalty(target: float, factor: float, ppo_batch: PPOBatch) -> None:
    one = trainer(kl_penalty={"beta": 1.0, "target": target})
    assert [one.optimiser.optimise(ppo_batch)["policy/penalty_beta"] for _ in range(3)] == [
        1,
        factor,
        factor**2,
    ]


# ---------------------------------------------------------------------------------------- optimiser


@pytest.mark.parametrize(
    ("schedule", "warmup", "shares"),
    [
        ("constant", 0.0, [1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0.5, [0.5, 1, 1, 0.5]),
    ],
)
def test_every_update_has_the_learning_rate_of_the_schedule(
    schedule: str, warmup: float, shares: list[float]
) -> None:
    one = trainer(
        schedule=schedule, warmup_fraction=warmup, learning_rate=1e-3, advantages__critic__learning_rate=3e-3,
        total_episodes=64, response_length=2, **ONE_STEP,
    )  # fmt: skip
    for metrics, share in zip(one.updates(), shares, strict=True):
        assert metrics["lr"] == pytest.approx(1e-3 * share)
        rates = {group["lr"] for group in one.optimiser.optimizer.param_groups}
        assert sorted(rates) == pytest.approx([1e-3 * share, 3e-3 * share]), "policy's and critic's"


def test_adams_moments_decay_by_its_betas(ppo_batch: PPOBatch) -> None:
    """After one step its moments are (1 − β₁) g and (1 − β₂) g²."""
    one = trainer(adam_betas=[0.6, 0.9], **ONE_STEP)
    one.optimiser.optimise(
        replace(ppo_batch, advantages=torch.ones_like(ppo_batch.advantages), returns=ppo_batch.returns + 1)
    )
    moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in one.optimiser.optimizer.state.values()]
    assert len(moments) == len(list(one.actor_critic.parameters()))
    for first, second in moments:
        torch.testing.assert_close(second, 0.1 * (first / 0.4) ** 2)


def test_gradients_are_scaled_down_to_max_grad_norm(ppo_batch: PPOBatch) -> None:
    """Adam's first step is lr · g / (|g| + 1e-5): a gradient of norm 1e-6 gives none above lr / 10."""

    def largest_change(max_grad_norm: float | None) -> float:
        one = trainer(max_grad_norm=max_grad_norm, learning_rate=1e-3, **ONE_STEP)
        before = parameters(one)
        one.optimiser.optimise(
            from_older_policy(replace(ppo_batch, advantages=torch.ones_like(ppo_batch.advantages)))
        )
        return float((parameters(one) - before).abs().max())

    assert largest_change(None) == pytest.approx(1e-3, rel=0.05)
    assert 1e-6 < largest_change(1e-6) < 1e-4

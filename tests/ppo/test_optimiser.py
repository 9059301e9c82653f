"""The epochs on one PPO batch: losses, gradients and token means against slow loops over single rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.optimiser import Queue
from rlhf_tasks.ppo.rollout import logprobs_of
from tests import small
from tests.ppo.toy import (
    ONE_STEP,
    QUERIES,
    from_older_policy,
    parameters,
    sampled_batch,
    sampled_rollout,
    trainer,
)
from tests.small import PAD

TOKEN_MEANS = (
    "loss/policy_avg", "loss/value_avg", "policy/clipfrac_avg", "val/clipfrac_avg", "policy/approxkl_avg",
    "policy/entropy_avg", "val/ratio", "val/ratio_var",
)  # fmt: skip


@pytest.fixture(scope="module")
def ppo_batch() -> PPOBatch:
    return sampled_batch(trainer(reference_seed=7))


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    queue = Queue(20, torch.Generator().manual_seed(1))
    seen = [row for _ in range(5) for row in queue.take(8)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_ratio_is_1_before_the_first_step() -> None:
    one = trainer(num_mini_batches=1, num_ppo_epochs=1)
    rollout = sampled_rollout(one)
    with torch.no_grad():
        batch = collate(QUERIES, rollout.responses, PAD)
        again = logprobs_of(one.actor_critic.policy, batch, 0.8)
    ratio = (again[batch.response_mask] - rollout.logprobs[rollout.mask]).exp()
    assert (ratio - 1).abs().max() <= 1e-5
    ppo_batch, objective = one.estimator.estimate(rollout)
    assert objective["objective/kl"] == pytest.approx(0, abs=1e-4)  # the reference equals the policy
    metrics = one.optimiser.optimise(ppo_batch)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == metrics["val/clipfrac_avg"] == 0
    assert metrics["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
    assert metrics["loss/policy_avg"] == pytest.approx(0, abs=1e-5)  # −mean of white advantages


@dataclass(frozen=True)
class Token:
    """The old and new numbers of one response token, by the models on single rows."""

    new_logprob: float
    logprob: float
    advantage: float
    entropy: float
    new_value: float
    value: float
    expected_return: float


@pytest.fixture(scope="module")
def tokens(ppo_batch: PPOBatch) -> list[Token]:
    """The tokens of `from_older_policy(ppo_batch)`, each row passed through the models alone."""
    policy, value, old, result = (
        small.causal(),
        small.scores(seed=3),
        from_older_policy(ppo_batch),
        list[Token](),
    )
    for row, (query, response) in enumerate(zip(QUERIES, old.rollout.responses, strict=True)):
        logits = small.logits_alone(policy, query, response) / 0.8
        with torch.no_grad():
            values = value(collate([query], [response], PAD))[0, :-1].tolist()
        for t, token in enumerate(response):
            log_p = logits[t].log_softmax(-1)
            result.append(Token(
                log_p[token].item(), old.rollout.logprobs[row, t].item(), old.advantages[row, t].item(),
                -(log_p.exp() * log_p).sum().item(), values[t], old.rollout.values[row, t].item(),
                old.returns[row, t].item(),
            ))  # fmt: skip
    return result


def token_means_by_loop(
    tokens: Sequence[Token],
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    cliprange_value: float | None = 0.2,
) -> dict[str, float]:
    """TOKEN_MEANS of one step on `tokens`."""
    values: dict[str, list[float]] = {key: [] for key in TOKEN_MEANS}
    high = 1 + (cliprange if cliprange_high is None else cliprange_high)
    for token in tokens:
        change = token.new_logprob - token.logprob
        ratio, gain = math.exp(change), token.advantage
        unclipped, bounded = -gain * ratio, -gain * min(max(ratio, 1 - cliprange), high)
        loss, clipped = max(unclipped, bounded), bounded > unclipped
        if dual_clip is not None and gain < 0 and loss > -gain * dual_clip:
            loss, clipped = -gain * dual_clip, True
        near = token.new_value
        if cliprange_value is not None:
            near = token.value + min(max(near - token.value, -cliprange_value), cliprange_value)
        off, near_off = (token.new_value - token.expected_return) ** 2, (near - token.expected_return) ** 2
        values["loss/policy_avg"].append(loss)
        values["loss/value_avg"].append(0.5 * max(off, near_off))
        values["val/clipfrac_avg"].append(float(near_off > off))
        values["policy/clipfrac_avg"].append(float(clipped))
        values["policy/approxkl_avg"].append(0.5 * change**2)
        values["policy/entropy_avg"].append(token.entropy)
        values["val/ratio"].append(ratio)
    means = {key: sum(x) / len(tokens) for key, x in values.items() if x}
    off_mean = [(ratio - means["val/ratio"]) ** 2 for ratio in values["val/ratio"]]
    return means | {"val/ratio_var": sum(off_mean) / len(tokens)}


@pytest.mark.parametrize(
    "clips",
    [
        {}, {"cliprange": 0.1}, {"cliprange_high": 0.5}, {"dual_clip": 1.1},
        {"cliprange_value": 0.05}, {"cliprange_value": None},
    ],
)  # fmt: skip
def test_losses_and_token_means_equal_a_slow_loop_over_tokens(
    clips: dict[str, Any], ppo_batch: PPOBatch, tokens: list[Token]
) -> None:
    """One step on the rollout of an older policy and critic; the loop reads single rows."""
    expected, shipped = token_means_by_loop(tokens, **clips), token_means_by_loop(tokens)
    own = {key.replace("cliprange_value", "advantages.critic.cliprange_value"): v for key, v in clips.items()}
    metrics = trainer(num_mini_batches=1, num_ppo_epochs=1, **own).optimiser.optimise(
        from_older_policy(ppo_batch)
    )
    for key in TOKEN_MEANS:
        tolerance = 1e-3 if key == "val/ratio_var" else 1e-4
        assert metrics[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance / 100), key
    if clips:
        loss = "loss/value_avg" if "cliprange_value" in clips else "loss/policy_avg"
        assert abs(expected[loss] - shipped[loss]) > 0.001 * abs(shipped[loss]), (
            "the clip applies to some tokens"
        )
    else:
        assert 0 < metrics["policy/clipfrac_avg"] < 1, "a policy this far away must clip some tokens"
        assert 0 < metrics["val/clipfrac_avg"] < 1


def test_the_gradient_is_that_of_the_mean_token_loss(ppo_batch: PPOBatch) -> None:
    """Adam hides the scale of the loss, the norm of the gradient does not. Computed from single rows."""
    policy, value = small.causal(), small.scores(seed=3)
    losses = []
    for row, (query, response) in enumerate(zip(QUERIES, ppo_batch.rollout.responses, strict=True)):
        n, start = len(response), len(query) - 1
        logits = policy(torch.tensor([query + response])).logits[0, start:-1] / 0.8
        change = logits.log_softmax(-1)[range(n), response] - ppo_batch.rollout.logprobs[row, :n]
        values = value(collate([query], [response], PAD))[0, :-1]
        error = (values - ppo_batch.returns[row, :n]) ** 2
        losses.append(-ppo_batch.advantages[row, :n] * change.exp() + 0.1 * 0.5 * error)
    torch.cat(losses).mean().backward()
    gradients = [p.grad for model in (policy, value) for p in model.parameters() if p.grad is not None]
    expected = torch.cat([g.flatten() for g in gradients]).norm().item()
    for max_tokens in (16384, 25):
        one = trainer(num_mini_batches=1, num_ppo_epochs=1, micro_batch_tokens=max_tokens)
        assert one.optimiser.optimise(ppo_batch)["train/grad_norm"] == pytest.approx(expected, rel=1e-3)


def test_micro_batches_change_neither_weights_nor_token_means(ppo_batch: PPOBatch) -> None:
    large, many = trainer(micro_batch_tokens=16384), trainer(micro_batch_tokens=25)
    start = parameters(large)
    first, second = large.optimiser.optimise(ppo_batch), many.optimiser.optimise(ppo_batch)
    assert (parameters(large) - start).abs().max() > 1e-3
    torch.testing.assert_close(parameters(large), parameters(many), atol=2e-5, rtol=0)
    for key in TOKEN_MEANS:
        assert first[key] == pytest.approx(second[key], rel=1e-3, abs=1e-5), key


def test_pad_may_equal_eos(ppo_batch: PPOBatch) -> None:
    pad_is_eos = copy.deepcopy(small.tokenizer())
    pad_is_eos.pad_token = pad_is_eos.eos_token
    usual, same = trainer(), trainer(tokenizer=pad_is_eos)
    assert usual.optimiser.optimise(ppo_batch) == same.optimiser.optimise(ppo_batch)
    assert torch.equal(parameters(usual), parameters(same))


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 4), (3, 2)])
def test_each_minibatch_is_one_optimiser_step(epochs: int, minibatches: int, ppo_batch: PPOBatch) -> None:
    one = trainer(num_ppo_epochs=epochs, num_mini_batches=minibatches, micro_batch_tokens=25)
    one.optimiser.optimise(ppo_batch)
    steps = {int(state["step"]) for state in one.optimiser.optimizer.state.values()}
    assert steps == {epochs * minibatches}


def test_the_content_of_padding_changes_no_weight(ppo_batch: PPOBatch) -> None:
    def dirty(x: Tensor) -> Tensor:
        return x.where(ppo_batch.rollout.mask, 123.0)

    rollout = ppo_batch.rollout
    padded = replace(
        rollout, logprobs=dirty(rollout.logprobs), values=dirty(rollout.values), scores=rollout.scores
    )
    clean, other = trainer(), trainer()
    clean.optimiser.optimise(ppo_batch)
    other.optimiser.optimise(
        PPOBatch(padded, dirty(ppo_batch.advantages), dirty(ppo_batch.returns), ppo_batch.kl_coef)
    )
    assert torch.equal(parameters(clean), parameters(other))


def test_without_advantages_only_the_critic_changes_and_only_with_vf_coef(ppo_batch: PPOBatch) -> None:
    def changed_parts(**changes: Any) -> tuple[bool, bool]:
        one = trainer(**changes)
        before = copy.deepcopy(one.actor_critic.state_dict())
        one.optimiser.optimise(replace(ppo_batch, advantages=torch.zeros_like(ppo_batch.advantages)))
        after = one.actor_critic.state_dict()
        changed = {key.split(".")[0] for key in after if not torch.equal(after[key], before[key])}
        return "policy" in changed, "value" in changed

    assert changed_parts(advantages__critic__vf_coef=0.1) == (False, True)
    assert changed_parts(advantages__critic__vf_coef=0.0) == (False, False)


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

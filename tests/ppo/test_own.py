"""Losses and estimators of one's own, and how the losses of tokens become one number."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import whole_response
from examples.cispo import cispo
from examples.estimator import batch_mean
from examples.gspo import gspo
from rlhf_tasks.config import Ppo
from rlhf_tasks.errors import UserError
from rlhf_tasks.ppo.advantages import call_user_estimator
from rlhf_tasks.ppo.losses import MicroBatch, call_user_loss, ppo_clip, token_weights
from rlhf_tasks.ppo.rollout import Rollout
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages.ppo import estimator_of, policy_loss_of
from tests import small
from tests.ppo.ranks import run_ranks
from tests.ppo.test_steps import norm_of
from tests.ppo.toy import ONE_STEP, QUERIES, Toy, given, hand_made_rollout, log_p_alone, toy, without_critic

WITHOUT_CRITIC = without_critic("examples.estimator:batch_mean", 1)

# ----------------------------------------------------------------------------------------- examples/gspo.py

S1, S2 = math.exp((0.2 - 0.1) / 2), math.exp(0.5)
"""The ratios of two responses, of two tokens and of one."""


@pytest.mark.parametrize(
    ("advantages", "losses", "clipped", "gradient"),
    [
        # d(½ L₁ + ½ L₂) / d log-prob, with L = −A·s and d s / d log-prob = s / length
        ([1.0, -2.0], [-S1, 2 * S2], [0, 0], [-S1 / 4, -S1 / 4, S2]),
        ([-1.0, 2.0], [S1, -2 * 1.2], [0, 1], [S1 / 4, S1 / 4, 0.0]),
    ],
)
def test_gspo_equals_numbers_worked_out_by_hand(
    advantages: list[float], losses: list[float], clipped: list[int], gradient: list[float]
) -> None:
    mask, zeros = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2)
    old = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    logprobs = torch.tensor([[-0.8, -2.1], [-2.5, 0.0]], requires_grad=True)
    given = torch.tensor(advantages)[:, None] * mask
    batch = MicroBatch(mask, old, zeros, zeros, given, zeros, torch.ones(2, 2))
    loss, metrics = gspo(logprobs, batch, small.ppo(cliprange=0.2))
    tokens = [losses[0], losses[0], losses[1]]
    assert loss[mask].tolist() == pytest.approx(tokens, rel=1e-5)
    assert metrics["policy/clipfrac_avg"][mask].tolist() == [clipped[0], clipped[0], clipped[1]]
    total = (token_weights(mask, "response_mean") * loss).sum()
    assert total.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[mask].tolist() == pytest.approx(gradient, rel=1e-5)
    assert logprobs.grad[1, 1] == 0, "padding"


def test_the_clip_of_whole_responses_equals_numbers_worked_out_by_hand() -> None:
    """Ratios e^(0.2 − 0.1) and e^0.5, the second cut to 1.2; mean of two responses of two tokens and one."""
    mask, zeros = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2)
    old = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    logprobs = torch.tensor([[-0.8, -2.1], [-2.5, 0.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, -1.0], [2.0, 0.0]])
    batch = MicroBatch(mask, old, zeros, zeros, advantages, zeros, torch.ones(2, 2))
    loss, metrics = whole_response.clip(logprobs, batch, small.ppo(cliprange=0.2))
    assert metrics["policy/clipfrac_avg"][mask].tolist() == [0, 0, 1]
    total = (token_weights(mask, "response_mean") * loss.where(mask, 0)).sum()
    assert total.item() == pytest.approx((math.exp(0.1) - 2 * 1.2) / 2, rel=1e-5)
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx(
        [math.exp(0.1) / 2, math.exp(0.1) / 2, 0, 0], rel=1e-5
    )


# ---------------------------------------------------------------------------------------- examples/cispo.py


def test_cispo_equals_numbers_worked_out_by_hand() -> None:
    """Ratios e^0.2 = 1.2214, e^−0.1 = 0.9048 and e^0.5 = 1.6487, of which the last is cut to 1.4.

    The loss of a token is −weight · A · log π, its gradient −weight · A, and a third of it in the mean over
    three tokens. The clip of PPO leaves the last token without a gradient.
    """
    mask, zeros = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2)
    old = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    given = torch.tensor([[1.0, -1.0], [2.0, 0.0]])
    batch = MicroBatch(mask, old, zeros, zeros, given, zeros, torch.ones(2, 2))
    config = small.ppo(cliprange=0.2, cliprange_high=0.4)
    gradients = []
    for loss_of in (cispo, ppo_clip):
        logprobs = torch.tensor([[-0.8, -2.1], [-2.5, 0.0]], requires_grad=True)
        loss, metrics = loss_of(logprobs, batch, config)
        (token_weights(mask, "token_mean") * loss).sum().backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad[mask].tolist())
        if loss_of is cispo:  # 1.2214 · 0.8, −0.9048 · 2.1 and 1.4 · 2 · 2.5
            assert loss[mask].tolist() == pytest.approx([0.97712, -1.90016, 7.0], rel=1e-4)
        assert metrics["policy/clipfrac_avg"][mask].tolist() == [False, False, True]
    first, second = -1.2214 / 3, 0.9048 / 3
    assert gradients[0] == pytest.approx([first, second, -1.4 * 2 / 3], rel=1e-4)
    assert gradients[1] == pytest.approx([first, second, 0.0], rel=1e-4)


# ------------------------------------------------------------- what settings make without a function


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("token_mean", [1 / 3, 1 / 3, 1 / 3]),  # DAPO: a third of each of the three tokens
        ("response_mean", [1 / 4, 1 / 4, 1 / 2]),  # GRPO: ½ · ½ of the first response's, ½ of the second's
        ({"constant": 10}, [1 / 20, 1 / 20, 1 / 20]),  # Dr. GRPO: ½ of a tenth of each
    ],
)
def test_a_reduction_gives_tokens_the_weights_of_its_paper(reduction: Any, weights: list[float]) -> None:
    mask = torch.tensor([[True, True], [True, False]])
    setting = small.ppo(loss_reduction=reduction).loss_reduction
    assert token_weights(mask, setting)[mask].tolist() == pytest.approx(weights)


def test_rloo_with_a_constant_is_dr_grpo_times_k_over_k_minus_1() -> None:
    """Returns 1, 0, 0 and 3 have the mean 1: Dr. GRPO's advantages are 0, −1, −1 and 2, without a deviation.

    RLOO's are 4/3 of them. At ratios of 1 the gradient of a token is −A / (4 responses · 10).
    """
    lengths, returns = torch.tensor([1, 3, 2, 2]), torch.tensor([1.0, 0.0, 0.0, 3.0])
    mask, zeros = torch.arange(3) < lengths[:, None], torch.zeros(4, 3)
    config = small.ppo(**without_critic("rloo"), loss_reduction={"constant": 10})
    rewards = torch.where(torch.arange(3) == lengths[:, None] - 1, returns[:, None], 0.0)
    rollout = replace(hand_made_rollout(), mask=mask)
    advantages, _ = estimator_of(config.advantages, Paths(small.ROOT).root)(rewards, rollout, config)
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    batch = MicroBatch(mask, logprobs.detach(), zeros, zeros, advantages, zeros, torch.ones(4, 3))
    loss, _ = ppo_clip(logprobs, batch, config)
    (token_weights(mask, config.loss_reduction) * loss).sum().backward()
    assert logprobs.grad is not None
    dr_grpo = torch.tensor([0.0, -1.0, -1.0, 2.0])[:, None] * mask / (4 * 10)
    torch.testing.assert_close(logprobs.grad, -4 / 3 * dr_grpo)


# --------------------------------------------------------------------------------- examples/estimator.py


def test_the_examples_estimator_equals_numbers_worked_out_by_hand() -> None:
    """Returns 3 and −1, whose mean is 1."""
    rewards = torch.tensor([[1.0, 2.0, 9.0, 9.0], [0.5, -2.0, 0.5, 9.0]])
    advantages, returns = batch_mean(rewards, hand_made_rollout(), small.ppo())
    assert returns.tolist() == [[3, 2, 0, 0], [-1, -1.5, 0.5, 0]]
    assert advantages.tolist() == [[2, 1, 0, 0], [-2, -2.5, -0.5, 0]]


# ---------------------------------------------------------------------------------------- import paths


def test_a_name_with_a_colon_is_a_function_of_ones_own() -> None:
    root = Paths(small.ROOT).root
    assert policy_loss_of("ppo_clip", root) is ppo_clip
    assert callable(policy_loss_of("examples.gspo:gspo", root))
    assert callable(estimator_of(small.ppo(**WITHOUT_CRITIC).advantages, root))
    with pytest.raises(UserError, match=r"^ppo\.loss: nowhere:f cannot be imported: ModuleNotFoundError"):
        policy_loss_of("nowhere:f", root)
    with pytest.raises(
        UserError, match=r"^ppo\.advantages\.function: examples\.gspo:no: .*gspo.py has no such function"
    ):
        estimator_of(small.ppo(**without_critic("examples.gspo:no")).advantages, root)


def fails(*args: Any) -> Any:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (fails, r"^own raised KeyError: 'boom' \(.*test_own\.py:\d+\)"),
        (lambda *_: sys.exit(0), r"^own raised SystemExit: 0"),
        (lambda logprobs, *_: logprobs, r"^own must return \(losses, metrics\)"),
        (lambda logprobs, *_: (logprobs.mean(), {}), r"the losses must be .* \[2, 3\], and not \[\]"),
        (lambda logprobs, *_: (logprobs.detach(), {}), r"do not depend on the log-probs"),
        (lambda logprobs, batch, _: (logprobs - batch.logprobs.sub_(1), {}), r"^own changes its arguments"),
        *(
            (lambda logprobs, *_, key=key: (logprobs, {key: logprobs}), rf"{key} is a metric of PPO's own")
            for key in ("objective/kl", "loss/policy_avg", "loss/value_avg", "loss/kl_avg", "val/ratio", "lr")
        ),
        *(
            (lambda logprobs, *_, key=key: (logprobs, {key: logprobs}), f"MLflow takes no metric {key!r}")
            for key in (1, "a//b", "", "a/../b", "a,b", "/a")
        ),
        (lambda logprobs, *_: (logprobs, {"x": 3}), r"metric 'x' must be .* \[2, 3\]: "),
        (lambda logprobs, *_: (logprobs, {"x": torch.ones(4)}), r"metric 'x' must be .* \[2, 3\]: "),
    ],
)
def test_what_a_loss_of_ones_own_does_wrong_is_named(loss: Any, message: str) -> None:
    logprobs = torch.zeros(2, 3, requires_grad=True)
    batch = MicroBatch(*[torch.ones(2, 3)] * 7)
    with pytest.raises(UserError, match=message):
        call_user_loss(loss, "own", logprobs, batch, small.ppo())


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (fails, r"^own raised KeyError"),
        (lambda rewards, *_: rewards, r"must return .* of \[2, 4\], but gave \[\[2, 4\]\]"),
        (lambda rewards, *_: (rewards, rewards.sum(1)), r"but gave \[\[2, 4\], \[2\]\]"),
        (lambda rewards, *_: (rewards.add_(1), rewards), r"^own changes its arguments, .* not x -= y"),
        (lambda rewards, *_: (rewards * math.nan, rewards), r"^own gave NaN or infinity"),
        (lambda rewards, *_: (rewards, None), r"but gave \[\[2, 4\], 'None'\]"),
    ],
)
def test_what_an_estimator_of_ones_own_does_wrong_is_named(estimator: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call_user_estimator(estimator, "own", torch.zeros(2, 4), hand_made_rollout(), small.ppo())


def test_an_estimator_may_count_and_use_weights_that_train() -> None:
    weight = torch.ones(1, requires_grad=True)
    found = call_user_estimator(
        lambda rewards, *_: (rewards > 0, rewards * weight),
        "own",
        torch.zeros(2, 4),
        hand_made_rollout(),
        small.ppo(),
    )
    assert [(one.dtype, one.requires_grad) for one in found] == [(torch.float32, False)] * 2


def test_a_metric_may_be_one_number_for_all_tokens() -> None:
    def own(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> Any:
        return [logprobs, {"mean": logprobs.mean(), "of_response": logprobs.mean(1, keepdim=True)}]

    batch = MicroBatch(*[torch.ones(2, 3)] * 7)
    losses, metrics = call_user_loss(own, "own", torch.zeros(2, 3, requires_grad=True), batch, small.ppo())
    assert list(losses.shape) == [2, 3]
    assert list(metrics) == ["mean", "of_response"]


def test_out_of_memory_in_a_loss_is_left_to_the_loop() -> None:
    def large(*args: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    with pytest.raises(torch.OutOfMemoryError):
        call_user_loss(large, "own", torch.zeros(2, 3), MicroBatch(*[torch.ones(2, 3)] * 7), small.ppo())


def test_a_loss_may_have_other_metrics_and_anything_on_padding() -> None:
    def unclipped(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logprobs - batch.logprobs).exp() / batch.mask
        return -batch.advantages * ratio, {"policy/own_avg": ratio.detach()}

    one = toy(loss=unclipped, learning_rate=1e-2)
    before, metrics = one.weights, next(one.updates)
    assert metrics["policy/own_avg"] == pytest.approx(metrics["val/ratio"], rel=1e-5)
    assert "policy/clipfrac_avg" not in metrics
    assert one.weights.isfinite().all()
    assert (one.weights - before).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [{}, WITHOUT_CRITIC], ids=["with a critic", "without"])
def test_an_estimator_sees_the_rollout_of_all_ranks(changes: dict[str, Any]) -> None:
    """So a mean over it is the same on one rank and on two, and so is the step."""
    settings = changes | {"whiten_advantages": False, "learning_rate": 1e-2}

    def update(dist: Any = None) -> Toy:
        return toy(dist=dist, estimator=batch_mean, loss=gspo, **settings)

    def run(one: Toy) -> tuple[Tensor, float]:
        norms = [metrics["train/grad_norm"] for metrics in one.updates]
        return one.weights, norms[0]

    before, alone = update().weights, update()
    _, norm = run(alone)
    for weights, own_norm in run_ranks(update, run):
        torch.testing.assert_close(weights, alone.weights, atol=1e-4, rtol=0)
        assert own_norm == pytest.approx(norm, rel=1e-4)
    assert (alone.weights - before).abs().max() > 1e-2


# ------------------------------------------------------------------------------------ ppo.loss_reduction


def negative(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token's −A · log-prob, whose gradient weights every token differently."""
    return -batch.advantages * logprobs, {}


def norm_by_rows(rollout: Rollout, reduction: str | int) -> float:
    """The norm of the reduced loss's gradient, each row in a pass of its own."""
    policy, sums = small.causal(), []
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        losses = -rollout.advantages[row, :n] * log_p_alone(policy, query, response)[range(n), response]
        sums.append(losses.sum() / (n if reduction == "response_mean" else 1))
    divisor = rollout.mask.sum() if reduction == "token_mean" else 16
    total = torch.stack(sums).sum() / divisor / (reduction if isinstance(reduction, int) else 1)
    total.backward()
    return norm_of(policy)


@pytest.mark.parametrize("max_tokens", [16384, 25])
@pytest.mark.parametrize("reduction", ["token_mean", "response_mean", 5])
def test_a_reduction_depends_on_neither_micro_batches_nor_ranks(
    reduction: str | int, max_tokens: int
) -> None:
    """The mean over all tokens of all ranks; over responses of their means; or each sum by a constant."""
    rollout, _ = toy(reference_seed=7).estimate()

    def make(dist: Any = None) -> Toy:
        return toy(
            dist=dist,
            loss=negative,
            estimator=lambda *_: (rollout.advantages, rollout.returns),
            whiten_advantages=False,
            loss_reduction={"constant": 5} if reduction == 5 else reduction,
            micro_batch_tokens=max_tokens,
            advantages__critic__vf_coef=0.0,
            **ONE_STEP,
        )

    def norm(one: Toy) -> float:
        return next(one.updates)["train/grad_norm"]

    with given(rollout):
        found = [norm(make()), *run_ranks(make, norm)]
    assert found == pytest.approx([norm_by_rows(rollout, reduction)] * 3, rel=1e-3)

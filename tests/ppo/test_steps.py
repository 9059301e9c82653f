"""The optimizer steps on one rollout: losses, gradients and means against slow loops over single rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.heads import ActorCritic, ValueHead
from rlhf_tasks.models.load import recompute_activations
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.ppo import train as loop
from rlhf_tasks.ppo.guards import BF16_RATIO_ERROR, GuardTripped
from rlhf_tasks.ppo.rollout import Reference, Rollout
from rlhf_tasks.ppo.train import accumulate_gradients
from tests import families, small
from tests.ppo.toy import (
    ONE_STEP,
    QUERIES,
    Toy,
    log_p_alone,
    shared,
    toy,
    with_lora,
    without_critic,
    without_gains,
)
from tests.small import EOS, PAD

TOKEN_MEANS = [f"loss/{name}_avg" for name in ("policy", "value")]
TOKEN_MEANS += [f"policy/{name}_avg" for name in ("clipfrac", "approxkl", "entropy")]
TOKEN_MEANS += ["val/clipfrac_avg", "val/ratio", "val/ratio_var"]


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return toy(reference_seed=7).estimate()[0]


# ------------------------------------------------------------------------------------- the first ratio


@pytest.mark.parametrize(
    "changes", [{}, without_critic("rloo"), without_critic("group")], ids=["gae", "rloo", "group"]
)
def test_the_ratio_is_1_before_the_first_step(changes: dict[str, Any]) -> None:
    one = toy(**changes | ONE_STEP)
    rollout, objective = one.estimate()
    with torch.no_grad():
        batch = collate(rollout.queries, rollout.responses, PAD)
        again = response_logprobs(one.actor_critic.policy, batch, 0.8)  # (B, R), R the longest of them
    ratio = (again - rollout.logprobs[:, : again.shape[1]])[batch.mask].exp()
    assert (ratio - 1).abs().max() <= 1e-5
    assert objective["objective/kl"] == pytest.approx(0, abs=1e-4), "the reference equals the policy"
    metrics = one.learn(rollout)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == metrics.get("val/clipfrac_avg", 0) == 0
    assert metrics["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
    mean = (rollout.advantages.sum() / rollout.mask.sum()).item()
    assert metrics["loss/policy_avg"] == pytest.approx(-mean, abs=1e-5), "−mean of A over tokens"


def test_the_error_of_the_first_ratio_is_that_of_the_first_minibatch_alone() -> None:
    """Later minibatches, whose ratios have moved, have no part in it."""
    metrics = next(toy(num_mini_batches=4, num_ppo_epochs=2, learning_rate=1e-2).updates)
    assert metrics["val/ratio_var"] > 1e-4
    assert metrics["val/first_ratio_error"] < 1e-5


def test_the_error_of_the_first_ratio_is_the_root_of_the_mean_square() -> None:
    """Old log-probs are moved by +δ and −2δ: every ratio is exp(−δ) or exp(2δ)."""
    one, delta = toy(**ONE_STEP), 0.1
    rollout, _ = one.estimate()
    moved = torch.where(torch.arange(8) % 2 == 0, delta, -2 * delta) * rollout.mask
    expected = ((-moved[rollout.mask].double()).exp() - 1).square().mean().sqrt()
    error = one.learn(replace(rollout, logprobs=rollout.logprobs + moved))["val/first_ratio_error"]
    assert error == pytest.approx(float(expected), rel=1e-4)


RANDOM_PARTS: dict[str, dict[str, Any]] = {
    "seed_oss": {},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"layerdrop": 0.5, "dropout": 0.1},
    "biogpt": {"activation_dropout": 0.1, "layerdrop": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "hidden_dropout": 0.1},
}


def first_update(policy: Any, critic: Any = None, **changes: Any) -> dict[str, float]:
    """The metrics of one update of one optimizer step, the first."""
    actor_critic = ActorCritic(policy, critic or small.scores(seed=3))
    return next(toy(actor_critic=actor_critic, **ONE_STEP, **changes).updates)


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


def test_neither_a_shared_trunk_nor_gradient_checkpointing_turns_dropout_on() -> None:
    """transformers itself computes layers again in training mode only, where their dropout is on."""
    policy = families.causal("bloom", vocab_size=small.VOCAB, hidden_dropout=0.1).train()
    shared = {"advantages__critic__kind": "shared"}
    assert first_update(policy, ValueHead(32), **shared)["val/first_ratio_error"] < 1e-5
    recompute_activations(policy)
    assert first_update(policy)["val/first_ratio_error"] < 1e-5


def test_a_family_that_cannot_compute_its_layers_again_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"ppo\.gradient_checkpointing: CTRLLMHeadModel does not support it"):
        recompute_activations(families.causal("ctrl"))


ONE_BIT = 0.01
"""Nats: on a CPU a tensor's place in memory changes the last bit of some sums, which bf16 enlarges."""


@pytest.mark.parametrize("family", small.FAMILIES)
def test_in_bf16_the_same_micro_batches_give_ratios_of_1_and_a_kl_of_0(family: small.Family) -> None:
    dist, policy, frozen = small.distributed("bf16"), small.causal(family), small.causal(family)
    dist.freeze(frozen)
    actor_critic, reference = ActorCritic(policy, small.scores(seed=3)), Reference(frozen)
    one = toy(dist=dist, actor_critic=actor_critic, reference=reference, **ONE_STEP)
    rollout, _ = one.estimate()
    kl = rollout.logprobs - rollout.ref_logprobs
    assert kl.abs().max() < ONE_BIT
    assert (kl == 0).float().mean() > 0.7, "one row at most has another last bit"
    assert one.learn(rollout)["val/first_ratio_error"] < ONE_BIT / 2


@pytest.mark.parametrize(
    ("most", "changes"),
    [(12, ONE_STEP), (16384, {**without_critic("rloo"), "num_mini_batches": 8, "num_ppo_epochs": 1})],
    ids=["many micro-batches", "a prompt of four samples, trained on with two of them"],
)
def test_in_bf16_another_cut_than_that_of_scoring_stays_within_the_guards_bound(
    most: int, changes: dict[str, Any]
) -> None:
    one = toy(dist=small.distributed("bf16"), learning_rate=1e-12, **changes)
    rollout, _ = one.estimate()
    assert rollout.shares_queries
    one.state.budget.max_tokens = most
    assert one.learn(rollout)["val/first_ratio_error"] < BF16_RATIO_ERROR / 4


# ------------------------------------------------------------------------------- losses and token means


def token_means_alone(
    rollout: Rollout,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    cliprange_value: float | None = 0.2,
) -> dict[str, float]:
    """TOKEN_MEANS of one step, by a loop over the tokens of each row alone."""
    policy, critic, tokens = small.causal(), small.scores(seed=3), list[dict[str, float]]()
    high = 1 + (cliprange if cliprange_high is None else cliprange_high)
    for row, (query, response) in enumerate(zip(rollout.queries, rollout.responses, strict=True)):
        log_p = log_p_alone(policy, query, response).detach()
        for t, new_value in enumerate(critic(collate([query], [response], PAD))[0, :-1].tolist()):
            change = float(log_p[t, response[t]] - rollout.logprobs[row, t])
            ratio, gain = math.exp(change), float(rollout.advantages[row, t])
            unclipped, bounded = -gain * ratio, -gain * min(max(ratio, 1 - cliprange), high)
            loss, clipped = max(unclipped, bounded), bounded > unclipped
            if dual_clip is not None and gain < 0 and loss > -gain * dual_clip:
                loss, clipped = -gain * dual_clip, True
            value, target, near = float(rollout.values[row, t]), float(rollout.returns[row, t]), new_value
            if cliprange_value is not None:
                near = value + min(max(new_value - value, -cliprange_value), cliprange_value)
            off, near_off = (new_value - target) ** 2, (near - target) ** 2
            tokens.append(
                {
                    "loss/policy_avg": loss,
                    "loss/value_avg": 0.5 * max(off, near_off),
                    "policy/clipfrac_avg": float(clipped),
                    "val/clipfrac_avg": float(near_off > off),
                    "policy/approxkl_avg": 0.5 * change**2,
                    "policy/entropy_avg": -float((log_p[t].exp() * log_p[t]).sum()),
                    "val/ratio": ratio,
                }
            )
    means = {name: sum(token[name] for token in tokens) / len(tokens) for name in tokens[0]}
    squares = [(token["val/ratio"] - means["val/ratio"]) ** 2 for token in tokens]
    return means | {"val/ratio_var": sum(squares) / len(tokens)}


@pytest.mark.parametrize(
    "clips",
    [
        {},
        {"cliprange": 0.1},
        {"cliprange_high": 0.5},
        {"dual_clip": 1.1},
        {"advantages__critic__cliprange_value": 0.05},
        {"advantages__critic__cliprange_value": None},
    ],
)
def test_losses_and_token_means_equal_a_slow_loop_over_tokens(
    clips: dict[str, Any], rollout: Rollout
) -> None:
    """One step on the same rollout as if an older policy and critic, farther away, had made it."""
    old = replace(rollout, logprobs=rollout.ref_logprobs, values=rollout.values / 2)
    own = {key.removeprefix("advantages__critic__"): value for key, value in clips.items()}
    expected, shipped = token_means_alone(old, **own), token_means_alone(old)
    metrics = toy(**ONE_STEP, **clips).learn(old)
    for key in TOKEN_MEANS:
        tolerance = 1e-3 if key == "val/ratio_var" else 1e-4
        assert metrics[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance / 100), key
    if clips:
        is_of_value = "advantages__critic__cliprange_value" in clips
        loss = "loss/value_avg" if is_of_value else "loss/policy_avg"
        assert abs(expected[loss] - shipped[loss]) > 0.001 * abs(shipped[loss]), "it applies to some tokens"
    else:
        assert 0 < metrics["policy/clipfrac_avg"] < 1, "a policy this far away must clip some tokens"
        assert 0 < metrics["val/clipfrac_avg"] < 1


# -------------------------------------------------------------------------------------------- gradients


def test_the_gradient_is_that_of_the_mean_token_loss(rollout: Rollout) -> None:
    """Adam hides the scale of the loss, the norm of the gradient does not. Computed from single rows."""
    policy, value, losses = small.causal(), small.scores(seed=3), []
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        change = log_p_alone(policy, query, response)[range(n), response] - rollout.logprobs[row, :n]
        error = (value(collate([query], [response], PAD))[0, :-1] - rollout.returns[row, :n]) ** 2
        losses.append(-rollout.advantages[row, :n] * change.exp() + 0.1 * 0.5 * error)
    torch.cat(losses).mean().backward()
    expected = norm_of(policy, value)
    for max_tokens in (16384, 25):
        one = toy(**ONE_STEP, micro_batch_tokens=max_tokens)
        assert one.learn(rollout)["train/grad_norm"] == pytest.approx(expected, rel=1e-3)


def norm_of(*models: nn.Module) -> float:
    gradients = [p.grad.flatten() for model in models for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm())


PerToken = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A loss per token of (R, V) log-probs, and (R,) new, old and reference log-probs of the tokens."""

OTHER_LOSSES: dict[str, tuple[dict[str, Any], PerToken]] = {
    "k2 in the loss": (
        {"kl__kind": "in_loss", "kl__estimator": "k2", "kl_coef": 0.3},
        lambda log_p, new, old, ref: 0.3 * 0.5 * (new - ref) ** 2,
    ),
    "k3 in the loss": (
        {"kl__kind": "in_loss", "kl__estimator": "k3", "kl_coef": 0.3},
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


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_the_gradient_of_each_other_loss_is_that_of_its_formula(name: str, rollout: Rollout) -> None:
    """Advantages are zero and the critic is right; the learning rate is too small to change weights."""
    changes, formula = OTHER_LOSSES[name]
    rollout = without_gains(rollout)
    rollout = replace(rollout, logprobs=torch.where(rollout.mask, rollout.logprobs - 0.3, 0))
    policy, losses = small.causal(), []
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n, log_p = len(response), log_p_alone(policy, query, response)
        new = log_p[range(n), response]
        losses.append(formula(log_p, new, rollout.logprobs[row, :n], rollout.ref_logprobs[row, :n]))
    torch.cat(losses).mean().backward()
    one = toy(num_mini_batches=1, num_ppo_epochs=2, learning_rate=1e-12, **changes)
    assert one.learn(rollout)["train/grad_norm"] == pytest.approx(norm_of(policy), rel=1e-3)


@pytest.mark.parametrize("most", [16384, 40])
@pytest.mark.parametrize("model", [None, shared, with_lora], ids=["two models", "value head", "adapters"])
def test_a_prompt_that_is_read_once_for_its_samples_gives_the_same_step(model: Any, most: int) -> None:
    """The rollout's numbers too. Micro-batches of 40 tokens hold one prompt each."""
    changes: dict[str, Any] = {"advantages__samples_per_prompt": 4, "micro_batch_tokens": most}
    found, sizes = [], list[int]()
    for shares in (True, False):
        own = dict(changes)
        if model is shared:
            own |= {"actor_critic": shared(), "advantages__critic__kind": "shared"}
        elif model is with_lora:
            own |= dict(zip(("actor_critic", "reference"), with_lora(), strict=True))
        with mock.patch.object(ActorCritic, "shares_queries", shares):
            one = toy(reference_seed=7, **own)
            rollout, _ = one.estimate()
        planned = rollout.split(one.dist, range(len(rollout.queries)), one.state.budget)
        for part in planned:
            tokens = rollout.batch(part.groups).query_response.numel()
            assert len(part.groups) == 1 or tokens <= most
        sizes.append(
            sum(rollout.batch([group]).query_response.numel() for p in planned for group in p.groups)
        )
        metrics = one.learn(rollout)
        numbers = (rollout.logprobs, rollout.ref_logprobs, rollout.values, one.weights)
        found.append((*numbers, {key: metrics[key] for key in TOKEN_MEANS}))
    assert sizes[0] < sizes[1], "tokens"
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-5)


def test_a_minibatch_has_all_samples_of_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[int]]()

    def accumulate(*args: Any) -> Any:
        seen.append(args[3])
        return accumulate_gradients(*args)

    monkeypatch.setattr(loop, "accumulate_gradients", accumulate)
    one = toy(**without_critic("rloo"), num_mini_batches=2, num_ppo_epochs=2)  # 4 prompts with 4 samples each
    next(one.updates)
    prompts = [sorted(row % 4 for row in rows) for rows in seen]
    assert all(mini == [mini[0]] * 4 + [mini[4]] * 4 for mini in prompts)
    assert [sorted(seen[i] + seen[i + 1]) for i in (0, 2)] == [list(range(16))] * 2
    assert seen[:2] != seen[2:], "each epoch has an order of its own"


def test_smaller_micro_batches_change_neither_weights_nor_token_means(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those after out-of-memory: what a failed attempt has added up counts nowhere. The size is kept."""
    plain, many, short = (toy(micro_batch_tokens=most) for most in (16384, 25, 400))
    start = plain.weights
    expected, of_many = plain.learn(rollout), many.learn(rollout)
    assert (plain.weights - start).abs().max() > 1e-3
    forward, passes = ActorCritic.forward, list[int]()

    def limited(self: ActorCritic, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        passes.append(batch.query_response.numel())
        if passes[-1] > 60:
            raise torch.OutOfMemoryError
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(ActorCritic, "forward", limited)
    of_short = short.learn(rollout)
    assert short.state.budget.max_tokens < 60 < max(passes)
    for one, metrics in ((many, of_many), (short, of_short)):
        torch.testing.assert_close(one.weights, plain.weights, atol=2e-5, rtol=0)
        for key in TOKEN_MEANS:
            assert metrics[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    passes.clear()
    short.learn(rollout)
    assert max(passes) <= 60


def test_a_row_that_does_not_fit_alone_is_an_error(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ActorCritic, "forward", full)
    with pytest.raises(UserError, match="memory"):
        toy(**ONE_STEP).learn(rollout)


@pytest.mark.parametrize("pad", [EOS, 7])
def test_the_content_of_padding_changes_no_weight(pad: int, rollout: Rollout) -> None:
    """Neither which token it is, EOS included, nor what the rollout holds there."""

    def dirty(x: Tensor) -> Tensor:
        return x.where(rollout.mask, 123.0)

    names = ("logprobs", "ref_logprobs", "values", "advantages", "returns", "importance")
    junk: dict[str, Any] = {name: dirty(getattr(rollout, name)) for name in names}
    padded = replace(rollout, pad=pad, **junk)
    clean, other = toy(), toy(pad=pad)
    first, second = clean.learn(rollout), other.learn(padded)
    assert torch.equal(clean.weights, other.weights)
    assert {key: first[key] for key in TOKEN_MEANS} == {key: second[key] for key in TOKEN_MEANS}


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 4), (3, 2)])
def test_each_minibatch_is_one_optimizer_step(epochs: int, minibatches: int, rollout: Rollout) -> None:
    one = toy(num_ppo_epochs=epochs, num_mini_batches=minibatches, micro_batch_tokens=25)
    one.learn(rollout)
    steps = {int(state["step"]) for state in one.state.optimizer.state.values()}
    assert steps == {epochs * minibatches}


def test_without_advantages_only_the_critic_changes_and_only_with_vf_coef(rollout: Rollout) -> None:
    def changed_parts(**changes: Any) -> set[str]:
        one = toy(**changes)
        before = copy.deepcopy(one.actor_critic.state_dict())
        one.learn(replace(rollout, advantages=torch.zeros_like(rollout.advantages)))
        after = one.actor_critic.state_dict()
        return {key.split(".")[0] for key in after if not torch.equal(after[key], before[key])}

    assert changed_parts(advantages__critic__vf_coef=0.1) == {"critic"}
    assert changed_parts(advantages__critic__vf_coef=0.0) == set()


def test_without_a_critic_the_step_is_that_of_the_policy_loss_alone() -> None:
    """A critic whose loss has no weight leaves the same policy, given the same advantages."""
    with_critic = toy(**ONE_STEP, advantages__critic__vf_coef=0.0, max_grad_norm=None)
    alone = toy(**without_critic("rloo") | ONE_STEP, max_grad_norm=None)
    rollout, _ = alone.estimate()
    for one in (with_critic, alone):
        one.learn(rollout)
    policies = [list(one.actor_critic.policy.parameters()) for one in (with_critic, alone)]
    for a, b in zip(*policies, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------- optimizer


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
    rates: dict[str, Any] = {"learning_rate": 1e-3, "advantages__critic__learning_rate": 3e-3}
    one = toy(schedule=schedule, warmup_fraction=warmup, response_length=2, **rates, **ONE_STEP)
    for metrics, share in zip(one.updates, shares, strict=True):
        assert metrics["lr"] == pytest.approx(1e-3 * share)
        of_critic = {id(p) for p in one.actor_critic.critic.parameters()}
        rates_of = {
            id(group["params"][0]) in of_critic: group["lr"] for group in one.state.optimizer.param_groups
        }
        assert rates_of == pytest.approx({False: 1e-3 * share, True: 3e-3 * share})


def largest_changes(one: Toy, rollout: Rollout) -> list[float]:
    """Of the weights of policy and critic, in one update."""
    parts = [one.actor_critic.policy, one.actor_critic.critic]
    before = copy.deepcopy(parts)
    one.learn(rollout)
    pairs = [zip(p.parameters(), q.parameters(), strict=True) for p, q in zip(parts, before, strict=True)]
    return [max(float((p - q).detach().abs().max()) for p, q in pair) for pair in pairs]


def test_gradients_are_scaled_down_to_max_grad_norm(rollout: Rollout) -> None:
    """Adam's first step is lr · g / (|g| + 1e-5): a gradient of norm 1e-6 gives none above lr / 10."""
    free = largest_changes(toy(max_grad_norm=None, learning_rate=1e-3, **ONE_STEP), rollout)
    clipped = largest_changes(toy(max_grad_norm=1e-6, learning_rate=1e-3, **ONE_STEP), rollout)
    assert max(free) == pytest.approx(1e-3, rel=0.05)
    assert 1e-6 < max(clipped) < 1e-4


def test_adams_moments_decay_by_its_betas(rollout: Rollout) -> None:
    """After one step its moments are (1 − β₁) g and (1 − β₂) g²."""
    one = toy(adam_betas=[0.6, 0.9], **ONE_STEP)
    one.learn(rollout)
    moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in one.state.optimizer.state.values()]
    assert len(moments) == len(list(one.actor_critic.parameters()))
    for first, second in moments:
        torch.testing.assert_close(second, 0.1 * (first / 0.4) ** 2)


# ------------------------------------------------------------------------------------------------- NaN


def test_no_step_is_taken_on_a_loss_that_is_nan(tmp_path: Path) -> None:
    one = toy(**ONE_STEP, faults=tmp_path)
    rollout, _ = one.estimate()
    rollout.importance[0, 0] = math.nan  # which enters the loss alone
    before = one.weights
    with pytest.raises(GuardTripped, match="non_finite: the gradient is NaN or infinite"):
        one.learn(rollout)
    assert torch.equal(one.weights, before)
    (file,) = tmp_path.iterdir()
    written = torch.load(file, weights_only=False)
    assert len(written["responses"]) == 16
    assert written["importance"].isnan().sum() == 1
    assert torch.equal(written["returns"], rollout.returns)
    assert sorted(written["rows"]) == list(range(16))


def critic_of(one: Toy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in one.actor_critic.critic.parameters()])


def policy_of(one: Toy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in one.actor_critic.policy.parameters()])


def learnt(rollout: Rollout, **critic: Any) -> Toy:
    one = toy(advantages={"kind": "gae", "critic": {"kind": "separate", "init": "sft", **critic}}, **ONE_STEP)
    one.learn(rollout)
    return one


def test_further_steps_of_the_critic_leave_the_policy_alone(rollout: Rollout) -> None:
    once, thrice = learnt(rollout), learnt(rollout, steps=3)
    assert torch.equal(policy_of(once), policy_of(thrice))
    state, other = (one.state.optimizer.state for one in (once, thrice))
    steps = [float(x["step"]) for x in state.values()], [float(x["step"]) for x in other.values()]
    assert set(steps[0]) == {1.0}
    assert set(steps[1]) == {1.0, 3.0}
    assert not torch.equal(critic_of(once), critic_of(thrice))


def test_the_critic_has_a_norm_a_rate_and_an_eps_of_its_own(rollout: Rollout) -> None:
    """With a norm of its own a large value loss no longer shortens the policy's step."""
    small_loss, large_loss = (
        policy_of(learnt(rollout, max_grad_norm=1.0, vf_coef=coef)) for coef in (0.1, 1000.0)
    )
    assert torch.equal(small_loss, large_loss)
    one = learnt(rollout, learning_rate=0.5, schedule="constant", adam_eps=1e-3)
    groups = one.state.optimizer.param_groups
    of_critic = groups[one.state.num_policy_groups :]
    assert {(group["lr"], group["eps"]) for group in of_critic} == {(0.5, 1e-3)}
    assert {(group["lr"], group["eps"]) for group in groups[: one.state.num_policy_groups]} == {(1e-3, 1e-5)}

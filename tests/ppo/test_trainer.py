"""The steps of one PPO update, on models of a few thousand weights."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_tasks.data.batches import Ids, collate
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.optimiser import Queue
from rlhf_tasks.ppo.reference import OwnModel, Reference
from rlhf_tasks.ppo.rollout import ActorCritic, Rollout, lengths_mask, logprobs_of, pad_rows
from rlhf_tasks.ppo.rollout_metrics import standard_error
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling
from tests import small
from tests.small import EOS, PAD

QUERIES, _ = small.rows(16, longest=6)
TOKEN_MEANS = (
    "loss/policy_avg", "loss/value_avg", "policy/clipfrac_avg", "val/clipfrac_avg", "policy/approxkl_avg",
    "policy/entropy_avg", "val/ratio", "val/ratio_var",
)  # fmt: skip


def share_of_token_5(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    return torch.tensor([r.count(5) / len(r) for r in responses])


@dataclass(frozen=True)
class Planted:
    """A single scorer, which is a function of token ids."""

    score: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5

    def parts(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> dict[str, Tensor]:
        return {"planted": self.score(queries, responses)}

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["planted"]


def trainer(
    reward: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5,
    reference_seed: int = 0,
    actor_critic: ActorCritic | None = None,
    reference: Reference | None = None,
    demonstrations: LanguageModelling | None = None,
    rt: Runtime | None = None,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> Trainer:
    """A trainer with the same weights, prompts and random numbers each time."""
    return Trainer(
        rt or small.runtime(), small.ppo(**changes),
        actor_critic or ActorCritic(small.causal(), small.scores(seed=3)),
        reference or OwnModel(small.causal(seed=reference_seed), moves="reference_sync" in changes),
        Planted(reward), tokenizer or small.tokenizer(), QUERIES,
        seed=1, demonstrations=demonstrations, clock=clock,
    )  # fmt: skip


def sampled_rollout(one: Trainer) -> Rollout:
    """The responses to QUERIES, scored."""
    return one.collector.score(QUERIES, one.collector.sample(QUERIES))


@pytest.fixture(scope="module")
def ppo_batch() -> PPOBatch:
    one = trainer(reference_seed=7)
    return one.estimator.estimate(sampled_rollout(one))[0]


def parameters(one: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in one.actor_critic.parameters()])


# -------------------------------------------------------------------------------------- rollout


def test_a_rollout_holds_what_the_models_give_for_each_row_alone() -> None:
    one = trainer(reference_seed=7)
    rollout = sampled_rollout(one)
    reference, value = small.causal(seed=7), small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        alone = (small.logits_alone(reference, query, response) / 0.8).log_softmax(-1)
        torch.testing.assert_close(
            rollout.ref_logprobs[row, :n], alone[range(n), response], atol=1e-5, rtol=0
        )
        with torch.no_grad():
            values = value(collate([query], [response], PAD))[0]
        torch.testing.assert_close(
            rollout.values[row, :n], values[len(query) - 1 : -1], atol=1e-5, rtol=0
        )  # the value of token t is read on the token before it
        assert rollout.mask[row].tolist() == [True] * n + [False] * (8 - n)
        assert bool(rollout.ended[row]) == (response[-1] == EOS)
    assert rollout.scores.tolist() == share_of_token_5(QUERIES, rollout.responses).tolist()


def test_micro_batches_do_not_change_a_rollout() -> None:
    large, small_ones = (sampled_rollout(trainer(micro_batch_tokens=n)) for n in (16384, 20))
    assert large.responses == small_ones.responses
    torch.testing.assert_close(large.values, small_ones.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(large.ref_logprobs, small_ones.ref_logprobs, atol=1e-5, rtol=0)


def test_a_rollout_sampled_in_parts_has_the_policys_log_probs() -> None:
    one = trainer(sampling_batch_size=5)  # 16 responses: 5, 5, 5 and 1
    rollout = sampled_rollout(one)
    assert len(rollout.responses) == len(QUERIES)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        alone = (small.logits_alone(small.causal(), query, response) / 0.8).log_softmax(-1)
        torch.testing.assert_close(
            rollout.logprobs[row, : len(response)], alone[range(len(response)), response], atol=1e-5, rtol=0
        )
    assert len(set(map(tuple, rollout.responses[::5]))) > 1, "each part draws numbers of its own"


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    queue = Queue(20, torch.Generator().manual_seed(1))
    seen = [row for _ in range(5) for row in queue.take(8)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


# ----------------------------------------------------------------------- from scores to advantages


def hand_made_rollout() -> Rollout:
    """Two responses: 2 tokens with EOS, and 3 tokens without."""
    return Rollout(
        queries=[[4], [5, 6]],
        responses=[[7, EOS], [8, 9, 10]],
        ended=torch.tensor([True, False]),
        mask=lengths_mask([2, 3], 4),
        logprobs=pad_rows([torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -1.5, -3.0])], 4),
        ref_logprobs=pad_rows([torch.tensor([-2.0, -2.5]), torch.tensor([-1.5, -1.0, -4.0])], 4),
        values=torch.zeros(2, 4),
        last_values=torch.zeros(2),
        scores=torch.tensor([2.0, 6.0]),
        parts={"planted": torch.tensor([2.0, 6.0])},
    )


def test_objective_metrics_equal_hand_computed_values() -> None:
    one = trainer(truncation="none", kl_coef=0.1)
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
    apart = replace(rollout, ref_logprobs=rollout.ref_logprobs - torch.tensor([[0.0], [1.0]]))
    metrics = trainer().estimator.estimate(apart)[1]
    assert metrics["objective/kl_k1"] == pytest.approx(3.0)
    assert metrics["objective/kl_k1_standard_error"] == pytest.approx(1.5 / 2**0.5)
    assert standard_error(-0.4, 0.16, 1.0) == 0.4


def test_rlhf_reward_includes_the_eos_rule() -> None:
    _, metrics = trainer(missing_eos_score=-1.0, kl_coef=0.1).estimator.estimate(hand_made_rollout())
    assert metrics["objective/scores"] == pytest.approx(0.5)  # (2 − 1) / 2
    assert metrics["objective/raw_scores"] == pytest.approx(4.0)
    assert metrics["objective/rlhf_reward"] == pytest.approx(0.5 - 0.15)


def test_returns_are_the_scores_minus_the_remaining_kl() -> None:
    ppo_batch, _ = trainer(lam=1.0, kl_coef=0.1).estimator.estimate(hand_made_rollout())
    expected = torch.tensor([[2 - 0.15, 2 - 0.05, 0, 0], [-1 - 0.15, -1 - 0.05, -1 - 0.1, 0]])
    torch.testing.assert_close(ppo_batch.returns, expected)


def test_advantages_have_mean_0_and_variance_1_over_the_rollout(ppo_batch: PPOBatch) -> None:
    real = ppo_batch.advantages[ppo_batch.rollout.mask]
    assert real.mean().item() == pytest.approx(0, abs=1e-5)
    assert real.var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert (ppo_batch.advantages[~ppo_batch.rollout.mask] == 0).all()


def test_whitened_rewards_keep_their_mean() -> None:
    one = trainer(whiten_rewards=True, lam=1.0, kl_coef=0.1)
    ppo_batch, _ = one.estimator.estimate(hand_made_rollout())
    rewards = [-0.1, 2 - 0.05, -0.1, 0.05, -1 - 0.1]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    white = [(r - mean) / std + mean for r in rewards]
    assert ppo_batch.returns[0, 0].item() == pytest.approx(white[0] + white[1], abs=1e-5)
    assert ppo_batch.returns[1, 2].item() == pytest.approx(white[4], abs=1e-5)


# --------------------------------------------------------------------------------------- update


def test_the_ratio_is_1_before_the_first_step() -> None:
    one = trainer(num_mini_batches=1, num_ppo_epochs=1)
    rollout = sampled_rollout(one)
    with torch.no_grad():
        batch = collate(QUERIES, rollout.responses, PAD)
        again = logprobs_of(one.actor_critic.policy, batch, 0.8)
    width = again.shape[1]
    ratio = (again - rollout.logprobs[:, :width])[batch.response_mask].exp()
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


def far(ppo_batch: PPOBatch) -> PPOBatch:
    """The same batch as if an older policy and critic, farther away, had made it."""
    rollout = ppo_batch.rollout
    return replace(
        ppo_batch, rollout=replace(rollout, logprobs=rollout.ref_logprobs, values=rollout.values / 2)
    )


@pytest.fixture(scope="module")
def tokens(ppo_batch: PPOBatch) -> list[Token]:
    """The tokens of `far(ppo_batch)`, each row passed through the models alone."""
    policy, value, old, result = small.causal(), small.scores(seed=3), far(ppo_batch), list[Token]()
    for row, (query, response) in enumerate(zip(QUERIES, old.rollout.responses, strict=True)):
        logits = small.logits_alone(policy, query, response) / 0.8
        with torch.no_grad():
            values = value(collate([query], [response], PAD))[0, len(query) - 1 : -1].tolist()
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
    metrics = trainer(num_mini_batches=1, num_ppo_epochs=1, **clips).optimiser.optimise(far(ppo_batch))
    for key in TOKEN_MEANS:
        tolerance = 1e-3 if key == "val/ratio_var" else 1e-4
        assert metrics[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance / 100), key
    if clips:
        loss = "loss/value_avg" if "cliprange_value" in clips else "loss/policy_avg"
        assert abs(expected[loss] - shipped[loss]) > 0.003 * abs(shipped[loss]), (
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
        values = value(collate([query], [response], PAD))[0, start:-1]
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
    def moved(**changes: Any) -> tuple[bool, bool]:
        one = trainer(**changes)
        before = copy.deepcopy(one.actor_critic.state_dict())
        one.optimiser.optimise(replace(ppo_batch, advantages=torch.zeros_like(ppo_batch.advantages)))
        after = one.actor_critic.state_dict()
        changed = {key.split(".")[0] for key in after if not torch.equal(after[key], before[key])}
        return "policy" in changed, "value" in changed

    assert moved(vf_coef=0.1) == (False, True)
    assert moved(vf_coef=0.0) == (False, False)


def test_a_planted_task_is_learned() -> None:
    one = trainer(
        total_episodes=1280, rollout_batch_size=64, learning_rate=5e-3, kl_coef=0.0, num_ppo_epochs=4,
        truncation="none", temperature=1.0,
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


def test_the_same_seed_trains_the_same_policy() -> None:
    first, second = trainer(total_episodes=32), trainer(total_episodes=32)
    a, b = list(first.updates()), list(second.updates())
    assert torch.equal(parameters(first), parameters(second))
    timed = ("time/", "eps")
    assert [{k: v for k, v in m.items() if not k.startswith(timed)} for m in a] == [
        {k: v for k, v in m.items() if not k.startswith(timed)} for m in b
    ]

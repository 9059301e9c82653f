"""A rollout against models on single rows; its advantages and metrics against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.batches import collate
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.metrics import sampler_metrics, standard_error
from rlhf_tasks.scoring.protocol import Responses
from tests import small
from tests.ppo import test_advantages
from tests.ppo.toy import (
    PROMPTS,
    QUERIES,
    Planted,
    hand_made_rollout,
    log_p_alone,
    share_of_token_5,
    shared,
    toy,
    without_critic,
)
from tests.small import EOS, PAD

# ------------------------------------------------------------------------------------ what it holds


@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batch_tokens": 20}, {"sampler__batch_size": 5}, {"truncation__kind": "bootstrap"}],
    ids=["whole", "micro-batches", "sampled in parts", "bootstrap"],
)
def test_a_rollout_holds_what_the_models_give_for_each_row_alone(changes: dict[str, Any]) -> None:
    rollout = toy(reference_seed=7, **changes).sample()
    policy, reference, value = small.causal(), small.causal(seed=7), small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        for model, found in ((policy, rollout.logprobs), (reference, rollout.ref_logprobs)):
            alone = log_p_alone(model, query, response).detach()
            torch.testing.assert_close(found[row, :n], alone[range(n), response], atol=1e-5, rtol=0)
        with torch.no_grad():
            values = value(collate([query], [response], PAD))[0]
        # the value of token t is read on the token before it
        torch.testing.assert_close(rollout.values[row, :n], values[:-1], atol=1e-5, rtol=0)
        is_cut = response[-1] != EOS
        after = values[-1].item() if is_cut and "truncation__kind" in changes else 0.0
        assert rollout.bootstrap_values[row].item() == pytest.approx(after, abs=1e-5)
        assert rollout.mask[row].tolist() == [True] * n + [False] * (8 - n)
        assert bool(rollout.ended[row]) == (not is_cut)
        for name in ("logprobs", "ref_logprobs", "values"):
            assert not getattr(rollout, name)[row, n:].any(), "zero on padding"
    assert rollout.scores.tolist() == share_of_token_5(QUERIES, rollout.responses).tolist()
    assert len(set(map(tuple, rollout.responses[::5]))) > 1, "each part draws numbers of its own"
    assert 0 < rollout.ended.sum() < 16, "some of both"


def test_scorers_get_the_text_of_each_prompt_and_not_what_its_ids_decode_to() -> None:
    class Recorder(Planted):
        def parts(self, rows: Responses) -> dict[str, Tensor]:
            texts = [PROMPTS.texts[QUERIES.index(query)] for query in rows.given[0]]
            assert list(rows.prompts) == texts
            return super().parts(rows)

    next(toy(scorers=Recorder()).updates)


def test_the_values_of_a_shared_critic_are_float32_in_bf16_too() -> None:
    actor_critic, dist = shared(), small.distributed("bf16")
    weight, _ = actor_critic.critic.parameters()
    torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    values = toy(dist=dist, actor_critic=actor_critic, advantages__critic__kind="shared").sample().values
    assert not torch.equal(values, values.bfloat16().float())


def test_a_custom_stop_token_ends_responses() -> None:
    rollout = toy(stop_token=7, truncation__kind="eos_trick_replace").sample()
    for response, ended in zip(rollout.responses, rollout.ended.tolist(), strict=True):
        assert ended == (response[-1] in (7, EOS))
        assert not {7, EOS} & set(response[:-1])
    assert {response[-1] for response in rollout.responses} >= {7, EOS}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_nan_or_infinite_is_an_error(bad: float) -> None:
    def score(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        return torch.tensor([bad] + [0.0] * (len(queries) - 1))

    with pytest.raises(NonFiniteError, match="NaN or infinite scores") as caught:
        toy(score).sample()
    assert len(caught.value.batch["responses"]) == 16


# ---------------------------------------------------------------------------- advantages and returns

VALUES = [[0.5, -1.0], [2.0, 0.25, 1.5]]
KL_COST = [[-0.1, -0.05], [-0.1, 0.05, -0.1]]
"""−0.1 · (logprobs − ref_logprobs) of `hand_made_rollout`."""


@pytest.mark.parametrize(
    ("changes", "unfinished"),
    [
        ({"truncation__kind": "none"}, 6.0),
        ({"truncation__kind": "eos_trick_replace", "truncation__missing_eos_score": -1.5}, -1.5),
        ({"truncation__kind": "eos_trick_subtract", "truncation__missing_eos_score": -1.5}, 6.0 - 1.5),
        ({"truncation__kind": "bootstrap"}, 0.9 * 3.0),
        ({"truncation__kind": "bootstrap_add"}, 6.0 + 0.9 * 3.0),
        ({"truncation__kind": "none", "advantages__gamma": 1.0, "advantages__lam": 0.5}, 6.0),
        ({"truncation__kind": "none", "kl__kind": "in_loss", "kl__estimator": "k3"}, 6.0),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else None,
)
def test_advantages_and_returns_equal_a_slow_loop(changes: dict[str, Any], unfinished: float) -> None:
    """The finished response scores 2, the rule decides the other's score; KL may be in the reward."""
    settings: dict[str, Any] = {"advantages__gamma": 0.9, "advantages__lam": 0.8} | changes
    is_bootstrapped = settings["truncation__kind"].startswith("bootstrap")
    given = replace(
        hand_made_rollout(),
        values=torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in VALUES]),
        bootstrap_values=torch.tensor([0.0, 3.0 if is_bootstrapped else 0.0]),
    )
    rollout, _ = toy(kl_coef=0.1, whiten_advantages=False, **settings).estimate(given)
    costs = KL_COST if settings.get("kl__kind") != "in_loss" else [[0.0] * len(row) for row in KL_COST]
    gamma, lam = settings["advantages__gamma"], settings["advantages__lam"]
    for row, score in enumerate((2.0, unfinished)):
        rewards = [*costs[row][:-1], costs[row][-1] + score]
        expected = test_advantages.slow(rewards, VALUES[row], gamma, lam)
        n = len(rewards)
        assert rollout.advantages[row].tolist() == pytest.approx([*expected, *[0] * (4 - n)], abs=1e-5)
        returns = [a + v for a, v in zip(expected, VALUES[row], strict=True)]
        assert rollout.returns[row].tolist() == pytest.approx([*returns, *[0] * (4 - n)], abs=1e-5)


@pytest.mark.parametrize("num_samples", [2, 4, 8])
@pytest.mark.parametrize("kl_in", ["in_reward", "in_loss"])
def test_without_a_critic_advantages_equal_a_slow_loop_from_the_scores_on(
    num_samples: int, kl_in: str
) -> None:
    """Score and KL of a whole response; with `kl: in_loss` the score alone. Every token has the same one."""
    kl = {"kl__kind": kl_in, "kl__estimator": "k3", "kl_coef": 0.3, "truncation__kind": "eos_trick_subtract"}
    rollout, metrics = toy(reference_seed=7, **without_critic("rloo", num_samples) | kl).estimate()
    returns = []
    for row, response in enumerate(rollout.responses):
        n = len(response)
        log_ratio = (rollout.ref_logprobs[row, :n] - rollout.logprobs[row, :n]).double()
        cost = 0.3 * (log_ratio.exp() - 1 - log_ratio).sum().item() if kl_in == "in_reward" else 0.0
        returns.append(rollout.scores[row].item() - (0 if rollout.ended[row] else 1) - cost)
    num_prompts = 16 // num_samples
    for i in range(num_prompts):
        rows = range(i, 16, num_prompts)
        assert len({tuple(rollout.queries[row]) for row in rows}) == 1
        for row in rows:
            others = [returns[j] for j in rows if j != row]
            n = len(rollout.responses[row])
            on_each_token = [returns[row] - sum(others) / len(others)] * n + [0] * (8 - n)
            assert rollout.advantages[row].tolist() == pytest.approx(on_each_token, abs=1e-5)
    spreads = [torch.tensor(returns)[i::num_prompts].std().item() for i in range(num_prompts)]
    assert metrics["val/group_deviation"] == pytest.approx(sum(spreads) / num_prompts, abs=1e-5)
    assert len(set(map(tuple, rollout.responses))) > num_prompts, "the samples of a prompt differ"


@pytest.mark.parametrize("changes", [{}, without_critic("rloo"), without_critic("group")])
def test_advantages_are_whitened_over_the_rollout_and_then_clipped(changes: dict[str, Any]) -> None:
    def advantages(**more: Any) -> tuple[Tensor, Tensor]:
        rollout, _ = toy(reference_seed=7, **changes | more).estimate()
        return rollout.advantages, rollout.mask

    plain, mask = advantages(whiten_advantages=False)
    white, _ = advantages(whiten_advantages=True)
    clipped, _ = advantages(whiten_advantages=True, advantage_clip=0.5)
    expected = (plain[mask] - plain[mask].mean()) / plain[mask].std(correction=0)
    torch.testing.assert_close(white[mask], expected, atol=1e-4, rtol=1e-4)
    assert (white[~mask] == 0).all()
    assert torch.equal(clipped, white.clamp(-0.5, 0.5))
    assert white.abs().max() > 0.5


@pytest.mark.parametrize("rule", ["none", "bootstrap", "bootstrap_add"])
def test_whitened_rewards_keep_their_mean_and_bootstrapped_values_are_not_whitened(rule: str) -> None:
    """With V = 4 and γ = 0.9 the return of the last token is its whitened reward plus 3.6."""
    changes: dict[str, Any] = {
        "advantages__whiten_rewards": True,
        "advantages__gamma": 0.9,
        "advantages__lam": 1.0,
    }
    one = toy(truncation__kind=rule, kl_coef=0.1, **changes)
    after = 0.0 if rule == "none" else 4.0
    rollout = replace(hand_made_rollout(), bootstrap_values=torch.tensor([0.0, after]))
    estimated, metrics = one.estimate(rollout)
    score = 0.0 if rule == "bootstrap" else 6.0
    rewards = [-0.1, 2 - 0.05, -0.1, 0.05, score - 0.1]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    white = [(r - mean) / std + mean for r in rewards]
    last = white[4] + 0.9 * after
    middle = white[3] + 0.9 * last
    expected = [white[0] + 0.9 * white[1], white[1], 0, 0, white[2] + 0.9 * middle, middle, last, 0]
    assert estimated.returns.flatten().tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["objective/scores"] == pytest.approx((2 + score + 0.9 * after) / 2)


# --------------------------------------------------------------------------------------------- metrics


def measured(rollout: Any = None, **changes: Any) -> dict[str, float]:
    settings: dict[str, Any] = {"truncation__kind": "none", "kl_coef": 0.1} | changes
    return toy(**settings).estimate(rollout or hand_made_rollout())[1]


RULE = {"truncation__kind": "eos_trick_replace", "truncation__missing_eos_score": -1.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            # kl: (1 + 0.5) + (1 − 0.5 + 1) = 3 over two responses; −log p: 3 + 5
            {"advantages__lam": 1.0},
            {
                "objective/kl": 1.5,
                "objective/entropy": 4.0,
                "objective/non_score_reward": -0.15,
                "objective/scores": 4.0,
                "objective/rlhf_reward": 3.85,
                "objective/perplexity": math.exp(8 / 5),
                "objective/ref_perplexity": math.exp((2 + 2.5 + 1.5 + 1 + 4) / 5),
                "val/num_eos_tokens": 1,
                "val/response_length": 2.5,
                "val/truncated_share": 0.5,
                "val/explained_variance": 0,  # values of zero explain nothing
                "val/distinct_1": 1,
                "val/distinct_2": 1,
                "val/repetition": 0,
            },
        ),
        # the guards use k1 whatever the estimator is
        (
            {"kl__estimator": "k2"},
            {"objective/kl": 0.5 * (1 + 0.25 + 1 + 0.25 + 1) / 2, "objective/kl_k1": 1.5},
        ),
        (RULE, {"objective/scores": (2 - 1) / 2, "objective/raw_scores": 4, "objective/rlhf_reward": 0.35}),
        (
            {"kl__kind": "in_loss", "kl__estimator": "k3"},
            {"objective/non_score_reward": 0, "objective/scores": 4, "objective/rlhf_reward": 4},
        ),
        # scaled first: 2 and 6 become −1 and 1, and the second response did not end
        (
            RULE | {"score_scaling": {"subtract_mean": True, "clip": None}},
            {"objective/scores": (-1 - 1) / 2, "objective/raw_scores": 4},
        ),
    ],
    ids=["plain", "k2", "eos rule", "kl in the loss", "scaling"],
)
def test_metrics_of_a_rollout_equal_hand_computed_values(
    changes: dict[str, Any], expected: dict[str, float]
) -> None:
    metrics = measured(**changes)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_the_standard_error_of_the_kl_is_its_deviation_over_the_root_of_the_episodes() -> None:
    """1.5 and 4.5 nats: 3 ± 1.5 / √2. A single episode shows no spread."""
    rollout = hand_made_rollout()
    metrics = measured(replace(rollout, ref_logprobs=rollout.ref_logprobs - torch.tensor([[0.0], [1.0]])))
    assert metrics["objective/kl_k1"] == pytest.approx(3.0)
    assert metrics["objective/kl_k1_standard_error"] == pytest.approx(1.5 / 2**0.5)
    assert standard_error(-0.4, 0.16, 1.0) == 0.4


def test_a_critic_that_is_right_explains_all_variance() -> None:
    values = torch.tensor([[2.0, 2.0, 0, 0], [6.0, 6.0, 6.0, 0]])
    metrics = measured(replace(hand_made_rollout(), values=values), kl_coef=0.0, advantages__lam=1.0)
    assert metrics["val/explained_variance"] == pytest.approx(1)


def test_metrics_of_a_sampler_are_means_over_the_real_tokens() -> None:
    """Log-ratios: 0.1 and −0.3 of the first response, 0 of the second; its padding counts nowhere."""
    rollout = hand_made_rollout()
    sampler = rollout.logprobs - torch.tensor([[0.1, -0.3, 9.0, 9.0], [0.0, 0.0, 0.0, 9.0]])
    found = sampler_metrics(rollout, sampler, 1.05)
    assert found["sampler/logprob_diff"] == pytest.approx(0.4 / 5)
    assert found["sampler/logprob_diff_max"] == pytest.approx(0.3)
    # exp(d) − 1 − d is 0.0051709 at 0.1 and 0.0408182 at −0.3
    assert found["sampler/kl"] == pytest.approx((0.0051709 + 0.0408182) / 5, rel=1e-4)
    assert found["sampler/capped_share"] == pytest.approx(1 / 5)  # exp(0.1) = 1.105
    assert "sampler/capped_share" not in sampler_metrics(rollout, sampler, None)

"""Responses that no loss reads: a step is that of a rollout without them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.config.ppo import Guards
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.ppo.advantages import equal_groups
from rlhf_tasks.ppo.guards import GuardChecks
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import Rollout
from rlhf_tasks.ppo.train import select_responses
from tests import small
from tests.ppo.ranks import run_ranks
from tests.ppo.toy import ONE_STEP, Memory, Toy, given, toy, untimed, without_critic

GROUP = without_critic("group")  # row i belongs to prompt i % 4
EQUAL = [row for row in range(16) if row % 4 in (0, 2)]
TRUNCATED = [1, 5, 7]
GROUPS: dict[str, Any] = {"skip_equal_groups": True}
ENDS: dict[str, Any] = {"skip_truncated": True}
SWITCHES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "groups": (GROUP | GROUPS, EQUAL),
    "truncated": (GROUP | ENDS, TRUNCATED),
    "both": (GROUP | GROUPS | ENDS, [*EQUAL, *TRUNCATED]),
    "truncated, with a critic": (ENDS, TRUNCATED),
}
OTHER_TERMS: dict[str, Any] = {"kl__kind": "in_loss", "kl__estimator": "k3", "entropy_coef": 0.2}


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Prompts 0 and 2 have equal scores, TRUNCATED no end; every token has an advantage."""
    sampled, random = toy(reference_seed=7, **GROUP).sample(), torch.Generator().manual_seed(3)
    rows = torch.arange(16)
    numbers = torch.randn(3, *sampled.mask.shape, generator=random) * sampled.mask
    return replace(
        sampled,
        scores=torch.where(rows % 2 == 0, 1.5, rows / 10),
        ended=torch.tensor([row not in TRUNCATED for row in range(16)]),
        advantages=1.0 + numbers[0],
        values=numbers[1],
        returns=numbers[2],
    )


def remove(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """The rollout without these rows."""
    rest = [row for row in range(16) if row not in rows]
    tensors = {f.name: getattr(rollout, f.name) for f in fields(Rollout)}
    own: dict[str, Any] = {name: x[rest] for name, x in tensors.items() if isinstance(x, Tensor)}
    queries, responses = ([rows[i] for i in rest] for rows in (rollout.queries, rollout.responses))
    return replace(rollout, queries=queries, responses=responses, parts={}, **own)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("reduction", ["token_mean", "response_mean", {"constant": 5}])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_step_is_that_of_a_rollout_without_the_rows(
    name: str, reduction: Any, whiten: bool, rollout: Rollout
) -> None:
    """Every mean, and the moments of the advantages, are over what remains; the other terms too."""
    changes, rows = SWITCHES[name]
    settings = changes | ONE_STEP | OTHER_TERMS | {"max_grad_norm": None, "loss_reduction": reduction}
    off: dict[str, Any] = {"skip_equal_groups": False, "skip_truncated": False}
    if "critic" not in name:
        off |= without_critic("tests.ppo.test_skip:unused", 1)
    switched = toy(micro_batch_tokens=40, **settings)
    absent, unswitched = toy(**settings | off), toy(**settings | off)
    whole = switched.learn(rollout, whiten_advantages=whiten)
    expected = absent.learn(remove(rollout, rows), whiten_advantages=whiten)
    assert whole["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    torch.testing.assert_close(switched.weights, absent.weights, atol=2e-5, rtol=0)
    for key in ("loss/policy_avg", "loss/kl_avg", "policy/entropy_avg", "val/ratio", "val/advantage_std"):
        assert whole[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    other = unswitched.learn(rollout, whiten_advantages=whiten)["train/grad_norm"]
    assert abs(other / expected["train/grad_norm"] - 1) > 0.01, "the rows have a gradient of their own"


def test_what_is_left_out_is_counted() -> None:
    """3 prompts with 2 responses each: rows i and i + 3. Scores 1 and 1, 0 and 1, 2 and 2 + rounding."""
    scores, ended = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 2.00001]), torch.ones(6, dtype=torch.bool)
    ended[4] = False
    two = without_critic("rloo", 2) | {"rollout_batch_size": 16}
    cases: dict[str, tuple[dict[str, Any], list[int], Metrics]] = {
        "off": ({}, [1, 1, 1, 1, 1, 1], {}),
        "groups": (GROUPS, [0, 1, 0, 0, 1, 0], {"val/equal_group_share": 2 / 3, "val/read_share": 1 / 3}),
        "ends": (ENDS, [1, 1, 1, 1, 0, 1], {"val/read_share": 5 / 6}),
        "both": (
            GROUPS | ENDS,
            [0, 1, 0, 0, 0, 0],
            {"val/equal_group_share": 2 / 3, "val/read_share": 1 / 6},
        ),
    }
    for changes, reads, shares in cases.values():
        is_read, metrics = select_responses(small.ppo(**two, **changes), scores, ended)
        assert is_read.tolist() == [bool(x) for x in reads]
        assert metrics == pytest.approx(shares)
    assert equal_groups(torch.zeros(4), 2).all(), "scores of 0 are equal"


def test_a_minibatch_with_nothing_to_read_takes_no_step(rollout: Rollout) -> None:
    """Each of 4 minibatches has one prompt, and the responses to two of them are equal."""
    one = toy(**GROUP, **GROUPS, num_mini_batches=4, num_ppo_epochs=3, target_kl=100.0)
    one.learn(rollout)
    assert {int(state["step"]) for state in one.state.optimizer.state.values()} == {3 * 2}


@pytest.mark.parametrize("changes", [GROUP | GROUPS, GROUP | ENDS, ENDS], ids=["groups", "ends", "critic"])
def test_an_update_with_nothing_to_read_changes_no_weight(changes: dict[str, Any], rollout: Rollout) -> None:
    one = toy(**changes, kl_penalty={"beta": 1.0, "target": 0.01}, target_kl=0.1)
    before = one.weights
    nothing = replace(rollout, scores=torch.ones(16), ended=torch.zeros(16, dtype=torch.bool))
    metrics = one.learn(nothing, whiten_advantages=True)
    assert torch.equal(one.weights, before)
    assert (metrics["val/read_share"], metrics["train/grad_norm"]) == (0, 0)
    assert metrics["val/advantage_std"] == 0
    assert "loss/policy_avg" not in metrics
    assert one.state.penalty_beta == 1.0, "nothing moved by which it could adapt"
    assert one.state.update == 1
    guards = GuardChecks(Guards(), 16)
    assert guards.check(metrics | {"objective/kl_k1": 0.0}) == []


def test_a_critic_that_warms_up_reads_every_response(rollout: Rollout) -> None:
    changes: dict[str, Any] = {"advantages__critic__warmup": {"max_updates": 1}, **ONE_STEP}
    skips, reads = toy(**changes, **ENDS), toy(**changes)
    for one in (skips, reads):
        one.learn(rollout)
    assert torch.equal(skips.weights, reads.weights)
    assert skips.state.warmup_losses == reads.state.warmup_losses


def test_two_ranks_learn_what_one_does(rollout: Rollout) -> None:
    """The denominator is that of all ranks, of which one may have no row that is read."""
    changes = SWITCHES["both"][0] | {"num_mini_batches": 2, "loss_reduction": "response_mean"}

    def update(one: Toy) -> tuple[Metrics, Tensor]:
        return next(one.updates), one.weights

    with given(rollout):
        metrics, weights = update(toy(**changes))
        for own, own_weights in run_ranks(lambda dist: toy(dist=dist, **changes), update):
            torch.testing.assert_close(own_weights, weights, atol=1e-5, rtol=0)
            for key in ("train/grad_norm", "loss/policy_avg", "val/read_share", "val/equal_group_share"):
                assert own[key] == pytest.approx(metrics[key], rel=1e-4), key
    assert metrics["val/read_share"] == 5 / 16


def has_token_5(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    return torch.tensor([float(5 in response) for response in responses])


def test_a_resumed_training_ends_with_the_same_bytes() -> None:
    changes = SWITCHES["both"][0] | {"learning_rate": 1e-2, "target_kl": 1e-3}
    whole = toy(has_token_5, snapshots=(memory := Memory()), **changes)
    history = untimed(list(whole.updates))
    assert 0 < min(row["val/read_share"] for row in history) < 1
    for step, state in copy.copy(memory.saved).items():
        resumed = toy(has_token_5, snapshots=Memory({step: state}), **changes)
        assert untimed(list(resumed.updates)) == history[step:]
        assert torch.equal(resumed.weights, whole.weights)

"""Rollouts that a server samples: what PPO learns from them, refuses, and resumes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.ppo.vllm import VllmError
from tests.ppo.toy import QUERIES, VLLM_SAMPLER, InMemory, Memory, toy, untimed


def test_the_server_has_the_weights_of_each_update() -> None:
    server = InMemory()
    one = toy(server=server)
    states = [copy.deepcopy(one.actor_critic.policy.state_dict())]
    for _ in one.updates:
        states.append(copy.deepcopy(one.actor_critic.policy.state_dict()))
    assert len(states) == 5
    for loaded, state in zip(server.loads, states, strict=False):
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert len(server.loads) == 4


@pytest.mark.parametrize("cap", [None, 1.001])
def test_importance_weights_are_those_of_the_servers_log_probs(cap: float | None) -> None:
    """The server's log-probs are moved by 0.0005 nats: the ratio is exp(0.0005), 1.0005."""

    class Moved(InMemory):
        def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Samples:
            samples = super().sample(queries, n, seeds)
            return replace(samples, logprobs=[x - 0.0005 for x in samples.logprobs])

    one = toy(server=Moved(), sampler=VLLM_SAMPLER | {"importance_cap": cap})
    estimator, seen = one.setup.estimator, list[torch.Tensor]()

    def spy(rewards: Any, rollout: Any, config: Any) -> Any:
        seen.append(rollout.importance[rollout.mask])
        return estimator(rewards, rollout, config)

    next(replace(one, setup=replace(one.setup, estimator=spy)).updates)
    expected = torch.full_like(seen[0], 1.0 if cap is None else 1.0005)
    torch.testing.assert_close(seen[0], expected, atol=2e-5, rtol=0)


def test_an_evaluation_has_the_weights_of_its_update_which_the_next_rollout_has_too() -> None:
    server = InMemory()
    one = toy(server=server, learning_rate=1e-2)
    updates = one.updates
    first = next(updates)
    assert len(server.loads) == 1
    found = [one.state.sampler.respond(QUERIES[:4], seed, 1) for seed in (7, 7, 8)]
    assert found[0] == found[1] != found[2]
    now = one.actor_critic.policy.state_dict()
    assert all(torch.equal(server.loads[-1][name], now[name]) for name in now)
    second = next(updates)
    assert len(server.loads) == 2
    undisturbed = toy(server=InMemory(), learning_rate=1e-2).updates
    assert untimed([first, second]) == untimed([next(undisturbed), next(undisturbed)])


def test_warm_up_of_the_critic_loads_the_frozen_policy_once() -> None:
    server, warmup = InMemory(), {"max_updates": 3, "settled": 0.01}
    assert len(list(toy(server=server, advantages__critic__warmup=warmup, total_episodes=16).updates)) == 4
    assert len(server.loads) == 1


# --------------------------------------------------------------------------------------------- refusal


def test_a_server_that_keeps_its_first_weights_is_found_by_its_log_probs() -> None:
    class Stale(InMemory):
        def load(self, weights: Any) -> None:
            if not self.loads:
                super().load(weights)

    one = toy(server=Stale(), learning_rate=1e-2)
    with pytest.raises(VllmError, match=r"differ from the policy's by .* nats per token"):
        list(one.updates)
    assert one.state.update == 1


# --------------------------------------------------------------------------------------------- resuming


def test_a_resumed_training_with_a_server_that_repeats_its_responses_is_the_uninterrupted_one() -> None:
    whole = toy(server=InMemory(), snapshots=(memory := Memory()))
    history = untimed(list(whole.updates))
    for step, state in memory.saved.items():
        resumed = toy(server=InMemory(), snapshots=Memory({step: state}))
        assert untimed(list(resumed.updates)) == history[step:]
        assert torch.equal(resumed.weights, whole.weights)


class Counted(InMemory):
    """Notes its queries, and fails in rollout `fails_in`."""

    def __init__(self, fails_in: int = 0) -> None:
        super().__init__()
        self.asked, self._fails_in = list[list[Ids]](), fails_in

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Samples:
        self.asked.append(list(queries))
        if len(self.asked) == self._fails_in:
            raise VllmError("vLLM has failed")
        return super().sample(queries, n, seeds)

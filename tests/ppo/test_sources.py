"""Rollouts that an engine samples: what PPO learns from them, measures, refuses, and resumes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.data.batches import Ids
from rlhf_tasks.ppo.engines.protocol import Answers, EngineError
from rlhf_tasks.ppo.losses import Coefficients, MicroBatch, importance_weights, policy_terms
from rlhf_tasks.ppo.rollout_metrics import engine_metrics
from tests.ppo import standin, test_engines
from tests.ppo.toy import ENGINE, QUERIES, InMemory, hand_made_rollout, parameters, trainer, without_critic

AHEAD = ENGINE | {"ahead": 1}


def plain(metrics: dict[str, float]) -> dict[str, float]:
    """Without times."""
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "eps")) and "seconds" not in k}


# ---------------------------------------------------------------------------------- importance weights


def test_importance_weights_are_the_capped_ratio_of_policy_to_engine() -> None:
    policy = torch.tensor([[0.6, 0.5, 0.1]]).log()
    engine = torch.tensor([[0.3, 0.5, 0.01]]).log()
    assert importance_weights(policy, engine, 4.0)[0].tolist() == pytest.approx([2.0, 1.0, 4.0])


def test_the_policy_loss_of_a_token_is_multiplied_by_its_importance() -> None:
    """At a ratio of 1 the loss of a token is −A; with weights of 2 and 0.5 it is −2·1 − 0.5·3."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    zero = torch.zeros(1, 2)
    batch = MicroBatch(
        torch.ones(1, 2, dtype=torch.bool), logprobs.detach(), logprobs.detach(), zero,
        torch.tensor([[1.0, 3.0]]), zero, torch.tensor([[2.0, 0.5]]),
    )  # fmt: skip
    loss, sums = policy_terms(logprobs, zero, batch, Coefficients(cliprange=0.2, vf_coef=None))
    loss.backward()
    assert loss.item() == sums["loss/policy_avg"].item() == pytest.approx(-3.5)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0, -1.5])
    without, _ = policy_terms(
        logprobs, zero, batch._replace(importance=None), Coefficients(cliprange=0.2, vf_coef=None)
    )
    assert without.item() == pytest.approx(-4.0)


def test_metrics_of_an_engine_are_means_over_the_real_tokens() -> None:
    """Log-ratios: 0.1 and −0.3 of the first response, 0 of the second; its padding counts nowhere."""
    rollout = hand_made_rollout()
    engine = rollout.logprobs - torch.tensor([[0.1, -0.3, 9.0, 9.0], [0.0, 0.0, 0.0, 9.0]])
    found = engine_metrics(rollout, engine, 1.05, lambda x: x, lambda x: x)
    assert found["engine/logprob_diff"] == pytest.approx(0.4 / 5)
    assert found["engine/logprob_diff_max"] == pytest.approx(0.3)
    # exp(d) − 1 − d is 0.0051709 at 0.1 and 0.0408182 at −0.3
    assert found["engine/kl"] == pytest.approx((0.0051709 + 0.0408182) / 5, rel=1e-4)
    assert found["engine/capped_share"] == pytest.approx(1 / 5)  # exp(0.1) = 1.105
    assert "engine/capped_share" not in engine_metrics(rollout, engine, None, lambda x: x, lambda x: x)


# -------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_token_is_learned_through_the_server(ahead: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_ppo_epochs": 4,
        "kl_coef": 0.0,
        "truncation.kind": "none",
        "schedule": "linear",
    }
    sizes: dict[str, Any] = {"total_episodes": 20 * 32, "rollout_batch_size": 32, "learning_rate": 1e-2}
    with standin.serving() as server:
        one = test_engines.engine(tmp_path, url=server.url, ahead=ahead)
        section = ENGINE | {"url": server.url, "ahead": ahead}
        history = list(trainer(engine=one, engine_section=section, **settings, **sizes).updates())
        one.close()
    assert history[0]["objective/raw_scores"] < 0.1
    assert sum(m["objective/raw_scores"] for m in history[-3:]) / 3 > 0.5
    assert [m["engine/lag"] for m in history] == [0.0] + [float(ahead)] * 19
    assert max(m["val/first_ratio_error"] for m in history) < 1e-4, (
        "the ratio is to the policy's own log-probs"
    )
    if ahead == 0:
        assert max(m["engine/logprob_diff_max"] for m in history) < 1e-4


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_engine_has_the_weights_of_this_update_or_of_the_one_before(ahead: int) -> None:
    engine = InMemory()
    one = trainer(engine=engine, engine_section=ENGINE | {"ahead": ahead})
    states = [copy.deepcopy(one.actor_critic.policy.state_dict())]
    for _ in one.updates():
        states.append(copy.deepcopy(one.actor_critic.policy.state_dict()))
    assert len(states) == 5
    for loaded, state in zip(engine.loads, states, strict=False):
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    # ahead, the last update begins no rollout: those of updates 2, 3 and 4 had the weights of 1, 2 and 3
    assert len(engine.loads) == (3 if ahead else 4)


def test_several_samples_of_a_prompt_are_compared_with_each_other() -> None:
    changes = without_critic("rloo") | {"total_episodes": 16}
    one = trainer(engine=InMemory(), engine_section=ENGINE, **changes)
    drawn = one.source.draw(0, has_next=False)
    assert drawn.rows == drawn.rows[:4] * 4
    assert len({tuple(response) for response in drawn.samples.responses}) > 4


def test_an_evaluation_has_the_weights_of_its_update_while_a_rollout_is_ahead() -> None:
    """The rollout that was begun keeps its answers; the next one needs no other weights."""
    engine = InMemory()
    one = trainer(engine=engine, engine_section=AHEAD, learning_rate=1e-2)
    updates = one.updates()
    first = next(updates)
    assert len(engine.loads) == 1
    found = [one.respond(QUERIES[:4], seed) for seed in (7, 7, 8)]
    assert found[0] == found[1] != found[2]
    now = one.actor_critic.policy.state_dict()
    assert all(torch.equal(engine.loads[-1][name], now[name]) for name in now)
    second = next(updates)
    assert len(engine.loads) == 2
    undisturbed = trainer(engine=InMemory(), engine_section=AHEAD, learning_rate=1e-2)
    history = [plain(metrics) for metrics, _ in zip(undisturbed.updates(), range(2), strict=False)]
    assert [plain(first), plain(second)] == history
    assert trainer().respond(QUERIES, 7) is None, "the policy samples by itself"


def test_warm_up_of_the_critic_loads_the_frozen_policy_once() -> None:
    engine = InMemory()
    warmup = {"max_updates": 3, "settled": 0.01}
    one = trainer(engine=engine, engine_section=AHEAD, advantages__critic__warmup=warmup, total_episodes=32)
    lags = [metrics.get("engine/lag") for metrics in one.updates()]
    assert lags == [None, None, None, 0.0, 1.0]
    assert len(engine.loads) == 1, "the second update's rollout is sampled while the first is learned from"


# --------------------------------------------------------------------------------------------- refusal


class Wrong(InMemory):
    """An engine whose answers have another version, or whose weights do not follow."""

    def __init__(self, version: int = 0, *, stale: bool = False) -> None:
        super().__init__()
        self._off, self._stale = version, stale

    def load(self, weights: Any, version: int) -> None:
        if not (self._stale and self.loads):
            super().load(weights, version)
        self.version = version

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        answers = super().sample(queries, n, seeds)
        return replace(answers, version=answers.version + self._off)


def test_answers_of_an_older_version_end_the_training() -> None:
    one = trainer(engine=Wrong(-1), engine_section=ENGINE)
    with pytest.raises(EngineError, match="version 0, and version 1 is in use: the answers are stale"):
        list(one.updates())


def test_an_engine_that_keeps_its_first_weights_is_found_by_its_log_probs() -> None:
    one = trainer(engine=Wrong(stale=True), engine_section=ENGINE, learning_rate=1e-2)
    with pytest.raises(EngineError, match=r"differ from the policy's by .* nats per token"):
        list(one.updates())
    assert one.update == 1


def test_a_rollout_that_is_two_updates_old_is_refused() -> None:
    one = trainer(engine=InMemory(), engine_section=AHEAD)
    one.source.draw(0, has_next=True)
    with pytest.raises(EngineError, match="sampled after update 0: it is stale"):
        one.source.draw(2, has_next=False)


# --------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_trainer_has_the_rollout_that_was_being_sampled(ahead: int, after: int) -> None:
    """With an engine that repeats its answers, the resumed training is the uninterrupted one."""
    section = ENGINE | {"ahead": ahead}
    whole = trainer(engine=InMemory(), engine_section=section)
    history = [plain(metrics) for metrics in whole.updates()]
    first = trainer(engine=InMemory(), engine_section=section)
    updates = first.updates()
    for _ in range(after):
        next(updates)
    state = copy.deepcopy(first.state_dict() | {"sampling": first.collector.generator.get_state()})
    second = trainer(engine=InMemory(), engine_section=section)
    second.collector.generator.set_state(state.pop("sampling"))
    second.load_state_dict(state)
    assert [plain(metrics) for metrics in second.updates()] == history[after:]
    assert torch.equal(parameters(second), parameters(whole))


class Failing(InMemory):
    """An engine that fails in its n-th rollout."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        self._left -= 1
        if self._left == 0:
            raise EngineError("the engine has failed")
        return super().sample(queries, n, seeds)


def test_a_snapshot_beside_a_failed_rollout_is_saved_and_its_prompts_are_sampled_again() -> None:
    """What two updates have learned is saved; a resumed run begins with the rows whose rollout failed."""
    one = trainer(engine=Failing(3), engine_section=AHEAD)
    updates = one.updates()
    next(updates)
    next(updates)
    state = copy.deepcopy(one.state_dict())
    assert state["source"]["next"] is None
    failed = state["source"]["again"]
    assert len(failed) == one.settings.rollout_batch_size
    with pytest.raises(EngineError, match="the engine has failed"):
        next(updates)
    resumed = trainer(engine=InMemory(), engine_section=AHEAD)
    resumed.load_state_dict(state)
    assert resumed.source.draw(2, has_next=True).rows == failed
    assert resumed.source.state_dict()["again"] == []

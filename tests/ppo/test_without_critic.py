"""Training by RLOO and by group-normalised advantages: no critic, and the samples of a prompt together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_tasks.ppo.rollout import Rollout
from rlhf_tasks.ppo.trainer import Metrics, Trainer
from tests.ppo.toy import DEMONSTRATIONS, ONE_STEP, QUERIES, parameters, trainer, without_critic

NAMES = ["rloo", "group"]
OF_THE_CRITIC = ("loss/value_avg", "val/clipfrac_avg", "val/explained_variance")


def own_rollout(one: Trainer) -> Rollout:
    num_samples = one.settings.samples_per_prompt
    queries = QUERIES[: 16 // num_samples] * num_samples
    return one.collector.score(queries, one.collector.sample(queries))


def untimed(history: list[Metrics]) -> list[Metrics]:
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "eps"))} for m in history]


# -------------------- from a rollout to advantages


@pytest.mark.parametrize("num_samples", [2, 4, 8])
@pytest.mark.parametrize("place", ["in_reward", "in_loss"])
def test_advantages_equal_a_slow_loop_from_the_scores_on(num_samples: int, place: str) -> None:
    """Score and KL of a whole response; with `in_loss` the score alone. Every token has the same one."""
    kl = {"kl.kind": place, "kl.estimator": "k3", "kl_coef": 0.3, "truncation.kind": "eos_trick_subtract"}
    one = trainer(reference_seed=7, **without_critic("rloo", num_samples) | kl)
    rollout = own_rollout(one)
    ppo_batch, metrics = one.estimator.estimate(rollout)
    returns = []
    for row, response in enumerate(rollout.responses):
        n = len(response)
        log_ratio = (rollout.ref_logprobs[row, :n] - rollout.logprobs[row, :n]).double()
        cost = 0.3 * (log_ratio.exp() - 1 - log_ratio).sum().item() if place == "in_reward" else 0.0
        returns.append(rollout.scores[row].item() - (0 if rollout.ended[row] else 1) - cost)
    num_prompts = 16 // num_samples
    for i in range(num_prompts):
        rows = range(i, 16, num_prompts)
        assert len({tuple(rollout.queries[row]) for row in rows}) == 1
        for row in rows:
            others = [returns[j] for j in rows if j != row]
            expected = returns[row] - sum(others) / len(others)
            n = len(rollout.responses[row])
            on_each_token = [expected] * n + [0] * (8 - n)
            assert ppo_batch.advantages[row].tolist() == pytest.approx(on_each_token, abs=1e-5)
    spreads = [torch.tensor(returns)[i::num_prompts].std().item() for i in range(num_prompts)]
    assert metrics["val/group_deviation"] == pytest.approx(sum(spreads) / num_prompts, abs=1e-5)
    assert len(set(map(tuple, rollout.responses))) > num_prompts, "the samples of a prompt differ"


@pytest.mark.parametrize("name", NAMES)
def test_whitening_and_the_clip_of_advantages_apply_as_with_a_critic(name: str) -> None:
    changes = without_critic(name) | {"whiten_advantages": True, "advantage_clip": 0.7}
    one = trainer(**changes)
    real = one.estimator.estimate(own_rollout(one))[0].advantages
    loose = trainer(**changes | {"advantage_clip": None})
    white = loose.estimator.estimate(own_rollout(loose))[0]
    tokens = white.advantages[white.rollout.mask]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-5)
    assert tokens.var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert torch.equal(real, white.advantages.clamp(-0.7, 0.7))


# -------------------- updates


@pytest.mark.parametrize("name", NAMES)
def test_each_prompt_of_a_rollout_has_all_of_its_samples(name: str) -> None:
    one, seen = trainer(total_episodes=64, **without_critic(name)), list[list[Any]]()
    sample = one.collector.sample
    one.collector.sample = lambda queries: seen.append(queries) or sample(queries)  # type: ignore[method-assign, func-returns-value]
    list(one.updates())
    assert [len(queries) for queries in seen] == [16] * 4
    for queries in seen:
        assert queries == queries[:4] * 4
    prompts = [query for queries in seen for query in queries[:4]]
    assert sorted(prompts) == sorted(QUERIES), "each prompt once"


@pytest.mark.parametrize("name", NAMES)
def test_the_ratio_is_1_before_the_first_step(name: str) -> None:
    one = trainer(**without_critic(name) | ONE_STEP)
    ppo_batch, _ = one.estimator.estimate(own_rollout(one))
    metrics = one.optimiser.optimise(ppo_batch)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == 0
    weighted = (ppo_batch.advantages.sum() / ppo_batch.rollout.mask.sum()).item()
    assert metrics["loss/policy_avg"] == pytest.approx(-weighted, abs=1e-5), "−mean of A over tokens"


def test_the_step_is_that_of_the_clipped_loss_of_the_policy_alone() -> None:
    """A critic whose loss has no weight leaves the same policy, given the same advantages."""
    with_critic = trainer(**ONE_STEP | {"advantages.critic.vf_coef": 0.0, "max_grad_norm": None})
    alone = trainer(**without_critic("rloo") | ONE_STEP | {"max_grad_norm": None})
    batch, _ = alone.estimator.estimate(own_rollout(alone))
    for one in (with_critic, alone):
        one.optimiser.optimise(batch)
    policies = [list(one.actor_critic.policy.parameters()) for one in (with_critic, alone)]
    for a, b in zip(*policies, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_critic_in_weights_state_or_metrics(name: str) -> None:
    one = trainer(total_episodes=32, **without_critic(name))
    history = list(one.updates())
    assert all(key not in metrics for metrics in history for key in OF_THE_CRITIC)
    assert all("val/group_deviation" in metrics for metrics in history)
    state = one.state_dict()["training"]
    assert all(key.startswith("policy.") for key in state["model"])
    groups_of_policy = [p for group in state["optimizer"]["param_groups"] for p in group["params"]]
    assert len(groups_of_policy) == len(list(one.actor_critic.policy.parameters()))

    def size(part: Any) -> int:
        if isinstance(part, torch.Tensor):
            return part.numel()
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return sum(map(size, parts))

    usual = trainer(total_episodes=32)
    list(usual.updates())
    assert size(state) < 0.55 * size(usual.state_dict()["training"]), "half of what a snapshot holds"


EVERYTHING: dict[str, Any] = {
    "total_episodes": 80, "adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "kl_penalty": {"beta": 0.5, "target": 0.001}, "reference_sync": {"every": 2, "alpha": 0.5},
    "score_scaling": {"subtract_mean": True, "clip": 2.0}, "ptx": {"coef": 0.1, "text": None},
    "schedule": "linear", "entropy_coef": 0.01, "dual_clip": 3.0, "target_kl": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_trainer_ends_with_the_same_bytes(name: str, stop_after: int) -> None:
    changes = without_critic(name) | EVERYTHING

    def fresh() -> Trainer:
        return trainer(demonstrations=DEMONSTRATIONS, **changes)

    whole, first, second = fresh(), fresh(), fresh()
    series = list(whole.updates())
    updates = first.updates()
    head = [next(updates) for _ in range(stop_after)]
    state = copy.deepcopy(first.state_dict()), first.collector.generator.get_state()
    second.load_state_dict(state[0])
    second.collector.generator.set_state(state[1])
    tail = list(second.updates())
    assert torch.equal(parameters(second), parameters(whole))
    assert untimed(series) == untimed([*head, *tail])


def test_a_critic_can_learn_from_several_samples_of_a_prompt() -> None:
    one = trainer(total_episodes=32, advantages__samples_per_prompt=4)
    history = list(one.updates())
    assert all("loss/value_avg" in metrics and "val/group_deviation" not in metrics for metrics in history)

"""What the optional parts of PPO do to one update, each against what it is to do by definition."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.config.training import Lora
from rlhf_tasks.data.batches import Batch, Ids, collate
from rlhf_tasks.modeling import models
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.lesson import Lesson
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel
from rlhf_tasks.ppo.rollout import ActorCritic, Episodes, ValueHead
from rlhf_tasks.ppo.trainer import Metrics, Trainer
from rlhf_tasks.training.supervised import LanguageModelling
from tests import small
from tests.ppo.test_trainer import QUERIES, episodes_by_hand, parameters, trainer
from tests.small import EOS, PAD

ONE_STEP: dict[str, Any] = {"num_mini_batches": 1, "num_ppo_epochs": 1}
DEMONSTRATIONS = LanguageModelling(*small.rows(24, seed=5), pad=PAD)


def shared() -> ActorCritic:
    return ActorCritic(small.causal(), ValueHead(small.HIDDEN))


def with_lora(value: str = "separate") -> tuple[ActorCritic, AdapterOff]:
    policy = models.with_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    critic = small.scores(seed=3) if value == "separate" else ValueHead(small.HIDDEN)
    return ActorCritic(policy, critic), AdapterOff(policy)


def a_lesson(one: Trainer) -> Lesson:
    return one.teach(one.collect(QUERIES)[0])[0]


def flat(lesson: Lesson) -> Lesson:
    """Nothing to gain by any token, and the critic right: what is left are the other losses."""
    zero = torch.zeros_like(lesson.advantages)
    return Lesson(lesson.episodes, zero, lesson.episodes.values, lesson.kl_coef)


def policy_kl(one: Trainer, lesson: Lesson) -> float:
    """Mean k3 of the response tokens to the reference, after what was learned."""
    with torch.no_grad():
        batch = collate(QUERIES, lesson.episodes.responses, PAD)
        new = one.reference.logprobs(batch, 0.8)
        logits = models.response_logits(one.actor_critic.policy, batch) / 0.8
        ahead = new - logits.log_softmax(-1).gather(2, batch.responses[..., None]).squeeze(2)
        return float((ahead.exp() - 1 - ahead)[batch.response_mask].mean())


# ------------------------------------------------------------------------------------------ KL


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_pulls_the_policy_to_the_reference(estimator: str) -> None:
    one = trainer(reference_seed=7, kl_in="loss", kl_estimator=estimator, kl_coef=1.0, num_ppo_epochs=8)
    lesson = a_lesson(one)
    before = policy_kl(one, lesson)
    metrics = one.optimise(flat(lesson))
    assert policy_kl(one, lesson) < 0.9 * before
    assert metrics["loss/kl_avg"] > 0


def test_kl_in_the_loss_is_not_in_the_reward_too() -> None:
    _, metrics = trainer(kl_in="loss", kl_estimator="k3", kl_coef=0.1).teach(episodes_by_hand())
    assert metrics["objective/non_score_reward"] == 0
    assert metrics["objective/rlhf_reward"] == metrics["objective/scores"]


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 1.5), ("k2", 0.5 * (1 + 0.25 + 1 + 0.25 + 1) / 2)])
def test_objective_kl_is_by_the_chosen_estimator(estimator: str, kl: float) -> None:
    _, metrics = trainer(kl_estimator=estimator).teach(episodes_by_hand())
    assert metrics["objective/kl"] == pytest.approx(kl)
    assert metrics["objective/kl_k1"] == pytest.approx(1.5), "what guards and adaptive_kl go by"


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_adaptive_coefficient_follows_k1_from_the_next_rollout_on(estimator: str) -> None:
    one = trainer(
        reference_seed=7, kl_coef=0.1, kl_estimator=estimator, total_episodes=32, **ONE_STEP,
        adaptive_kl={"target": 0.5, "horizon": 1600, "clip": 50.0},
    )  # fmt: skip
    first, second = one.updates()
    error = first["objective/kl_k1"] / 0.5 - 1
    assert abs(error) < 50, "the law is of what is not cut"
    assert first["objective/kl_coef"] == 0.1
    assert second["objective/kl_coef"] == pytest.approx(0.1 * (1 + error * 16 / 1600))
    assert first["objective/non_score_reward"] == pytest.approx(-0.1 * first["objective/kl"])
    alike = first["objective/kl"] == pytest.approx(first["objective/kl_k1"], rel=0.01)
    assert alike == (estimator == "k1")


def test_the_ppo_penalty_keeps_the_policy_near_the_one_that_sampled() -> None:
    def moved(**changes: Any) -> float:
        one = trainer(num_ppo_epochs=8, learning_rate=5e-3, **changes)
        return one.optimise(a_lesson(one))["policy/approxkl_avg"]

    assert moved(kl_penalty={"beta": 20.0, "target": 0.01}) < 0.7 * moved()


def test_beta_follows_the_kl_of_the_policy_after_its_epochs() -> None:
    one = trainer(
        learning_rate=5e-3, kl_penalty={"beta": 1.0, "target": 1e-4}, **ONE_STEP | {"num_mini_batches": 2}
    )
    lesson = a_lesson(one)
    metrics = one.optimise(lesson)
    total, tokens = 0.0, 0
    for row, (query, response) in enumerate(zip(QUERIES, lesson.episodes.responses, strict=True)):
        new = (small.logits_alone(one.actor_critic.policy, query, response) / 0.8).log_softmax(-1)
        ahead = new[range(len(response)), response] - lesson.episodes.logprobs[row, : len(response)]
        total += float((ahead.exp() - 1 - ahead).sum())
        tokens += len(response)
    assert metrics["policy/penalty_kl_avg"] == pytest.approx(total / tokens, rel=1e-4)
    assert total / tokens > 1.5e-4
    assert (metrics["policy/penalty_beta"], one.optimise.penalty.beta) == (1.0, 2.0)


def test_the_penalty_waits_for_the_critics_warm_up() -> None:
    one = trainer(kl_penalty={"beta": 1.0, "target": 0.01}, critic_warmup={"max_updates": 3, "settled": 0.01})
    one.optimise(a_lesson(one), critic_only=True)
    assert one.optimise.penalty.beta == 1


def test_epochs_end_once_the_policy_has_moved_far_enough() -> None:
    def epochs(target_kl: float | None) -> float:
        one = trainer(num_ppo_epochs=6, learning_rate=1e-3, target_kl=target_kl)
        return one.optimise(a_lesson(one))["train/num_epochs"]

    assert epochs(None) == 6
    assert epochs(1e-9) == 1
    assert 1 < epochs(1e-2) < 6


def test_the_reference_follows_as_often_and_as_far_as_asked() -> None:
    one = trainer(reference_sync={"every": 2, "alpha": 0.25}, total_episodes=48, learning_rate=1e-2)
    start = {k: v.clone() for k, v in small.causal().state_dict().items()}
    updates = one.updates()
    next(updates)
    assert all(torch.equal(value, start[key]) for key, value in one.reference.state_dict().items())
    next(updates)
    found, policy = one.reference.state_dict(), one.actor_critic.policy.state_dict()
    for key, value in found.items():
        torch.testing.assert_close(value, 0.75 * start[key] + 0.25 * policy[key])


def test_importance_sampling_from_the_reference_has_its_log_probs_in_the_ratio() -> None:
    one = trainer(reference_seed=7, ratio_from="reference", **ONE_STEP)
    lesson = a_lesson(one)
    episodes, mask = lesson.episodes, lesson.episodes.mask
    ratio = (episodes.logprobs - episodes.ref_logprobs)[mask].exp()
    free, cut = -lesson.advantages[mask] * ratio, -lesson.advantages[mask] * ratio.clamp(0.8, 1.2)
    metrics = one.optimise(lesson)
    assert metrics["loss/policy_avg"] == pytest.approx(torch.maximum(free, cut).mean().item(), rel=1e-4)
    assert metrics["policy/clipfrac_avg"] == pytest.approx((cut > free).float().mean().item(), abs=1e-4)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)  # the sampler has not moved yet


# -------------------------------------------------------------------------------------- the losses


def test_the_entropy_bonus_flattens_the_policy() -> None:
    def entropy_after(coef: float) -> float:
        one = trainer(entropy_coef=coef, num_ppo_epochs=4, learning_rate=5e-3)
        lesson = flat(a_lesson(one))
        one.optimise(lesson)
        return one.optimise(lesson)["policy/entropy_avg"]

    assert entropy_after(1.0) > entropy_after(0.0) + 1e-3


def test_ptx_is_the_demonstrations_language_modelling_loss() -> None:
    """With nothing else to learn, one step is that of the LM loss on the same rows, times the coefficient."""
    one = trainer(demonstrations=DEMONSTRATIONS, ptx={"coef": 0.3, "text": None}, **ONE_STEP)
    assert one.optimise._ptx is not None
    one.optimise._ptx.waiting = list(range(16))
    metrics = one.optimise(flat(a_lesson(one)))
    model = small.causal()
    losses = []
    for query, response in zip(DEMONSTRATIONS.queries[:16], DEMONSTRATIONS.responses[:16], strict=True):
        logits = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
        losses.append(-logits.log_softmax(-1)[range(len(response)), response])
    loss = torch.cat(losses).mean()
    (0.3 * loss).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert metrics["loss/ptx_avg"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(gradients.norm().item(), rel=1e-3)


def test_every_demonstration_is_seen_before_one_comes_again() -> None:
    one = trainer(demonstrations=DEMONSTRATIONS, ptx={"coef": 0.3, "text": None}, **ONE_STEP)
    queue = one.optimise._ptx
    assert queue is not None
    assert sorted(queue.take(16) + queue.take(8)) == list(range(24))


def test_the_critic_may_learn_at_a_rate_of_its_own() -> None:
    def moved(rate: float | None) -> tuple[float, float]:
        one = trainer(learning_rate=1e-3, value_learning_rate=rate, total_episodes=16, **ONE_STEP)
        before = copy.deepcopy(one.actor_critic)
        list(one.updates())
        far = [
            max(
                float((p - q).detach().abs().max())
                for p, q in zip(new.parameters(), old.parameters(), strict=True)
            )
            for new, old in ((one.actor_critic.policy, before.policy), (one.actor_critic.value, before.value))
        ]
        return far[0], far[1]

    alike, apart = moved(None), moved(1e-2)
    assert apart[0] == alike[0]
    assert apart[1] == pytest.approx(10 * alike[1], rel=0.05)  # Adam's first step is the rate


def test_the_warm_up_moves_the_critic_alone_and_ends_where_its_loss_settles() -> None:
    one = trainer(
        critic_warmup={"max_updates": 12, "settled": 0.3}, learning_rate=3e-3, num_ppo_epochs=4,
        truncation="none", total_episodes=16,
    )  # fmt: skip
    policy = copy.deepcopy(one.actor_critic.policy.state_dict())
    updates, found = one.updates(), []
    for metrics in updates:
        if "lr" in metrics:
            break
        found.append(metrics["warmup/value_loss"])
        after = one.actor_critic.policy.state_dict()
        assert all(torch.equal(after[key], policy[key]) for key in policy)
    assert found == one.warmup_losses
    assert 3 <= len(found) <= 12
    assert found[-1] < found[0]
    settled = [n for n in range(3, len(found) + 1) if min(found[n - 2 : n]) > 0.7 * min(found[: n - 2])]
    assert len(found) == next(iter(settled), 12)
    assert one.update == 1, "and then training begins"


def test_the_policy_s_first_steps_after_a_warm_up_are_adam_s_first_steps() -> None:
    """Gradients of zero, counted as steps, would leave its moments corrected as if they were old."""
    one = trainer(critic_warmup={"max_updates": 3, "settled": 0.01}, total_episodes=16)
    before = copy.deepcopy(one.actor_critic.policy)
    assert [("lr" in metrics) for metrics in one.updates()] == [False, False, False, True]
    steps = [float(one._optimizer.state[p]["step"]) for p in one.actor_critic.policy.parameters()]
    assert set(steps) == {4.0}, "2 epochs of 2 minibatches"
    critic = [float(one._optimizer.state[p]["step"]) for p in one.actor_critic.value.parameters()]
    assert set(critic) == {16.0}, "3 updates of warm-up before"
    moved = [
        float((p - q).detach().abs().max())
        for p, q in zip(one.actor_critic.policy.parameters(), before.parameters(), strict=True)
    ]
    assert 1e-3 < max(moved) <= 4 * 1e-3 * 1.3, "each of Adam's first steps is about the rate"


# -------------------------------------------------------------------------------- normalisation


def test_advantages_may_be_left_as_they_are_and_cut() -> None:
    plain, _ = trainer(whiten_advantages=False).teach(episodes_by_hand())
    white, _ = trainer().teach(episodes_by_hand())
    cut, _ = trainer(advantage_clip=0.5).teach(episodes_by_hand())
    torch.testing.assert_close(plain.advantages, plain.returns)  # values are zero there
    torch.testing.assert_close(cut.advantages, white.advantages.clamp(-0.5, 0.5))
    assert white.advantages.abs().max() > 0.5


def test_scores_are_scaled_before_the_rule_for_missing_eos() -> None:
    one = trainer(score_scaling={"subtract_mean": True, "clip": None}, missing_eos_score=-1.5)
    _, metrics = one.teach(episodes_by_hand())  # scores 2 and 6 → −1 and 1; the second did not end
    assert metrics["objective/scores"] == pytest.approx((-1 - 1.5) / 2)
    assert metrics["objective/raw_scores"] == pytest.approx(4)


# -------------------------------------------------------------------------------------- metrics


def test_perplexities_repetition_and_explained_variance_by_hand() -> None:
    one = trainer(truncation="none", kl_coef=0.0, lam=1.0)
    episodes = episodes_by_hand()
    _, metrics = one.teach(episodes)
    assert metrics["objective/perplexity"] == pytest.approx(math.exp(8 / 5))
    assert metrics["objective/ref_perplexity"] == pytest.approx(math.exp((2 + 2.5 + 1.5 + 1 + 4) / 5))
    assert metrics["val/truncated_share"] == 0.5
    assert metrics["val/explained_variance"] == pytest.approx(0)  # values that are all zero explain nothing
    assert metrics["val/distinct_1"] == metrics["val/distinct_2"] == 1
    assert metrics["val/repetition"] == 0


def test_a_critic_that_is_right_explains_all() -> None:
    one = trainer(truncation="none", kl_coef=0.0, lam=1.0)
    values = torch.tensor([[2.0, 2.0, 0, 0], [6.0, 6.0, 6.0, 0]])
    _, metrics = one.teach(replace(episodes_by_hand(), values=values))
    assert metrics["val/explained_variance"] == pytest.approx(1)


def test_an_answer_that_repeats_itself_is_seen() -> None:
    responses = [[7, 7, 7, 7], [8, 9, 10, 11]]
    mask = torch.ones(2, 4, dtype=torch.bool)
    _, metrics = trainer().teach(replace(episodes_by_hand(), responses=responses, mask=mask))
    assert metrics["val/distinct_1"] == pytest.approx((1 / 4 + 1) / 2)
    assert metrics["val/distinct_2"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["val/repetition"] == pytest.approx(1 - (1 / 2 + 1) / 2)


# ----------------------------------------------------------------------------------------- models


def test_a_shared_trunk_has_one_pass_and_values_of_zero_at_first() -> None:
    one = trainer(actor_critic=shared(), value_model="shared", critic_init="sft", **ONE_STEP)
    episodes, _ = one.collect(QUERIES)
    assert (episodes.values == 0).all()
    assert (episodes.last_values == 0).all()
    lesson, _ = one.teach(episodes)
    metrics = one.optimise(lesson)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert one.collect(QUERIES)[0].values.abs().max() > 0


def test_an_adapter_switched_off_is_the_reference() -> None:
    actor_critic, reference = with_lora()
    one = trainer(
        actor_critic=actor_critic, reference=reference, lora={"r": 16, "alpha": 64.0, "value": False},
        learning_rate=1e-2, total_episodes=32,
    )  # fmt: skip
    first, second = one.updates()
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert second["objective/kl"] > 1e-3
    batch = collate(QUERIES[:4], [[3, EOS]] * 4, PAD)
    torch.testing.assert_close(reference.logprobs(batch, 0.8), OwnModel(small.causal()).logprobs(batch, 0.8))


def test_the_last_value_is_that_of_the_state_after_the_last_token() -> None:
    one = trainer()
    episodes, _ = one.collect(QUERIES)
    value = small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, episodes.responses, strict=True)):
        with torch.no_grad():
            alone = value(collate([query], [response], PAD))[0, -1]
        assert episodes.last_values[row].item() == pytest.approx(alone.item(), abs=1e-5)


def test_a_stop_token_of_ones_own_ends_answers() -> None:
    one = trainer(stop_token=7, truncation="eos_trick_replace")
    episodes, _ = one.collect(QUERIES)
    for response, ended in zip(episodes.responses, episodes.ended.tolist(), strict=True):
        assert ended == (response[-1] == 7)
        assert 7 not in response[:-1]
    assert episodes.ended.any()


# ------------------------------------------------------------------------------ faults, and going on


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_learned_from_numbers_that_are_none(bad: float) -> None:
    def score(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        return torch.tensor([bad] + [0.0] * (len(queries) - 1))

    with pytest.raises(NonFiniteError, match="scores"):
        trainer(score).collect(QUERIES)


def test_a_loss_that_is_no_number_takes_no_step() -> None:
    one = trainer(**ONE_STEP)
    lesson = a_lesson(one)
    lesson.advantages[0, 0] = math.nan
    before = parameters(one)
    with pytest.raises(NonFiniteError) as caught:
        one.optimise(lesson)
    assert torch.equal(parameters(one), before)
    assert len(caught.value.batch["responses"]) == 16
    assert caught.value.batch["advantages"].isnan().sum() == 1
    assert torch.equal(caught.value.batch["returns"], lesson.returns)
    assert sorted(caught.value.batch["rows"]) == list(range(16))


def test_answers_that_the_reference_holds_for_impossible_are_no_numbers_to_learn_from() -> None:
    """A low temperature makes −1,000 nats of an odd token; exp(1000) is more than a float holds."""

    class Shocked(OwnModel):
        def logprobs(self, batch: Batch, temperature: float) -> Tensor:
            return super().logprobs(batch, temperature) - 1000

    one = trainer(reference=Shocked(small.causal()))
    before = parameters(one)
    with pytest.raises(NonFiniteError, match=r"^objective/ref_perplexity = inf$") as caught:
        next(one.updates())
    assert torch.equal(parameters(one), before)
    assert caught.value.batch["ref_logprobs"].max() == 0, "padding"
    assert caught.value.batch["ref_logprobs"].min() < -1000


def test_a_ratio_whose_square_is_no_number_is_no_metric_to_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss takes its ratio from the reference that one is small, and the step finite."""
    one = trainer(ratio_from="reference")
    look = one.collect

    def odd(queries: list[Ids]) -> tuple[Episodes, Metrics]:
        episodes, times = look(queries)
        return replace(episodes, logprobs=episodes.logprobs - 60), times

    monkeypatch.setattr(one, "collect", odd)
    with pytest.raises(NonFiniteError, match=r"^val/ratio_var = inf$"):
        next(one.updates())


ALL_ON: dict[str, Any] = {
    "total_episodes": 80, "adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "kl_penalty": {"beta": 0.5, "target": 0.001}, "reference_sync": {"every": 2, "alpha": 0.5},
    "score_scaling": {"subtract_mean": True, "clip": 2.0},
    "critic_warmup": {"max_updates": 2, "settled": 0.9}, "ptx": {"coef": 0.1, "text": None},
    "schedule": "linear",
    "truncation": "bootstrap", "value_learning_rate": 2e-3, "entropy_coef": 0.01, "dual_clip": 3.0,
    "cliprange_high": 0.3, "target_kl": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_trainer_goes_on_from_its_state_to_the_same_bytes(stop_after: int) -> None:
    whole = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    series = list(whole.updates())
    first = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    updates = first.updates()
    head = [next(updates) for _ in range(stop_after)]
    state = copy.deepcopy(first.state_dict()), first.collect.generator.get_state()
    second = trainer(demonstrations=DEMONSTRATIONS, **ALL_ON)
    second.load_state_dict(state[0])
    second.collect.generator.set_state(state[1])
    tail = list(second.updates())
    assert torch.equal(parameters(second), parameters(whole))
    timed = ("time/", "eps")
    for a, b in zip(series, [*head, *tail], strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }

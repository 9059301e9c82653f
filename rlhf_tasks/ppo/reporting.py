"""What people see of the training: curves, evaluations and samples when they are due, rollouts to be read.

B responses of a rollout · R response length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_tasks import console
from rlhf_tasks.config.ppo import CriticWarmup
from rlhf_tasks.console import Meter
from rlhf_tasks.ppo.advantages import equal_groups
from rlhf_tasks.ppo.guards import GuardTrip
from rlhf_tasks.ppo.metrics import Metrics, standardized_gaps
from rlhf_tasks.ppo.rollout import Prompts, Rollout
from rlhf_tasks.ppo.state import PpoState, Setup
from rlhf_tasks.training.throughput import pass_flops, speed

NUM_ROLLOUTS = 32  # of an update, that are kept to be read
WARN_ENDED_SHARE = 0.1  # of responses before training: below it the truncation rule gives most scores
UNFINISHED = {
    "eos_trick_replace": "missing_eos_score replaces its score",
    "eos_trick_subtract": "missing_eos_score is added to its score",
    "bootstrap": "the critic's value of its last state replaces its score",
    "bootstrap_add": "the critic's value of its last state is added to its score",
    "none": "it keeps its score",
}
"""By `ppo.truncation`, what becomes of the score of a response without an end."""
SHOWN = {"score": "objective/scores", "kl": "objective/kl", "clipfrac": "policy/clipfrac_avg"}
"""Metrics beside the progress bar; a loss of the user's may have no clip."""


def report_start(setup: Setup, state: PpoState) -> None:
    """Evaluate the policy before training."""
    state.metrics = evaluate_when_due(setup, state)
    ended = state.metrics.get("eval/ended")
    if ended is not None and ended < WARN_ENDED_SHARE:
        console.say(
            f"Warning: {ended:.1%} of the SFT model's responses end within ppo.response_length="
            f"{setup.config.response_length} tokens. Raise it, train stage sft longer, or name the token "
            "that ends them in ppo.stop_token."
        )
    if state.guards is not None:
        state.guards.begin(ended or 0.0)
    state.was_evaluated = True


def report_warmup(setup: Setup, state: PpoState, warmup: CriticWarmup, rollout_metrics: Metrics) -> Metrics:
    """The metrics of an update of the critic alone, which have an axis of their own."""
    loss, number = state.warmup_losses[-1], len(state.warmup_losses)
    explained = rollout_metrics["val/explained_variance"]
    metrics = {"warmup/value_loss": loss, "warmup/explained_variance": explained}
    setup.tracker.metrics(metrics, step=number * setup.config.rollout_batch_size)
    console.say(
        f"ppo: the critic warms up, update {number} of at most {warmup.max_updates}: value loss {loss:.4g}"
    )
    return metrics


def measure_work(
    setup: Setup, state: PpoState, rollout: Rollout, num_epochs: float, seconds: float
) -> Metrics:
    """`throughput.speed` of an update, and `compute/tflop` of all so far.

    They are sampling, the passes of policy, reference, critic and reward models, and the epochs; of
    `num_epochs` a part stands for tokens that the losses do not read. A reward model counts like the policy.
    """
    policy, critic = state.actor_critic.policy, state.actor_critic.critic
    passes = state.sampler.is_policy + (not state.sampler.is_policy or not setup.dist.is_float32)
    alike = passes + 1 + sum(one.kind == "reward_model" for one in setup.config.scorers)  # 1: the reference
    of_token = pass_flops(*[policy] * alike, critic)
    of_token += num_epochs * pass_flops(state.actor_critic, gradients=True)
    num_tokens = sum(len(ids) for ids in [*rollout.queries, *rollout.responses])
    of_server = 0.0 if state.sampler.is_policy else pass_flops(policy)  # on GPUs of its own, but it costs
    cost = state.metrics.get("compute/tflop", 0.0) + 1e-12 * (of_token + of_server) * num_tokens
    return speed(setup.dist, num_tokens, of_token * num_tokens, seconds) | {"compute/tflop": cost}


def report_update(
    setup: Setup,
    state: PpoState,
    rollout: Rollout,
    prompts: Prompts,
    kl: Tensor,
    metrics: Metrics,
    bar: Meter,
) -> list[GuardTrip]:
    """Record an update and evaluate it when that is due; returns the guards that trip.

    `rollout` has its advantages; its `prompts` and its `kl` (B, R) belong to it. Rollouts are kept beside
    samples, and where a guard trips for the first time.
    """
    config, tracker = setup.config, setup.tracker
    state.metrics = metrics
    tracker.metrics(metrics, step=int(metrics["episode"]))
    state.metrics = metrics | evaluate_when_due(setup, state)
    shown = {key: metrics[name] for key, name in SHOWN.items() if name in metrics}
    bar.advance(config.rollout_batch_size, **shown)
    trips = [] if state.guards is None else state.guards.check(state.metrics)
    known = {trip["guard"] for trip in state.trips}
    # the first rollout is that of the policy at the start
    kept_at = {max(1, update) for update in sample_updates(config.num_sample_generations, setup.num_updates)}
    if state.update in kept_at or any(trip.name not in known for trip in trips):
        rows = rollout_rows(setup, state, rollout, prompts, kl)
        state.rollouts += rows
        tracker.table("rollouts", rows)
    return trips


def evaluate_when_due(setup: Setup, state: PpoState) -> Metrics:
    """An evaluation that may choose the weights, and samples that are shown and kept, after some updates."""
    config, update, evaluator = setup.config, state.update, setup.evaluator
    episode, metrics = int(state.metrics.get("episode", 0)), Metrics()
    if update in {0, *selection_updates(config.num_selections, setup.num_updates)}:
        metrics = evaluator.evaluate(
            state.evaluation, state.sampler, state.evaluation_budget, episode=episode, update=update
        )
        setup.tracker.metrics(metrics, step=episode)
    if update in sample_updates(config.num_sample_generations, setup.num_updates):
        # on all ranks: NaN must stop all of them
        rows = evaluator.show(state.evaluation, state.sampler, episode=episode, update=update)
        if setup.dist.is_main:
            setup.tracker.table("samples", rows)
            console.table(
                f"samples at episode {episode}",
                ["query", "response", "score"],
                [(row["prompt"], row["response"], f"{row['score']:.2f}") for row in rows],
            )
    return metrics


def selection_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced; the last update is one of them."""
    return {max(1, round((i + 1) * num_updates / count)) for i in range(count)}


def sample_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced from 0, before training, to the last."""
    return {num_updates} if count == 1 else {round(i * num_updates / (count - 1)) for i in range(count)}


@torch.no_grad()
def rollout_rows(
    setup: Setup, state: PpoState, rollout: Rollout, prompts: Prompts, kl: Tensor
) -> list[dict[str, Any]]:
    """Rows of rollouts.parquet: all responses to the first prompts, at most NUM_ROLLOUTS, by prompt.

    Scores are under the EOS rule, or neither under it nor scaled; those of each scorer are as it gave them.

    Raises:
        NonFiniteError: on all ranks, if a held-out score is NaN or infinite.
    """
    config, evaluator, num_samples = setup.config, setup.evaluator, setup.config.samples_per_prompt
    num_prompts, mask = len(prompts) // num_samples, rollout.mask
    rows = [i + num_prompts * j for i in range(num_prompts) for j in range(num_samples)][:NUM_ROLLOUTS]
    asked, ids = prompts.take(rows), [rollout.responses[i] for i in rows]
    scores = evaluator.under_eos_rule(rollout.scores[rows], ids)
    heldout = evaluator.heldout_scores(asked, ids)
    gaps = None if heldout is None else standardized_gaps(scores, heldout, *state.evaluation.start)
    numbers = {
        "score": scores,
        **{f"scorer/{name}": part[rows] for name, part in rollout.parts.items()},
        **({} if heldout is None else {"heldout": heldout}),
        **({} if gaps is None else {"gap": gaps}),
        "kl": torch.where(mask, kl, 0).sum(1)[rows],
        "advantage": ((rollout.advantages * mask).sum(1) / mask.sum(1))[rows],
    }
    cap = config.sampler.importance_cap if config.sampler.kind == "vllm" else None
    equal = torch.zeros(len(prompts), dtype=torch.bool)
    if config.advantages.kind in ("rloo", "group"):  # the returns of a response's tokens are all its own
        equal = equal_groups(rollout.returns[:, 0].double(), num_samples)
    table = []
    for at, (i, response) in enumerate(zip(rows, evaluator.texts(asked.queries, ids), strict=True)):
        notes, length = list[str](), len(ids[at])
        if not rollout.ended[i]:
            unread = "; no loss reads it" if config.skip_truncated else ""
            rule = ("in training " if config.score_scaling else "") + UNFINISHED[config.truncation.kind]
            notes.append(f"no end within {length} tokens: {rule}{unread}")
        if cap is not None and (capped := int((rollout.importance[i] >= cap).sum())):
            notes.append(f"{capped} of {length} tokens have the largest importance weight, {cap:g}")
        if equal[i]:
            notes.append("all responses to the prompt have the same return, so that none has an advantage")
        table.append(
            {"episode": state.update * config.rollout_batch_size, "update": state.update}
            | {"rollouts": len(prompts), "prompt": asked.texts[at], "response": response, "length": length}
            | {"notes": "; ".join(notes)}
            | {name: float(values[at]) for name, values in numbers.items()}
        )
    return table

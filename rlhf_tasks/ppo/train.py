"""PPO, from the first prompt to the last snapshot, in `train`; its passes with gradients are made in
`accumulate_gradients`.

The arithmetic is in `rewards`, `advantages`, `losses` and `kl`, all pure functions. State changes only here,
in `state` and in `evaluate`.

Forward passes of each row in an update of the shipped params.yaml, in float32, beside sampling: 7.

    sampling   the policy, a token at a time with a cache
    scoring    3: reference, critic and reward model. The policy makes one more in bf16, with a shared critic,
               and where vLLM sampled: elsewhere the sampler's own log-probs are exact
    training   4: policy and critic, forward and backward, in each of 2 epochs; 4 optimizer steps an epoch
    also       with k samples a prompt is read once for all of them in each pass (`Rollout.groups`);
               with `kl_penalty` one of the policy after the epochs; with `ptx` one of its rows in each step;
               evaluations. The backward pass makes the logits again, and with `gradient_checkpointing` all
               layers

B responses of a rollout, of all ranks · k responses to each prompt · R longest response
b rows of a micro-batch · r its longest response. A tensor's row starts with the first token of a response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import CriticWarmup
from rlhf_tasks.data.columns import Columns, take
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.load import TokenScores, num_bytes
from rlhf_tasks.models.logprobs import TokenStats, response_logprobs
from rlhf_tasks.models.stop_tokens import StopTokens
from rlhf_tasks.models.tensors import NonFiniteError, whiten
from rlhf_tasks.ppo.advantages import Estimator, group_deviations, response_returns
from rlhf_tasks.ppo.evaluate import Evaluator
from rlhf_tasks.ppo.guards import GuardTrip, warn_of_endless
from rlhf_tasks.ppo.kl import ESTIMATORS as KL_ESTIMATORS
from rlhf_tasks.ppo.kl import adapt_kl_coef, adapt_penalty, k3
from rlhf_tasks.ppo.losses import MicroBatch, PolicyLoss, merge_metrics, token_weights, value_loss
from rlhf_tasks.ppo.metrics import (
    Metrics,
    TokenSums,
    explained_variance,
    objective_metrics,
    ratio_metrics,
    ratio_sums,
    response_metrics,
)
from rlhf_tasks.ppo.rewards import token_rewards, truncated_scores
from rlhf_tasks.ppo.rollout import (
    NoCritic,
    Rollout,
    Scorers,
    score_rollout,
)
from rlhf_tasks.ppo.state import TrainState, handle_trips, stop_at_non_finite
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.checkpoint import Checkpoint
from rlhf_tasks.training.distributed import Distributed, MicroRows
from rlhf_tasks.training.optim import learning_rate, reset_moments, set_learning_rate
from rlhf_tasks.training.supervised import LanguageModeling, budget_metrics

SHOWN = {"score": "objective/scores", "kl": "objective/kl", "clipfrac": "policy/clipfrac_avg"}
"""Metrics beside the progress bar; a loss of one's own may have no clip."""


def train(
    dist: Distributed,
    config: Ppo,
    state: TrainState,
    *,
    queries: Sequence[Ids],
    prompts: Sequence[str],
    columns: Columns,
    scorers: Scorers,
    loss: PolicyLoss,
    estimator: Estimator,
    evaluator: Evaluator,
    ptx: LanguageModeling | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: StopTokens,
    tracker: Tracker,
    snapshots: Checkpoint,
    faults: Path,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Metrics]:
    """Train to the end; each update's metrics are yielded when all of it is done, snapshot included.

    It is a generator: nothing happens until somebody iterates. `queries` are the ids of the `prompts`, whose
    rows have the `columns`; `ptx` is PPO-ptx's text, or None without it. After NaN or infinity the batch that
    it came from is saved below `faults`.

    Raises:
        GuardTripped: a guard stopped the training.
    """
    num_updates, batch_size = config.total_episodes // config.rollout_batch_size, config.rollout_batch_size
    num_prompts, num_samples = batch_size // config.samples_per_prompt, config.samples_per_prompt  # n, k
    actor_critic = state.actor_critic
    has_critic = not isinstance(actor_critic.critic, NoCritic)
    warmup: CriticWarmup | None = getattr(config.critic, "warmup", None)
    kl_of_tokens = KL_ESTIMATORS[config.kl.estimator]
    selected_at = selection_updates(config.num_selections, num_updates)
    shown_at = sample_updates(config.num_sample_generations, num_updates)
    kept_at = {max(1, update) for update in shown_at}  # the first rollout is that of the policy at the start

    with (
        console.progress("ppo", config.total_episodes, unit="episodes") as bar,
        stop_at_non_finite(dist, config, state, tracker, faults),
    ):
        # A run that was stopped goes on after its last snapshot, to the same bytes.
        snapshots.reserve(num_bytes(actor_critic.policy), state.num_bytes)
        snapshot = snapshots.load()
        if snapshot is not None:
            state.load_state_dict(dist, snapshot)
            tracker.load_state_dict(snapshot["tracker"])
            bar.skip(state.update * batch_size)
            del snapshot

        while state.update < num_updates:
            # 0. Evaluate the SFT policy first: training must improve on it.
            if not state.was_evaluated:
                state.metrics = _evaluate(dist, state, evaluator, tracker, select=True, show=0 in shown_at)
                warn_of_endless(config, state.metrics.get("eval/ended", 1.0))
                if state.guards is not None:
                    state.guards.begin(state.metrics.get("eval/ended", 0.0))
                state.was_evaluated = True

            # 1. At first the critic may train alone, at a constant rate (arXiv 2307.04964, section
            # 5.3.4). Then the learning rate follows its schedule.
            start = clock()
            is_warmup = warmup is not None and not _is_warm(warmup, state.warmup_losses)
            rate = config.learning_rate
            if not is_warmup:
                rate = learning_rate(config, state.update, num_updates)
            if not is_warmup and state.update == 0 and state.warmup_losses:
                # data parallelism has given the policy gradients of zero: counted as steps they would
                # make its first real ones too small, or too large where the moments are slow
                reset_moments(state.optimizer, state.num_policy_groups)
                bar.restart_speed()  # a warm-up has taken time, and none of the episodes
            set_learning_rate(state.optimizer, rate)

            # 2. Responses: k to each of n prompts, in the order p_1 … p_n, again p_1 … p_n, and so on.
            rows = state.prompt_order.take(num_prompts)
            samples = state.sampler.sample([queries[i] for i in rows], state.update)
            rows = rows * num_samples
            generated = clock()

            # 3. Scores, log-probs of policy and reference, and the critic's values. They are computed in
            # the micro-batches of the first epoch, so that its ratios start at exactly 1 in bf16 too.
            minibatches = shuffle_minibatches(config, state.order_rng)
            rollout = score_rollout(
                dist,
                config,
                actor_critic,
                state.reference,
                scorers,
                [prompts[i] for i in rows],
                [queries[i] for i in rows],
                samples,
                take(columns, rows),
                minibatches,
                tokenizer=tokenizer,
                ends=ends,
                budget=state.budget,
                is_on_policy=state.sampler.is_policy,
            )
            rollout, sampler_metrics = state.sampler.correct(rollout)
            mask = rollout.mask  # (B, R)
            scored = clock()

            # 4. Scores become token rewards: scaled, under the rule for responses without an end, and
            # on the last token. The KL penalty from the reference is on every token: r_t = −kl_coef ·
            # kl_t (+ score). Two other KLs, of `kl_penalty` and `target_kl`, are from the rollout's
            # policy.
            scores = truncated_scores(
                state.score_scaler(rollout.scores),
                rollout.ended,
                config.truncation.kind,
                missing_eos_score=config.missing_eos_score,
            )  # (B,)
            kl = kl_of_tokens(rollout.logprobs, rollout.ref_logprobs)  # (B, R)
            reward_kl_coef = state.kl_coef if config.kl.kind == "in_reward" else 0.0
            rewards = token_rewards(scores, kl, mask, reward_kl_coef)  # (B, R)
            if config.whiten_rewards:
                rewards = whiten(rewards, mask, shift_mean=False)

            # 5. Advantages and returns, (B, R) each, whitened over the rollout of all ranks: the moments
            # are those of the whole batch, so that they do not depend on its cut into minibatches.
            advantages, returns = estimator(rewards, rollout, config)
            if config.whiten_advantages:
                advantages = whiten(advantages, mask)
            if config.advantage_clip is not None:
                advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
            rollout_metrics = objective_metrics(
                rollout,
                # γ·V of a response without an end: instead of its score (bootstrap) or beside it
                # (bootstrap_add)
                scores + config.gamma * rollout.bootstrap_values,
                kl,
                kl_coef=state.kl_coef,
                reward_kl_coef=reward_kl_coef,
            )
            rollout_metrics |= response_metrics(rollout)
            if has_critic:
                rollout_metrics["val/explained_variance"] = explained_variance(returns, rollout.values, mask)
            elif num_samples > 1:
                deviations = group_deviations(response_returns(rewards, mask), num_samples)
                rollout_metrics["val/group_deviation"] = float(deviations.mean())
            rollout = replace(rollout, advantages=advantages, returns=returns)
            require_finite(rollout_metrics, rollout)

            # 6. Epochs over the rollout, in shuffled minibatches; each is one step.
            steps, ptx_steps, grad_norms = list[TokenSums](), list[TokenSums](), list[float]()
            num_epochs = 0
            num_steps = config.num_ppo_epochs * config.num_mini_batches
            with console.part("epochs", num_steps, "steps") as meter:
                while num_epochs < config.num_ppo_epochs:
                    if num_epochs:
                        minibatches = shuffle_minibatches(config, state.order_rng)
                    for mini in minibatches:
                        ptx_rows = state.ptx.take(len(mini)) if state.ptx and not is_warmup else []

                        # 7. Gradients add up over micro-batches; after out-of-memory, over smaller ones.
                        sums, ptx_sums = accumulate_gradients(
                            dist, config, state, rollout, mini, loss, ptx, ptx_rows, is_warmup
                        )

                        # 8. The optimizer step, with the norm of the gradient clipped.
                        try:
                            norm = dist.step(state.wrapped, state.optimizer, config.max_grad_norm)
                        except NonFiniteError as error:
                            error.batch = vars(rollout) | {"rows": mini}
                            raise
                        meter.advance()
                        grad_norms.append(norm)
                        steps.append(sums)
                        ptx_steps += [ptx_sums] if ptx_rows else []
                    num_epochs += 1
                    # Early stopping: no more epochs once the policy is too far from the rollout's.
                    if config.target_kl is not None:
                        last_epoch = TokenSums.means(steps[-config.num_mini_batches :], dist.sum)
                        if last_epoch["policy/approxkl_avg"] > config.target_kl:
                            break

            # 9. What the epochs have measured, in means over the tokens of all minibatches.
            epoch_metrics = ratio_metrics(
                TokenSums.means(steps, dist.sum), first=TokenSums.means(steps[:1], dist.sum)
            )
            if ptx_steps:
                epoch_metrics |= TokenSums.means(ptx_steps, dist.sum)
            epoch_metrics |= {
                "train/grad_norm": sum(grad_norms) / len(grad_norms),
                "train/num_epochs": num_epochs,
            } | budget_metrics(state.budget)
            # The coefficient of KL(π_old ‖ π) follows what the epochs have moved: PPO's section 4.
            if config.kl_penalty is not None and not is_warmup:
                divergence = _divergence(dist, config, state, rollout)
                epoch_metrics |= {
                    "policy/penalty_beta": state.penalty_beta,
                    "policy/penalty_kl_avg": divergence,
                }
                state.penalty_beta = adapt_penalty(state.penalty_beta, divergence, config.kl_penalty.target)
            require_finite(epoch_metrics, rollout)
            trips: list[GuardTrip] = []
            if warmup is not None and is_warmup:  # which has an axis of its own
                state.warmup_losses.append(epoch_metrics["loss/value_avg"])
                metrics = {
                    "warmup/value_loss": epoch_metrics["loss/value_avg"],
                    "warmup/explained_variance": rollout_metrics["val/explained_variance"],
                }
                tracker.metrics(metrics, step=len(state.warmup_losses) * batch_size)
                console.say(
                    f"ppo: the critic warms up, update {len(state.warmup_losses)} of at most "
                    f"{warmup.max_updates}: value loss {state.warmup_losses[-1]:.4g}"
                )
            else:
                # 10. The update is done: kl_coef adapts, and the reference may follow the policy.
                state.update += 1
                state.kl_coef = adapt_kl_coef(
                    state.kl_coef, rollout_metrics["objective/kl_k1"], batch_size, config.adaptive_kl
                )
                sync = config.reference_sync
                if sync is not None and state.update % sync.every == 0:
                    assert state.moving_reference is not None
                    sharding.move_toward(state.moving_reference.model, actor_critic.policy, sync.alpha)

                # 11. Metrics, an evaluation and samples when they are due, and the guards. Rollouts are kept
                # beside samples, and where a guard trips for the first time.
                end = clock()
                metrics = merge_metrics(epoch_metrics, rollout_metrics) | sampler_metrics
                metrics |= {
                    "time/generate_seconds": generated - start,
                    "time/score_seconds": scored - generated,
                    "time/train_seconds": end - scored,
                    "time/tokens_per_second": metrics["val/response_length"] * batch_size / (end - start),
                    "eps": batch_size / (end - start),
                    "episode": float(state.update * batch_size),
                    "lr": rate,
                }
                state.metrics = metrics
                tracker.metrics(metrics, step=int(metrics["episode"]))
                state.metrics = metrics | _evaluate(
                    dist,
                    state,
                    evaluator,
                    tracker,
                    select=state.update in selected_at,
                    show=state.update in shown_at,
                )
                bar.advance(
                    batch_size, **{key: metrics[name] for key, name in SHOWN.items() if name in metrics}
                )
                if state.guards is not None:
                    trips = state.guards.check(state.metrics)
                known = {trip["guard"] for trip in state.trips}
                if state.update in kept_at or any(trip.name not in known for trip in trips):
                    kept = evaluator.rollout_rows(
                        state.evaluation,
                        rollout,
                        [prompts[i] for i in rows],
                        kl,
                        episode=int(metrics["episode"]),
                        update=state.update,
                    )
                    state.rollouts += kept
                    tracker.table("rollouts", kept)

            # 12. A trip of a guard warns, raises kl_coef or stops.
            handle_trips(config, state, trips, tracker)

            # 13. A snapshot, when one is due.
            if snapshots.due():
                snapshots.save(state.num_rollouts, state.state_dict(dist) | {"tracker": tracker.state_dict()})
            yield metrics


def shuffle_minibatches(config: Ppo, generator: torch.Generator) -> list[list[int]]:
    """The rows of each minibatch of an epoch, of all ranks.

    The k responses to a prompt stay together, where a minibatch is a multiple of k, and the models read it
    once.
    """
    batch_size, size = config.rollout_batch_size, config.rollout_batch_size // config.num_mini_batches
    num_prompts = batch_size // config.samples_per_prompt
    shuffled: list[int] = torch.randperm(num_prompts, generator=generator).tolist()
    order = [row for p in shuffled for row in range(p, batch_size, num_prompts)]
    return [order[first : first + size] for first in range(0, batch_size, size)]


def accumulate_gradients(
    dist: Distributed,
    config: Ppo,
    state: TrainState,
    rollout: Rollout,
    rows: Sequence[int],
    loss: PolicyLoss,
    ptx: LanguageModeling | None,
    ptx_rows: Sequence[int],
    is_warmup: bool,
) -> tuple[TokenSums, TokenSums]:
    """Add the gradients of one minibatch, micro-batch by micro-batch; returns the metrics' sums.

    `rows` are the minibatch's rows of the `rollout`, of all ranks; `ptx_rows` are those of PPO-ptx's text,
    whose sums are the second result.
    """
    # A token's weight is that in the loss of the whole minibatch, of all ranks: so the sum over micro-batches
    # is the same, however they are cut.
    weights = torch.zeros(rollout.mask.shape)  # (B, R)
    weights[list(rows)] = token_weights(rollout.mask[list(rows)], config.loss_reduction)
    own_rows, own_ptx_rows = dist.slice_rows(rows), dist.shard_rows(ptx_rows)
    for attempt in dist.attempts(state.budget, state.optimizer):
        with attempt:
            sums, ptx_sums = TokenSums(), TokenSums()  # what a failed attempt has added counts nowhere
            work: list[tuple[Rollout | LanguageModeling, MicroRows]]
            work = [(rollout, micro) for micro in rollout.split(dist, own_rows, state.budget)]
            if ptx is not None and ptx_rows:
                sizes = [ptx.sizes[i] for i in own_ptx_rows]
                parts = dist.split(sizes, [[i] for i in own_ptx_rows], state.budget)
                work += [(ptx, micro) for micro in parts]
            for source, micro in dist.passes(state.wrapped, work):
                # the loss has no name: it would keep a failed attempt's graph in memory beside the next one's
                dist.backward(
                    state.wrapped,
                    ppo_loss(dist, config, state, source, micro, weights, loss, is_warmup, sums)
                    if isinstance(source, Rollout)
                    else ptx_loss(dist, config, state, source, micro, source.num_targets(ptx_rows), ptx_sums),
                )
    return sums, ptx_sums


def ppo_loss(
    dist: Distributed,
    config: Ppo,
    state: TrainState,
    rollout: Rollout,
    micro: MicroRows,
    weights: Tensor,
    loss: PolicyLoss,
    is_warmup: bool,
    sums: TokenSums,
) -> Tensor:
    """The loss of a micro-batch of the rollout, whose metrics are added to `sums`; `weights` are (B, R).

    A critic with a pass of its own has the only loss that is returned: the policy's gradient is added here.
    """
    batch, has_own_pass = rollout.batch(micro.groups).to(dist.device), critic_has_own_pass(dist, state)
    # The forward pass: log-probs and entropies of the response tokens, and values of their states.
    with dist.autocast():
        stats, values = state.wrapped(
            batch, config.temperature, entropy_grad=config.entropy_coef > 0, with_values=not has_own_pass
        )  # (b, r) each, and (b, r + 1) or None
    # The policy's loss: the clipped surrogate, or a function of the user's, with its penalties.
    old = rollout.select(micro.rows, batch.num_response_columns, dist.device)  # what the rollout recorded
    weight = micro.scale * weights[micro.rows, : batch.num_response_columns].to(dist.device)  # (b, r)
    losses, metrics = policy_losses(stats, old, config, loss, state)  # (b, r)
    if is_warmup:  # 0 and not left out: under data parallelism every weight needs a gradient
        losses = 0 * losses
    total = (weight * losses).sum()
    # A critic apart: the policy's graph is freed before the critic's is made.
    if has_own_pass:
        if not is_warmup:
            dist.backward(state.wrapped, total)
        with dist.autocast():
            values = state.actor_critic.values(batch)
        total = torch.zeros((), device=dist.device)
    if config.critic is not None:
        value, is_clipped = value_loss(
            values[:, :-1], old.values, old.returns, config.critic.cliprange_value
        )  # (b, r)
        metrics |= {"loss/value_avg": value, "val/clipfrac_avg": is_clipped}
        total = total + config.critic.vf_coef * (weight * value.where(old.mask, 0)).sum()
    sums.add(metrics, old.mask, micro.scale)
    sums.count_padding(batch.is_real, micro.scale)
    return total


def ptx_loss(
    dist: Distributed,
    config: Ppo,
    state: TrainState,
    ptx: LanguageModeling,
    micro: MicroRows,
    num_tokens: float,
    sums: TokenSums,
) -> Tensor:
    """PPO-ptx: the mean −log p of other text (Ouyang et al. 2022, eq. 2), over the minibatch's tokens."""
    assert config.ptx is not None
    batch, has_own_pass = ptx.batch(micro.rows).to(dist.device), critic_has_own_pass(dist, state)
    with dist.autocast():  # at temperature 1: this text was not sampled
        stats, values = state.wrapped(
            batch, 1.0, entropy_grad=config.entropy_coef > 0, with_values=not has_own_pass
        )  # (b, r) each, and (b, r + 1) or None
    sums.add({"loss/ptx_avg": -stats.logprobs}, batch.mask, micro.scale)
    total: Tensor = -config.ptx.coef * micro.scale * stats.logprobs.sum() / num_tokens
    if values is not None:
        total = total + 0 * values.sum()  # under data parallelism every weight needs a gradient
    return total


def critic_has_own_pass(dist: Distributed, state: TrainState) -> bool:
    """Whether the critic has a pass of its own, once the policy's activations are freed.

    It has where nothing wraps the two models. DDP, ZeRO and FSDP2 want one pass of all weights.
    """
    is_wrapped = state.wrapped is not state.actor_critic or dist.shards
    return isinstance(state.actor_critic.critic, TokenScores) and not is_wrapped


def policy_losses(
    stats: TokenStats, old: MicroBatch, config: Ppo, loss: PolicyLoss, state: TrainState
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss of each token and its metrics, (b, r) each; the loss is zero on padding."""
    logprobs, entropy = stats.logprobs, stats.entropy
    losses, metrics = loss(logprobs, old, config)
    losses = losses * old.importance
    metrics = merge_metrics(metrics, ratio_sums(logprobs, old.logprobs))
    metrics = merge_metrics(metrics, {"loss/policy_avg": losses, "policy/entropy_avg": entropy})
    if config.kl.kind == "in_loss":
        metrics["loss/kl_avg"] = KL_ESTIMATORS[config.kl.estimator](logprobs, old.ref_logprobs)
        losses = losses + state.kl_coef * metrics["loss/kl_avg"]
    if config.kl_penalty is not None:
        losses = losses + state.penalty_beta * k3(old.logprobs, logprobs)  # (b, r)
    if config.entropy_coef:
        losses = losses - config.entropy_coef * entropy
    return torch.where(old.mask, losses, 0), metrics


def _is_warm(warmup: CriticWarmup, losses: Sequence[float]) -> bool:
    """Whether the critic's loss has settled, or the warm-up is at its end."""
    if len(losses) >= warmup.max_updates:
        return True
    return len(losses) > 2 and min(losses[-2:]) > (1 - warmup.settled) * min(losses[:-2])


@console.part("the KL of the epochs")
@torch.no_grad()
def _divergence(dist: Distributed, config: Ppo, state: TrainState, rollout: Rollout) -> float:
    """KL(π_old ‖ π) a token, π being the policy after the epochs: d of Schulman et al. 2017, eq. 8."""
    own = dist.shard_rows(range(len(rollout.queries)))
    for attempt in dist.attempts(state.budget):
        with attempt:
            sums = TokenSums()
            for micro in rollout.split(dist, own, state.budget):
                batch = rollout.batch(micro.groups).to(dist.device)
                with dist.autocast():
                    logprobs = response_logprobs(state.actor_critic.policy, batch, config.temperature)
                old = rollout.select(micro.rows, batch.num_response_columns, dist.device)
                sums.add({"divergence": k3(old.logprobs, logprobs)}, old.mask, micro.scale)  # (b, r)
    return TokenSums.means([sums], dist.sum)["divergence"]


def _evaluate(
    dist: Distributed, state: TrainState, evaluator: Evaluator, tracker: Tracker, *, select: bool, show: bool
) -> Metrics:
    """An evaluation that may choose the weights, and samples that are shown and kept."""
    episode = int(state.metrics.get("episode", 0))
    metrics: Metrics = {}
    if select:
        metrics = evaluator.evaluate(
            state.evaluation, state.sampler, state.evaluation_budget, episode=episode, update=state.update
        )
        tracker.metrics(metrics, step=episode)
    if show:  # on all ranks: NaN must stop all of them
        rows = evaluator.show(state.evaluation, state.sampler, episode=episode, update=state.update)
        if dist.is_main:
            tracker.table("samples", rows)
            console.table(
                f"samples at episode {episode}",
                ["query", "response", "score"],
                [(row["prompt"], row["response"], f"{row['score']:.2f}") for row in rows],
            )
    return metrics


def require_finite(metrics: Metrics, rollout: Rollout) -> None:
    """Check metrics that are the same on all ranks; their sums overflow where nothing else does.

    Raises:
        NonFiniteError: naming those that are NaN or infinite; the rollout is its `batch`.
    """
    wrong = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(", ".join(wrong), vars(rollout))


def selection_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced; the last update is one of them."""
    return {max(1, round((i + 1) * num_updates / count)) for i in range(count)}


def sample_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced from 0, before training, to the last."""
    return {num_updates} if count == 1 else {round(i * num_updates / (count - 1)) for i in range(count)}

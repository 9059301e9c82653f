"""PPO, from the first prompt to the last snapshot, in `train`; the passes with gradients are in
`accumulate_gradients` and below it.

The arithmetic is in `rewards`, `advantages`, `losses` and `kl`, all pure functions. State changes only here,
in `state` and in `evaluate`; `reporting` tells people what an update has done.

Forward passes of each row in an update of the shipped params.yaml, in float32, beside sampling: 7.

    sampling   the policy, a token at a time with a cache
    scoring    3: reference, critic and reward model. The policy makes one more in bf16, with a shared critic,
               and where vLLM sampled: elsewhere the sampler's own log-probs are exact
    training   4: policy and critic, forward and backward, in each of 2 epochs; 4 optimizer steps an epoch
    also       with `kl_penalty` one of the policy after the epochs; with `ptx` one of its rows in each step;
               evaluations. The backward pass makes the logits again, with `gradient_checkpointing` all layers

B responses of a rollout, of all ranks · k responses to each prompt · R longest response
b rows of a micro-batch · r its longest response. A tensor's row starts with the first token of a response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from rlhf_tasks import console
from rlhf_tasks.config.ppo import CriticWarmup, Ppo, SeparateCritic, ValueLoss
from rlhf_tasks.data.batches import Batch
from rlhf_tasks.models.heads import TokenScores, ValueHead
from rlhf_tasks.models.load import num_bytes
from rlhf_tasks.models.logprobs import TokenStats, response_logprobs
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.models.stop_tokens import has_ended
from rlhf_tasks.models.tensors import NonFiniteError, masked_moments, whiten
from rlhf_tasks.ppo.advantages import equal_groups, group_deviations, monte_carlo_returns, response_returns
from rlhf_tasks.ppo.guards import GuardTrip
from rlhf_tasks.ppo.kl import ESTIMATORS as KL_ESTIMATORS
from rlhf_tasks.ppo.kl import adapt_kl_coef, adapt_penalty, k3
from rlhf_tasks.ppo.losses import MicroBatch, token_weights, value_loss
from rlhf_tasks.ppo.measure import score_on_all_ranks
from rlhf_tasks.ppo.metrics import (
    Metrics,
    TokenSums,
    add_sums,
    explained_variance,
    objective_metrics,
    padding_sums,
    prompt_share,
    ratio_metrics,
    ratio_sums,
    response_metrics,
    token_means,
    token_sums,
)
from rlhf_tasks.ppo.reporting import measure_work, report_start, report_update, report_warmup
from rlhf_tasks.ppo.rewards import bootstrap_values, token_rewards, truncated_scores
from rlhf_tasks.ppo.rollout import Prompts, Rollout, pad_rows
from rlhf_tasks.ppo.state import PpoState, Setup, handle_trips, stop_at_non_finite
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import MicroRows
from rlhf_tasks.training.optim import decay, learning_rate, reset_moments, set_learning_rate
from rlhf_tasks.training.supervised import budget_metrics


def train(setup: Setup, state: PpoState) -> Iterator[Metrics]:
    """Train to the end; each update's metrics are yielded when all of it is done, snapshot included.

    It is a generator: nothing happens until somebody iterates.

    Raises:
        GuardTripped: a guard stopped the training.
    """
    dist, config, tracker, snapshots = setup.dist, setup.config, setup.tracker, setup.snapshots
    num_updates, batch_size = setup.num_updates, config.rollout_batch_size
    num_prompts, num_samples = batch_size // config.samples_per_prompt, config.samples_per_prompt  # n, k
    separate = config.critic if isinstance(config.critic, SeparateCritic) else SeparateCritic()
    warmup = separate.warmup
    kl_of_tokens = KL_ESTIMATORS[config.kl.estimator]
    shuffle = partial(shuffle_minibatches, batch_size, config.num_mini_batches, num_samples, state.order_rng)

    with (
        console.progress("ppo", config.total_episodes, unit="episodes") as bar,
        stop_at_non_finite(setup, state),
    ):
        # A run that was stopped goes on after its last snapshot, to the same bytes.
        snapshots.reserve(num_bytes(state.actor_critic.policy), state.num_bytes)
        if (snapshot := snapshots.load()) is not None:
            state.load_state_dict(dist, snapshot)
            tracker.load_state_dict(snapshot["tracker"])
            bar.skip(state.update * batch_size)
            del snapshot

        while state.update < num_updates:
            # 0. Evaluate the SFT policy first: training must improve on it.
            if not state.was_evaluated:
                report_start(setup, state)

            # 1. At first the critic may train alone, at a constant rate (arXiv 2307.04964, section 5.3.4).
            # Then the learning rate follows its schedule.
            start = time.perf_counter()
            is_warmup = warmup is not None and not _is_warm(warmup, state.warmup_losses)
            rate = config.learning_rate if is_warmup else learning_rate(config, state.update, num_updates)
            if not is_warmup and state.update == 0 and state.warmup_losses:
                # data parallelism has given the policy gradients of zero: counted as steps they would make
                # its first real ones too small, or too large where the moments are slow
                reset_moments(state.optimizer, state.num_policy_groups)
                bar.restart_speed()  # a warm-up has taken time, and none of the episodes
            critic_rate = None  # the policy's, by its scale
            if separate.schedule is not None:
                peak = separate.learning_rate or config.learning_rate
                critic_rate = peak * decay(separate.schedule, state.update / num_updates)
            set_learning_rate(state.optimizer, rate, critic_rate)

            # 2. Responses: k to each of n prompts, in the order of `Samples`.
            prompts = setup.prompts.take(state.prompt_order.take(num_prompts))
            samples = state.sampler.sample(prompts.queries, state.update)
            prompts = prompts.repeat(num_samples)
            generated = time.perf_counter()

            # 3. Scores, log-probs of policy and reference, and the critic's values. They are computed in the
            # micro-batches of the first epoch, so that its ratios start at exactly 1 in bf16 too.
            minibatches = shuffle()
            rollout = score_rollout(setup, state, prompts, samples, minibatches)
            rollout, sampler_metrics = state.sampler.correct(rollout)
            mask = rollout.mask  # (B, R)
            scored = time.perf_counter()

            # 4. Scores become token rewards: scaled, under the rule for responses without an end, and on the
            # last token. The KL penalty from the reference is on every token: r_t = −kl_coef · kl_t
            # (+ score). Two other KLs, of `kl_penalty` and `target_kl`, are from the rollout's policy.
            scores = state.score_scaler(rollout.scores)  # (B,)
            scores = truncated_scores(scores, rollout.ended, config.truncation)
            kl = kl_of_tokens(rollout.logprobs, rollout.ref_logprobs)  # (B, R)
            reward_kl_coef = state.kl_coef if config.kl.kind == "in_reward" else 0.0
            rewards = token_rewards(scores, kl, mask, reward_kl_coef)  # (B, R)
            if config.whiten_rewards:
                rewards = whiten(rewards, mask, shift_mean=False)

            # 5. Advantages and returns, (B, R) each, whitened over the rollout of all ranks: the moments are
            # those of the whole batch, so that they do not depend on its cut into minibatches. Responses that
            # no loss reads are not among them; a critic that warms up reads all.
            advantages, returns = setup.estimator(rewards, rollout, config)
            is_read, shares = torch.ones_like(rollout.ended), Metrics()  # (B,) bool
            if not is_warmup:
                is_read, shares = select_responses(config, scores, rollout.ended)
            mask_read = mask & is_read[:, None]  # (B, R)
            deviation = float(masked_moments(advantages, mask_read)[1].sqrt()) if mask_read.any() else 0.0
            if config.whiten_advantages:
                advantages = whiten(advantages, mask_read)
            if config.advantage_clip is not None:
                advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
            # γ·V of a response without an end: instead of its score (bootstrap) or beside it (bootstrap_add)
            outcomes = scores + config.gamma * rollout.bootstrap_values  # (B,)
            rollout_metrics = objective_metrics(
                rollout, outcomes, kl, kl_coef=state.kl_coef, reward_kl_coef=reward_kl_coef
            )
            rollout_metrics |= response_metrics(rollout) | shares | {"val/advantage_std": deviation}
            if config.critic is not None:
                explained = explained_variance(returns, rollout.values, mask)
                by_outcome = monte_carlo_returns(rewards, rollout, config.gamma)
                explained_mc = explained_variance(by_outcome, rollout.values, mask)
                rollout_metrics["val/explained_variance"] = explained
                rollout_metrics["val/explained_variance_mc"] = explained_mc
                rollout_metrics["val/explained_variance_first"] = explained_variance(
                    by_outcome[:, :1], rollout.values[:, :1], mask[:, :1]
                )
                if config.falls_back:
                    rollout_metrics["val/critic_is_baseline"] = float(explained_mc > 0)
            if num_samples > 1:
                whole = response_returns(rewards, mask)
                rollout_metrics["val/prompt_share"] = prompt_share(whole, num_samples)[0]
                if config.critic is None:
                    deviations = group_deviations(whole, num_samples)
                    rollout_metrics["val/group_deviation"] = float(deviations.mean())
            rollout = replace(rollout, advantages=advantages, returns=returns)
            require_finite(rollout_metrics, rollout)
            placed = rollout.to(dist.device)

            # 6. Epochs over the rollout, in shuffled minibatches; each is one step, on the rows it reads.
            steps, grad_norms, num_epochs = list[TokenSums](), list[float](), 0
            num_steps = config.num_ppo_epochs * config.num_mini_batches
            with console.part("epochs", num_steps, "steps") as meter:
                while num_epochs < config.num_ppo_epochs:
                    if num_epochs:
                        minibatches = shuffle()
                    first_step = len(steps)
                    for minibatch in minibatches:
                        rows = [row for row in minibatch if is_read[row]]
                        if not rows:  # no loss reads any
                            continue
                        # 7. Gradients add up over micro-batches; after out-of-memory, over smaller ones.
                        ptx_rows = state.ptx.take(len(rows)) if state.ptx and not is_warmup else []
                        steps.append(accumulate_gradients(setup, state, placed, rows, ptx_rows, is_warmup))

                        # 8. The optimizer step, with the norm of the gradient clipped. The critic may take
                        # more of them on the minibatch: it learns a target, not an advantage that goes stale.
                        grad_norms.append(take_step(setup, state, rollout, rows))
                        for _ in range(separate.steps - 1):
                            accumulate_gradients(setup, state, placed, rows, [], is_warmup, critic_only=True)
                            state.actor_critic.policy.zero_grad(set_to_none=True)  # AdamW skips what has none
                            take_step(setup, state, rollout, rows)
                        meter.advance()
                    num_epochs += 1
                    # Early stopping: no more epochs once the policy is too far from the rollout's.
                    if config.target_kl is not None and len(steps) > first_step:
                        means = token_means(steps[first_step:], dist.sum)
                        if means["policy/approxkl_avg"] > config.target_kl:
                            break

            # 9. What the epochs have measured, in means over the tokens of all minibatches.
            metrics = Metrics()
            if steps:  # else no response is read, and nothing has changed
                first = token_means(steps[:1], dist.sum)
                metrics = ratio_metrics(token_means(steps, dist.sum), first)
            metrics |= {
                "train/grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
                "train/num_epochs": num_epochs,
            } | budget_metrics(state.budget)
            # The coefficient of KL(π_old ‖ π) follows what the epochs have moved: PPO's section 4.
            if config.kl_penalty is not None and steps and not is_warmup:
                divergence = measure_divergence(setup, state, rollout)
                metrics["policy/penalty_beta"] = state.penalty_beta
                metrics["policy/penalty_kl_avg"] = divergence
                state.penalty_beta = adapt_penalty(state.penalty_beta, divergence, config.kl_penalty.target)
            require_finite(metrics, rollout)
            trips: list[GuardTrip] = []
            if warmup is not None and is_warmup:
                state.warmup_losses.append(metrics["loss/value_avg"])
                metrics = report_warmup(setup, state, warmup, rollout_metrics)
            else:
                # 10. The update is done: kl_coef adapts, and the reference may follow the policy.
                state.update += 1
                state.kl_coef = adapt_kl_coef(
                    state.kl_coef, rollout_metrics["objective/kl_k1"], batch_size, config.adaptive_kl
                )
                sync = config.reference_sync
                if sync is not None and state.update % sync.every == 0:
                    sharding.move_toward(state.reference.model, state.actor_critic.policy, sync.alpha)

                # 11. Metrics, an evaluation and samples when they are due, and what the guards say of them.
                end = time.perf_counter()
                metrics |= rollout_metrics | sampler_metrics
                metrics |= {
                    "time/generate_seconds": generated - start,
                    "time/score_seconds": scored - generated,
                    "time/train_seconds": end - scored,
                    "time/tokens_per_second": metrics["val/response_length"] * batch_size / (end - start),
                    "eps": batch_size / (end - start),
                    "episode": float(state.update * batch_size),
                    "lr": rate,
                } | measure_work(
                    setup, state, rollout, num_epochs * float(mask_read.sum() / mask.sum()), end - start
                )
                trips = report_update(setup, state, rollout, prompts, kl, metrics, bar)

            # 12. A trip of a guard warns, raises kl_coef or stops.
            handle_trips(setup, state, trips)

            # 13. A snapshot, when one is due.
            if snapshots.due():
                snapshots.save(state.num_rollouts, state.state_dict(dist) | {"tracker": tracker.state_dict()})
            yield metrics


@console.part("scoring")
@torch.no_grad()
def score_rollout(
    setup: Setup, state: PpoState, prompts: Prompts, samples: Samples, minibatches: Sequence[Sequence[int]]
) -> Rollout:
    """The rollout of all ranks' samples, without advantages: log-probs, values and scores.

    There is a prompt for each sample. Where the policy in training did not sample by itself, or not in
    float32, its log-probs come from a pass of their own: the sampler rounds otherwise, and the first ratio
    would differ from 1. The passes read the micro-batches in which the first epoch will train on these
    `minibatches`: in bf16 the rows of a pass decide how it rounds.

    Raises:
        NonFiniteError: on all ranks, if any number is NaN or infinite; the rollout is its `batch`, or what a
            scorer was given.
    """
    dist, config, model, tokenizer = setup.dist, setup.config, state.actor_critic, setup.tokenizer
    responses, lengths = samples.responses, torch.tensor([len(r) for r in samples.responses])
    shape = (len(prompts), config.response_length)
    recomputes = not state.sampler.is_policy or not dist.is_float32
    ended = torch.tensor([has_ended(response, setup.ends) for response in responses])
    rollout = Rollout(
        queries=prompts.queries,
        responses=responses,
        ended=ended,
        mask=torch.arange(config.response_length) < lengths[:, None],
        logprobs=torch.zeros(shape),
        ref_logprobs=torch.zeros(shape),
        values=torch.zeros(shape),
        bootstrap_values=torch.zeros(len(prompts)),
        scores=torch.zeros(len(prompts)),
        parts={},
        importance=torch.ones(shape),
        advantages=torch.zeros(shape),
        returns=torch.zeros(shape),
        pad=tokenizer.pad_token_id,
        shares_queries=model.shares_queries,
    )

    def compute(batch: Batch) -> list[Tensor]:
        ref_logprobs = state.reference.logprobs(batch, config.temperature)  # (b, r), r their longest
        if not recomputes and not isinstance(model.critic, ValueHead):
            return [ref_logprobs, model.values(batch)]  # (b, r + 1)
        stats, values = model(batch, config.temperature)
        return [ref_logprobs, values, stats.logprobs][: len(computed)]

    if not recomputes:  # in float32 the other rows of a pass change a number by rounding alone
        minibatches = [range(len(prompts))]
    # the reference's log-probs, values, with that of the last state, and the policy's log-probs if need be
    widths = (shape[1], shape[1] + 1, shape[1])[: 2 + recomputes]
    computed = [torch.zeros(len(prompts), width) for width in widths]
    with console.part("reading", len(minibatches), "minibatches") as meter:
        for rows in minibatches:
            rollout.read(dist, dist.slice_rows(rows), state.budget, compute, computed)
            meter.advance()
    # each row was read by one rank, and is zero on the others
    ref_logprobs, values, *own_logprobs = (dist.sum(x.to(dist.device)).cpu() for x in computed)
    last_values = values.gather(1, lengths[:, None]).squeeze(1)

    parts = score_on_all_ranks(dist, setup.scorers.parts, prompts, responses, tokenizer, setup.ends)
    rollout = replace(
        rollout,
        logprobs=own_logprobs[0] if recomputes else pad_rows(samples.logprobs, config.response_length),
        ref_logprobs=ref_logprobs,
        values=torch.where(rollout.mask, values[:, :-1], 0),
        bootstrap_values=bootstrap_values(last_values, ended, config.truncation),
        scores=setup.scorers.total(parts),
        parts=parts,
    )
    names = ("logprobs", "ref_logprobs", "values", "bootstrap_values", "scores")
    wrong = [name for name in names if not bool(getattr(rollout, name).isfinite().all())]
    if wrong:
        raise NonFiniteError(f"a rollout has NaN or infinite {', '.join(wrong)}", vars(rollout))
    return rollout


def shuffle_minibatches(
    batch_size: int, num_mini_batches: int, num_samples: int, generator: torch.Generator
) -> list[list[int]]:
    """The rows of each minibatch of an epoch, of all ranks.

    The k responses to a prompt stay together, where a minibatch is a multiple of k, and the models read it
    once.
    """
    num_prompts, size = batch_size // num_samples, batch_size // num_mini_batches
    shuffled: list[int] = torch.randperm(num_prompts, generator=generator).tolist()
    order = [row for p in shuffled for row in range(p, batch_size, num_prompts)]
    return [order[first : first + size] for first in range(0, batch_size, size)]


def select_responses(config: Ppo, scores: Tensor, ended: Tensor) -> tuple[Tensor, Metrics]:
    """(B,) bool: the responses that the losses read, with what is left out as metrics; all by default.

    Groups without variance are DAPO's dynamic sampling without its further samples, and truncated responses
    its overlong filtering (arXiv 2503.14476, sections 3.2 and 3.4). `scores` and `ended` are (B,) of all
    ranks.
    """
    is_read, shares = torch.ones_like(ended), Metrics()
    if config.skip_equal_groups:
        equal = equal_groups(scores.double(), config.samples_per_prompt)
        is_read, shares["val/equal_group_share"] = is_read & ~equal, float(equal.float().mean())
    if config.skip_truncated:
        is_read = is_read & ended
    if config.skip_equal_groups or config.skip_truncated:
        shares["val/read_share"] = float(is_read.float().mean())
    return is_read, shares


def accumulate_gradients(
    setup: Setup,
    state: PpoState,
    rollout: Rollout,
    rows: Sequence[int],
    ptx_rows: Sequence[int],
    is_warmup: bool,
    *,
    critic_only: bool = False,
) -> TokenSums:
    """Add the gradients of one minibatch, micro-batch by micro-batch; returns the metrics' sums.

    `rows` are the minibatch's rows of the `rollout`, of all ranks; `ptx_rows` are those of PPO-ptx's text.
    """
    dist = setup.dist
    # A token's weight is that in the loss of the whole minibatch, of all ranks: so the sum over micro-batches
    # is the same, however they are cut.
    index, weights = torch.tensor(rows, device=dist.device), torch.zeros_like(rollout.logprobs)  # (B, R)
    weights[index] = token_weights(rollout.mask[index], setup.config.loss_reduction)
    for attempt in dist.attempts(state.budget, state.optimizer):
        with attempt:
            # What a failed attempt has added counts nowhere, and its graph is dropped.
            passes, loss = list[TokenSums](), torch.empty(0)
            # The responses to a prompt are side by side, and stay on one rank, whose models read it once.
            work = [
                ppo_losses(setup, state, rollout, micro, weights, is_warmup, critic_only=critic_only)
                for micro in rollout.split(dist, dist.slice_rows(rows), state.budget)
            ]
            if setup.ptx is not None and ptx_rows:
                # Nothing belongs together here: of rows in the order of a shuffle, a rank gets every n-th.
                local, num_tokens = dist.shard_rows(ptx_rows), setup.ptx.num_targets(ptx_rows)
                parts = dist.split([setup.ptx.sizes[i] for i in local], [[i] for i in local], state.budget)
                work += [ptx_losses(setup, state, micro, num_tokens) for micro in parts]
            for losses in dist.passes(state.wrapped, work):
                for loss, part in losses:
                    passes.append(part)
                    if loss.requires_grad:  # the policy's alone has none while the critic warms up
                        dist.backward(state.wrapped, loss)
    return add_sums(passes)


def ppo_losses(
    setup: Setup,
    state: PpoState,
    rollout: Rollout,
    micro: MicroRows,
    weights: Tensor,
    is_warmup: bool,
    *,
    critic_only: bool = False,
) -> Iterator[tuple[Tensor, TokenSums]]:
    """The loss of a micro-batch and its metrics' sums; `weights` are (B, R).

    There are two losses, the policy's and the critic's, where nothing wraps the two models: the gradient of
    the first is taken, and the policy's activations are freed, before the critic's pass is made. DDP, ZeRO
    and FSDP2 want one pass of all weights.
    """
    dist, config = setup.dist, setup.config
    batch, index = rollout.batch(micro.groups, dist.device), torch.tensor(micro.rows, device=dist.device)
    old = rollout.select(index, batch.num_response_columns)  # what the rollout recorded
    weight = micro.scale * weights[index, : batch.num_response_columns]  # (b, r)
    splits = critic_has_own_pass(setup, state)

    def sum_policy_loss() -> tuple[Tensor, TokenSums]:
        # The forward pass: log-probs and entropies of the response tokens, and values of their states.
        with dist.autocast():
            stats, values = state.wrapped(
                batch, config.temperature, entropy_grad=config.entropy_coef > 0, with_values=not splits
            )  # (b, r) each, and (b, r + 1) or None
        # The policy's loss: the clipped surrogate, or a function of the user's, with its penalties.
        losses, metrics = token_losses(setup, state, stats, old)  # (b, r)
        if is_warmup or critic_only:  # under data parallelism every weight needs a gradient, if one of zero
            losses = losses.detach() if splits else 0 * losses
        total = (weight * losses).sum()
        if config.critic is not None and not splits:
            loss, of_critic = critic_loss(config.critic, values, old, weight)
            total, metrics = total + loss, metrics | of_critic
        sums = token_sums(metrics, old.mask, micro.scale)
        return total, sums | padding_sums(batch.is_real, micro.scale)

    if not (critic_only and splits):
        yield sum_policy_loss()
    if config.critic is not None and splits:
        with dist.autocast():
            values = state.actor_critic.values(batch)  # (b, r + 1)
        loss, metrics = critic_loss(config.critic, values, old, weight)
        yield loss, token_sums(metrics, old.mask, micro.scale)


def critic_has_own_pass(setup: Setup, state: PpoState) -> bool:
    """Whether the critic has a pass of its own: it is a model of its own, and nothing wraps the two."""
    is_wrapped = state.wrapped is not state.actor_critic or setup.dist.shards
    return isinstance(state.actor_critic.critic, TokenScores) and not is_wrapped


def critic_loss(
    settings: ValueLoss, values: Tensor, old: MicroBatch, weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's part of the loss, of (b, r + 1) values, and its metrics, (b, r) each."""
    value, is_clipped = value_loss(
        values[:, :-1], old.values, old.returns, settings.cliprange_value
    )  # (b, r)
    metrics = {"loss/value_avg": value, "val/clipfrac_avg": is_clipped}
    return settings.vf_coef * (weight * value.where(old.mask, 0)).sum(), metrics


def ptx_losses(
    setup: Setup, state: PpoState, micro: MicroRows, num_tokens: float
) -> Iterator[tuple[Tensor, TokenSums]]:
    """PPO-ptx: the mean −log p of other text (Ouyang et al. 2022, eq. 2), over the minibatch's tokens."""
    dist, config = setup.dist, setup.config
    assert setup.ptx is not None
    assert config.ptx is not None
    batch = setup.ptx.batch(micro.rows).to(dist.device)
    with dist.autocast():  # at temperature 1: this text was not sampled
        stats, values = state.wrapped(
            batch,
            1.0,
            entropy_grad=config.entropy_coef > 0,
            with_values=not critic_has_own_pass(setup, state),
        )  # (b, r) each, and (b, r + 1) or None
    total: Tensor = -config.ptx.coef * micro.scale * stats.logprobs.sum() / num_tokens
    if values is not None:
        total = total + 0 * values.sum()  # under data parallelism every weight needs a gradient
    yield total, token_sums({"loss/ptx_avg": -stats.logprobs}, batch.mask, micro.scale)


def token_losses(
    setup: Setup, state: PpoState, stats: TokenStats, old: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss of each token and its metrics, (b, r) each; the loss is zero on padding."""
    config, logprobs, entropy = setup.config, stats.logprobs, stats.entropy
    losses, metrics = setup.loss(logprobs, old, config)
    losses = losses * old.importance
    metrics = metrics | ratio_sums(logprobs, old.logprobs)
    metrics |= {"loss/policy_avg": losses, "policy/entropy_avg": entropy}
    if config.kl.kind == "in_loss":
        metrics["loss/kl_avg"] = KL_ESTIMATORS[config.kl.estimator](logprobs, old.ref_logprobs)
        losses = losses + state.kl_coef * metrics["loss/kl_avg"]
    if config.kl_penalty is not None:
        losses = losses + state.penalty_beta * k3(old.logprobs, logprobs)  # (b, r)
    if config.entropy_coef:
        losses = losses - config.entropy_coef * entropy
    return torch.where(old.mask, losses, 0), metrics


def take_step(setup: Setup, state: PpoState, rollout: Rollout, rows: Sequence[int]) -> float:
    """The optimizer step; returns the norm of the gradient before clipping.

    Raises:
        NonFiniteError: with the rollout, and the rows of the minibatch, as its `batch`.
    """
    most, critic = setup.config.max_grad_norm, setup.config.critic
    apart: list[tuple[nn.Module, float | None]] = []  # a norm for both, unless the critic has its own
    if isinstance(critic, SeparateCritic) and critic.max_grad_norm is not None:
        apart = [(state.actor_critic.policy, most), (state.actor_critic.critic, critic.max_grad_norm)]
    try:
        return setup.dist.step(state.wrapped, state.optimizer, most, apart)
    except NonFiniteError as error:
        error.batch = vars(rollout) | {"rows": rows}
        raise


def _is_warm(warmup: CriticWarmup, losses: Sequence[float]) -> bool:
    """Whether the critic's loss has settled, or the warm-up is at its end."""
    if len(losses) >= warmup.max_updates:
        return True
    return len(losses) > 2 and min(losses[-2:]) > (1 - warmup.settled) * min(losses[:-2])


@console.part("the KL of the epochs")
@torch.no_grad()
def measure_divergence(setup: Setup, state: PpoState, rollout: Rollout) -> float:
    """KL(π_old ‖ π) a token, π being the policy after the epochs: d of Schulman et al. 2017, eq. 8."""
    dist, logprobs = setup.dist, torch.zeros(rollout.mask.shape)  # (B, R)
    rows = dist.shard_rows(range(len(rollout.queries)))

    def compute(batch: Batch) -> list[Tensor]:
        return [response_logprobs(state.actor_critic.policy, batch, setup.config.temperature)]

    rollout.read(dist, rows, state.budget, compute, [logprobs])
    sums = token_sums({"divergence": k3(rollout.logprobs[rows], logprobs[rows])}, rollout.mask[rows])
    return token_means([sums], lambda x: dist.sum(x.to(dist.device)))["divergence"]


def require_finite(metrics: Metrics, rollout: Rollout) -> None:
    """Check metrics that are the same on all ranks; their sums overflow where nothing else does.

    Raises:
        NonFiniteError: naming those that are NaN or infinite; the rollout is its `batch`.
    """
    wrong = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(", ".join(wrong), vars(rollout))

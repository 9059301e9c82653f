"""PPO: rollout, rewards, advantages, epochs of clipped updates. The arithmetic is in the modules beside.

One update is `collect` → `learn_from` → `optimise`; README gives each metric's formula.
B batch · R response · V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids, collate, micro_batches
from rlhf_tasks.generation import sample
from rlhf_tasks.ppo import kl
from rlhf_tasks.ppo.advantages import gae
from rlhf_tasks.ppo.losses import policy_loss, value_loss
from rlhf_tasks.ppo.rewards import replace_missing_eos, token_rewards
from rlhf_tasks.ppo.rollout import (
    ActorCritic,
    Episodes,
    lengths_mask,
    logprobs_of,
    pad_rows,
    per_token,
    response_values,
)
from rlhf_tasks.runtime import Runtime, adamw, learning_rate, set_learning_rate
from rlhf_tasks.tensors import entropy_from_logits, gather_logprobs, masked_sum, whiten

Scorer = Callable[[Sequence[Ids], Sequence[Ids]], Tensor]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Lesson:
    """What the epochs learn from one rollout: per token, (B, R)."""

    episodes: Episodes
    advantages: Tensor
    returns: Tensor


class Trainer:
    """Policy, critic, frozen reference and reward, and the state that goes from update to update."""

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        actor_critic: ActorCritic,
        reference: PreTrainedModel,
        reward: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[Ids],
        seed: int,
    ) -> None:
        self.rt, self.settings, self.reference, self.reward = rt, settings, reference.eval(), reward
        self.stop, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        optimizer = adamw(actor_critic, settings)
        self.model, self.optimizer = rt.prepare(actor_critic, optimizer, settings.max_grad_norm)
        self.actor_critic = actor_critic
        self.sampling = rt.generator(seed)
        self.shuffling = torch.Generator().manual_seed(seed)
        self.prompts = prompts
        self._queue: list[int] = []
        self.num_updates = settings.total_episodes // settings.rollout_batch_size

    def updates(self) -> Iterator[Metrics]:
        """All updates, one after another; each gives its metrics (means over all processes)."""
        for update in range(self.num_updates):
            rate = learning_rate(self.settings, update, self.num_updates)
            set_learning_rate(self.optimizer, rate)
            started = time.perf_counter()
            episodes, times = self.collect(self._next_queries())
            lesson, metrics = self.learn_from(episodes)
            training = time.perf_counter()
            metrics |= self.optimise(lesson)
            metrics |= times | {"time/train_seconds": time.perf_counter() - training}
            metrics["eps"] = self.settings.rollout_batch_size / (time.perf_counter() - started)
            metrics["episode"] = (update + 1) * self.settings.rollout_batch_size
            yield metrics | {"lr": rate}

    def _next_queries(self) -> list[Ids]:
        """This process's share of the next prompts; a reshuffled pass over them starts when one ends."""
        while len(self._queue) < self.settings.rollout_batch_size:
            self._queue += torch.randperm(len(self.prompts), generator=self.shuffling).tolist()
        rows = self._queue[: self.settings.rollout_batch_size]
        del self._queue[: self.settings.rollout_batch_size]
        return [self.prompts[i] for i in self.rt.share(rows)]

    # --------------------------------------------------------------------------------- rollout

    @torch.no_grad()
    def collect(self, queries: list[Ids]) -> tuple[Episodes, Metrics]:
        """Sample an answer to each query and look at it with every model."""
        settings, width = self.settings, self.settings.response_length
        self.actor_critic.eval()
        started = time.perf_counter()
        with self.rt.autocast():
            rollout = sample(
                self.actor_critic.policy, queries, max_new_tokens=width, temperature=settings.temperature,
                stop=self.stop, pad=self.pad, generator=self.sampling,
            )  # fmt: skip
        generated = time.perf_counter()
        responses = rollout.responses

        def every_token(compute: Callable[..., Tensor]) -> Tensor:
            with self.rt.autocast():
                return per_token(
                    compute, queries, responses, width=width, pad=self.pad,
                    max_tokens=settings.micro_batch_tokens, device=self.rt.device,
                )  # fmt: skip

        episodes = Episodes(
            queries=queries,
            responses=responses,
            ended=torch.tensor([r[-1] == self.stop for r in responses]),
            mask=lengths_mask([len(r) for r in responses], width),
            logprobs=pad_rows(rollout.logprobs, width),
            ref_logprobs=every_token(lambda b: logprobs_of(self.reference, b, settings.temperature)),
            values=every_token(lambda b: response_values(self.actor_critic.value, b)),
            scores=self.reward(queries, responses),
        )
        times = {
            "time/generate_seconds": generated - started,
            "time/score_seconds": time.perf_counter() - generated,
        }
        return episodes, times

    def learn_from(self, episodes: Episodes) -> tuple[Lesson, Metrics]:
        """Scores and KL → rewards → advantages, whitened over the whole rollout of all processes."""
        settings, mask = self.settings, episodes.mask
        scores = episodes.scores
        if settings.truncation == "eos_trick_replace":
            scores = replace_missing_eos(scores, episodes.ended, settings.missing_eos_score)
        divergence = kl.k1(episodes.logprobs, episodes.ref_logprobs)
        rewards = token_rewards(scores, divergence, mask, settings.kl_coef)
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, reduce=self._reduce)
        advantages, returns = gae(rewards, episodes.values, mask, settings.gamma, settings.lam)
        advantages = whiten(advantages, mask, reduce=self._reduce)
        return Lesson(episodes, advantages, returns), self._objective(episodes, scores, divergence)

    def _objective(self, episodes: Episodes, scores: Tensor, divergence: Tensor) -> Metrics:
        mask = episodes.mask
        sums = torch.stack([
            torch.tensor(float(len(scores))),
            masked_sum(divergence, mask),
            -masked_sum(episodes.logprobs, mask),
            scores.sum(),
            episodes.scores.sum(),
            episodes.ended.sum(),
            mask.sum(),
        ])  # fmt: skip
        count, divergence_sum, surprise, score, raw, ended, tokens = self._reduce(sums.float()).tolist()
        non_score = -self.settings.kl_coef * divergence_sum / count
        return {
            "objective/kl": divergence_sum / count,
            "objective/entropy": surprise / count,
            "objective/non_score_reward": non_score,
            "objective/scores": score / count,
            "objective/rlhf_reward": score / count + non_score,
            "objective/raw_scores": raw / count,
            "val/num_eos_tokens": ended,
            "val/response_length": tokens / count,
        }

    def _reduce(self, x: Tensor) -> Tensor:
        return self.rt.sum(x.to(self.rt.device)).to(x.device)

    # ---------------------------------------------------------------------------------- update

    def optimise(self, lesson: Lesson) -> Metrics:
        """`num_ppo_epochs` passes in `num_mini_batches` optimiser steps each; metrics are token means."""
        settings = self.settings
        own = settings.rollout_batch_size // self.rt.world_size
        sums: list[dict[str, Tensor]] = []
        norms = []
        self.model.train()
        for _ in range(settings.num_ppo_epochs):
            order: list[int] = torch.randperm(own, generator=self.shuffling).tolist()
            size = own // settings.num_mini_batches
            for start in range(0, own, size):
                norms.append(self._step(lesson, order[start : start + size], sums))
        return _token_means(self.rt, sums) | {"train/grad_norm": sum(norms) / len(norms)}

    def _step(self, lesson: Lesson, rows: list[int], sums: list[dict[str, Tensor]]) -> float:
        """One optimiser step on the mean token loss of a minibatch of all processes."""
        episodes = lesson.episodes
        num_tokens = float(self._reduce(episodes.mask[rows].sum().float()))
        sizes = [episodes.sizes[i] for i in rows]
        cut = micro_batches(sizes, self.settings.micro_batch_tokens)
        if self.rt.world_size > 1:
            cut = micro_batches(sizes, self.settings.micro_batch_tokens, count=self.rt.max(len(cut)))

        def loss_of(group: list[int]) -> Callable[[], Tensor]:
            def compute() -> Tensor:
                found = self._micro_batch([*group], lesson)
                sums.append({key: value.detach() for key, value in found.items()})
                loss = found["loss/policy_avg"] + self.settings.vf_coef * found["loss/value_avg"]
                return loss / num_tokens

            return compute

        groups = [[rows[i] for i in group] for group in cut]
        return self.rt.step(
            self.model, self.optimizer, [loss_of(g) for g in groups], self.settings.max_grad_norm
        )

    def _micro_batch(self, rows: list[int], lesson: Lesson) -> dict[str, Tensor]:
        """One forward pass: sums over real response tokens of losses and of what else is averaged."""
        settings, episodes = self.settings, lesson.episodes
        batch = collate([episodes.queries[i] for i in rows], [episodes.responses[i] for i in rows], self.pad)
        batch = batch.to(self.rt.device)
        mask, width = batch.response_mask, batch.num_response_columns

        def of_rows(x: Tensor) -> Tensor:
            return x[rows, :width].to(self.rt.device)

        with self.rt.autocast():
            logits, new_values = self.model(batch)
        logits = logits.float() / settings.temperature
        new_logprobs = gather_logprobs(logits, batch.responses)
        logratio = torch.where(mask, new_logprobs - of_rows(episodes.logprobs), 0)
        policy = policy_loss(logratio, of_rows(lesson.advantages), settings.cliprange)
        value = value_loss(
            new_values, of_rows(episodes.values), of_rows(lesson.returns), settings.cliprange_value
        )
        with torch.no_grad():
            ratio = logratio.exp()
            entropy = entropy_from_logits(logits)
        per_token = {
            "loss/policy_avg": policy.loss,
            "loss/value_avg": value.loss,
            "policy/clipfrac_avg": policy.clipped,
            "val/clipfrac_avg": value.clipped,
            "policy/approxkl_avg": 0.5 * logratio**2,
            "policy/entropy_avg": entropy,
            "val/ratio": ratio,
            "ratio_squared": ratio**2,
            "num_tokens": mask,
        }
        return {key: masked_sum(x, mask) for key, x in per_token.items()}


def _token_means(rt: Runtime, sums: Sequence[dict[str, Tensor]]) -> Metrics:
    """Micro-batches' sums → means over all tokens of all minibatches, epochs and processes."""
    keys = list(sums[0])
    totals = rt.sum(
        torch.stack([torch.stack([part[key] for part in sums]).double().sum() for key in keys])
    ).tolist()
    total = dict(zip(keys, totals, strict=True))
    tokens = total.pop("num_tokens")
    means = {key: value / tokens for key, value in total.items()}
    means["val/ratio_var"] = means.pop("ratio_squared") - means["val/ratio"] ** 2
    return means

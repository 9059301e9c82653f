"""The epochs on one lesson: shuffled minibatches, each one optimiser step made of micro-batches.

B batch · R response · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Size, collate
from rlhf_tasks.modeling.tensors import NonFiniteError, entropy_from_logits, gather_logprobs, masked_sum
from rlhf_tasks.ppo.kl import ESTIMATORS, PenaltyController, k3
from rlhf_tasks.ppo.lesson import Lesson, joined
from rlhf_tasks.ppo.losses import policy_loss, value_loss
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling, groups, lm_sums

Metrics = dict[str, float]
Sums = dict[str, Tensor]


class Queue:
    """Row numbers in shuffled passes: every row comes once before any comes again."""

    def __init__(self, num_rows: int, generator: torch.Generator) -> None:
        self._num_rows, self._generator = num_rows, generator
        self.waiting: list[int] = []

    def take(self, count: int) -> list[int]:
        while len(self.waiting) < count:
            self.waiting += torch.randperm(self._num_rows, generator=self._generator).tolist()
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


class Optimiser:
    """Policy and critic in training."""

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        pad: int,
        shuffling: torch.Generator,
        demonstrations: LanguageModelling | None,
    ) -> None:
        self._rt, self._settings, self.model, self.optimizer = rt, settings, model, optimizer
        self._pad, self._shuffling = pad, shuffling
        self.penalty = PenaltyController.of(settings.kl_penalty)
        self._ptx = None if demonstrations is None else Queue(len(demonstrations.queries), shuffling)
        self._demonstrations = demonstrations

    def __call__(self, lesson: Lesson, *, critic_only: bool = False) -> Metrics:
        """`num_ppo_epochs` passes in `num_mini_batches` optimiser steps each; metrics are token means.

        The minibatches are cut out of the rollout of all processes, so that their number changes no step,
        and each is dealt out anew, so that none waits for another that has more of its rows.
        """
        lesson = joined(self._rt.each(lesson))
        settings, whole = self._settings, self._settings.rollout_batch_size
        size = whole // settings.num_mini_batches
        sums: list[Sums] = []
        ptx: list[Sums] = []
        norms: list[float] = []
        num_epochs = 0
        self.model.train()
        for _ in range(settings.num_ppo_epochs):
            num_epochs += 1
            order: list[int] = torch.randperm(whole, generator=self._shuffling).tolist()
            before = len(sums)
            for start in range(0, whole, size):
                mine = self._rt.share(order[start : start + size])
                norms.append(self._step(lesson, mine, sums, ptx, critic_only))
            if settings.target_kl is not None:
                moved = token_means(self._rt, sums[before:])["policy/approxkl_avg"]
                if moved > settings.target_kl:
                    break
        metrics = token_means(self._rt, sums) | {"train/grad_norm": sum(norms) / len(norms)}
        metrics["train/num_epochs"] = num_epochs
        if ptx:
            metrics["loss/ptx_avg"] = token_means(self._rt, ptx)["loss"]
        if settings.kl_penalty is not None and not critic_only:
            moved = self._penalty_kl(lesson)
            metrics |= {"policy/penalty_beta": self.penalty.beta, "policy/penalty_kl_avg": moved}
            self.penalty.update(moved)
        return metrics

    @torch.no_grad()
    def _penalty_kl(self, lesson: Lesson) -> float:
        """KL(π_old ‖ π) a token, π being the policy after the epochs: d of Schulman et al. 2017, eq. 8."""
        sizes = lesson.episodes.sizes
        own = self._rt.share(range(len(sizes)))
        found = [self._micro_batch(group, lesson) for group in self._groups(sizes, own)]
        return token_means(self._rt, found)["policy/penalty_kl_avg"]

    def _step(
        self, lesson: Lesson, rows: list[int], sums: list[Sums], ptx: list[Sums], critic_only: bool
    ) -> float:
        """One optimiser step on the mean token loss of a minibatch of all processes; the gradient's norm."""
        num_tokens = float(self._rt.sum(lesson.episodes.mask[rows].sum().float().to(self._rt.device)))

        def loss_of(group: list[int]) -> Callable[[], Tensor]:
            def compute() -> Tensor:
                found = self._micro_batch(group, lesson)
                sums.append({key: value.detach() for key, value in found.items()})
                return self._loss(found, lesson, critic_only) / num_tokens

            return compute

        losses = [loss_of(group) for group in self._groups(lesson.episodes.sizes, rows)]
        if self._demonstrations is not None and not critic_only:
            size = self._settings.rollout_batch_size // self._settings.num_mini_batches
            losses += self._ptx_losses(self._demonstrations, size, ptx)
        try:
            return self._rt.step(self.model, self.optimizer, losses, self._settings.max_grad_norm)
        except NonFiniteError as error:
            error.batch = lesson.content() | {"rows": rows}
            raise

    def _groups(self, sizes: Sequence[Size], own: Sequence[int]) -> list[list[int]]:
        return groups(self._rt, sizes, own, self._settings.micro_batch_tokens)

    def _loss(self, sums: Sums, lesson: Lesson, critic_only: bool) -> Tensor:
        """Summed over a micro-batch's tokens. What has no part in it is taken × 0: under data parallelism
        every weight must have a gradient."""
        settings = self._settings
        critic = settings.vf_coef * sums["loss/value_avg"]
        actor = sums["loss/policy_avg"] - settings.entropy_coef * sums["policy/entropy_avg"]
        if settings.kl_in == "loss":
            actor = actor + lesson.kl_coef * sums["loss/kl_avg"]
        if settings.kl_penalty is not None:
            actor = actor + self.penalty.beta * sums["policy/penalty_kl_avg"]
        return critic + 0 * actor if critic_only else critic + actor

    def _micro_batch(self, rows: Sequence[int], lesson: Lesson) -> Sums:
        """One forward pass: sums over real response tokens of losses and of what else is averaged.

        Without rows, zeros by a pass over some other row: all processes must call the model equally often.
        """
        if not rows:
            return {key: 0 * value for key, value in self._micro_batch([0], lesson).items()}
        settings, episodes = self._settings, lesson.episodes
        batch = collate([episodes.queries[i] for i in rows], [episodes.responses[i] for i in rows], self._pad)
        batch = batch.to(self._rt.device)
        mask, width = batch.response_mask, batch.num_response_columns

        def of_rows(x: Tensor) -> Tensor:
            return torch.where(mask, x[rows, :width].to(self._rt.device), 0)

        with self._rt.autocast():
            logits, states = self.model(batch)
        logits = logits.float() / settings.temperature
        new_logprobs = torch.where(mask, gather_logprobs(logits, batch.responses), 0)
        logprobs, ref_logprobs = of_rows(episodes.logprobs), of_rows(episodes.ref_logprobs)
        logratio = new_logprobs - (ref_logprobs if settings.ratio_from == "reference" else logprobs)
        policy = policy_loss(
            logratio, of_rows(lesson.advantages), settings.cliprange, settings.cliprange_high,
            settings.dual_clip,
        )  # fmt: skip
        value = value_loss(
            states[:, :-1], of_rows(episodes.values), of_rows(lesson.returns), settings.cliprange_value
        )
        with torch.set_grad_enabled(settings.entropy_coef > 0):
            entropy = entropy_from_logits(logits)
        moved = new_logprobs.detach() - logprobs
        ratio = moved.exp()
        per_token = {
            "loss/policy_avg": policy.loss,
            "loss/value_avg": value.loss,
            "policy/clipfrac_avg": policy.clipped,
            "val/clipfrac_avg": value.clipped,
            "policy/approxkl_avg": 0.5 * moved**2,
            "policy/entropy_avg": entropy,
            "val/ratio": ratio,
            "ratio_off_squared": (ratio - 1) ** 2,  # ratio² would leave its variance to rounding
            "num_tokens": mask,
        }
        if settings.kl_in == "loss":
            per_token["loss/kl_avg"] = ESTIMATORS[settings.kl_estimator](new_logprobs, ref_logprobs)
        if settings.kl_penalty is not None:
            per_token["policy/penalty_kl_avg"] = k3(logprobs, new_logprobs)
        return {key: masked_sum(x, mask) for key, x in per_token.items()}

    def _ptx_losses(
        self, demonstrations: LanguageModelling, num_rows: int, ptx: list[Sums]
    ) -> list[Callable[[], Tensor]]:
        """InstructGPT's PPO-ptx: the next demonstrations, as many as the minibatch has rows."""
        assert self._ptx is not None
        assert self._settings.ptx is not None
        drawn, coef = self._ptx.take(num_rows), self._settings.ptx.coef
        num_tokens = demonstrations.weight(drawn)

        def loss_of(group: list[int]) -> Callable[[], Tensor]:
            def compute() -> Tensor:
                batch = demonstrations.batch(group).to(self._rt.device)
                with self._rt.autocast():
                    logits, states = self.model(batch)
                found = lm_sums(logits, batch)
                ptx.append({"loss": found["loss"].detach(), "num_tokens": batch.response_mask.sum()})
                loss: Tensor = coef * found["loss"] / num_tokens + 0 * states.sum()
                return loss

            return compute

        return [loss_of(group) for group in self._groups(demonstrations.sizes, self._rt.share(drawn))]

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.penalty.beta, "ptx": self._ptx.waiting if self._ptx else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.penalty.beta = state["beta"]
        if self._ptx:
            self._ptx.waiting = state["ptx"]


def token_means(rt: Runtime, sums: Sequence[Sums]) -> Metrics:
    """Micro-batches' sums → means over all their tokens, minibatches, epochs and processes."""
    keys = list(sums[0])
    stacked = torch.stack([torch.stack([part[key] for part in sums]).double().sum() for key in keys])
    total = dict(zip(keys, rt.sum(stacked).tolist(), strict=True))
    tokens = total.pop("num_tokens")
    means = {key: value / tokens for key, value in total.items()}
    if "ratio_off_squared" in means:
        means["val/ratio_var"] = means.pop("ratio_off_squared") - (means["val/ratio"] - 1) ** 2
    return means

"""The epochs on one PPO batch: shuffled minibatches, each one optimiser step made of micro-batches.

B batch · R response.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Batch, TokenBudget, collate, padded_tokens
from rlhf_tasks.modeling.head import token_stats
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.modeling.workers import compute_beside
from rlhf_tasks.ppo.batch import PPOBatch, merged
from rlhf_tasks.ppo.kl import PenaltyController
from rlhf_tasks.ppo.losses import Coefficients, Sums, policy_terms, ptx_loss, token_loss, value_term
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling, groups, lm_loss, lm_sums, lowered

Metrics = dict[str, float]
LossPart = Callable[[PPOBatch, Sequence[int], Coefficients], tuple[Tensor, Sums]]
"""The loss of some rows, or one of its parts, and its metrics."""


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


class Step(NamedTuple):
    """One optimiser step: the sums of its micro-batches, and the norm of its gradient."""

    sums: list[Sums]
    ptx_sums: list[Sums]
    grad_norm: float


class Optimiser:
    """Trains policy and critic on PPO batches."""

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
        """`demonstrations` are PPO-ptx's text; None without it."""
        self._rt, self._settings, self.model, self.optimizer = rt, settings, model, optimizer
        self._pad, self._shuffling = pad, shuffling
        self.penalty = PenaltyController.of(settings.kl_penalty)
        self.ptx_queue = None if demonstrations is None else Queue(len(demonstrations.queries), shuffling)
        self._demonstrations = demonstrations
        self.budget = TokenBudget(settings.micro_batch_tokens)
        self._num_tokens = torch.zeros(2, dtype=torch.long)  # of an update's passes: real ones, and padded

    def optimise(self, batch: PPOBatch, *, critic_only: bool = False) -> Metrics:
        """Pass `num_ppo_epochs` times over the batch; metrics are token means.

        The minibatches are cut out of the rollout of all processes, so their number changes no step.
        Each is dealt out to the processes by itself, so that all have equally many of its rows.

        Raises:
            NonFiniteError: if a loss or gradient is NaN or infinite; the batch is its `batch`.
        """
        batch = merged(self._rt.each(batch))
        coefficients = self._coefficients(batch)
        if critic_only:
            coefficients = coefficients.for_critic_only()
        steps: list[Step] = []
        num_epochs = 0
        self._num_tokens.zero_()
        while num_epochs < self._settings.num_ppo_epochs:
            epoch = [self._step(batch, rows, coefficients, critic_only) for rows in self._mini_batches()]
            steps += epoch
            num_epochs += 1
            if self._exceeds_target_kl(epoch):
                break
        real, padded = self._rt.sum(self._num_tokens.to(self._rt.device)).tolist()
        metrics = self._means(steps) | {"train/num_epochs": num_epochs} | lowered(self.budget)
        metrics["time/padding_share"] = 1 - real / padded
        if any(step.ptx_sums for step in steps):
            metrics["loss/ptx_avg"] = token_means(self._rt, [x for s in steps for x in s.ptx_sums])["loss"]
        if self._settings.kl_penalty is not None and not critic_only:
            divergence = self._penalty_kl(batch, coefficients)
            metrics |= {"policy/penalty_beta": self.penalty.beta, "policy/penalty_kl_avg": divergence}
            self.penalty.update(divergence)
        return metrics

    def _coefficients(self, batch: PPOBatch) -> Coefficients:
        s, critic, kl_in_loss = self._settings, self._settings.critic, self._settings.kl.kind == "in_loss"
        return Coefficients(
            cliprange=s.cliprange, cliprange_high=s.cliprange_high, dual_clip=s.dual_clip,
            cliprange_value=None if critic is None else critic.cliprange_value, ratio_from=s.ratio_from,
            vf_coef=None if critic is None else critic.vf_coef,
            entropy_coef=s.entropy_coef, kl_coef=batch.kl_coef if kl_in_loss else 0.0,
            kl_estimator=s.kl.estimator if kl_in_loss else None,
            beta=None if s.kl_penalty is None else self.penalty.beta,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ one optimiser step

    def _mini_batches(self) -> list[list[int]]:
        """This process's rows of each minibatch of one epoch, shuffled."""
        whole = self._settings.rollout_batch_size
        size = whole // self._settings.num_mini_batches
        order: list[int] = torch.randperm(whole, generator=self._shuffling).tolist()
        return [self._rt.share(order[start : start + size]) for start in range(0, whole, size)]

    def _step(self, batch: PPOBatch, rows: list[int], coefficients: Coefficients, critic_only: bool) -> Step:
        """One optimiser step on the mean token loss of a minibatch of all processes."""
        num_tokens = float(self._rt.sum(batch.rollout.mask[rows].sum().float().to(self._rt.device)))
        ptx_rows = None if critic_only else self._ptx_rows()

        def losses() -> list[list[Callable[[], tuple[Tensor, Sums]]]]:
            parts: list[list[Callable[[], tuple[Tensor, Sums]]]] = [
                [
                    partial(self._mean_loss, compute, batch, group, coefficients, num_tokens)
                    for group in cut
                    for compute in self._passes
                ]
                for cut in self._groups(batch.rollout.sizes, rows)
            ]
            if ptx_rows is not None:
                for own, more in zip(parts, self._ptx_losses(ptx_rows), strict=True):
                    own += more
            return parts

        try:
            norm, sums = self._rt.step(
                self.model, self.optimizer, losses, self._settings.max_grad_norm, self.budget
            )
        except NonFiniteError as error:
            error.batch = batch.content() | {"rows": rows}
            raise
        ptx = [part for part in sums if "loss" in part]
        passes = (part for part in sums if "loss" not in part)
        whole = [dict(ChainMap(*parts)) for parts in zip(*[passes] * len(self._passes), strict=True)]
        return Step(whole, ptx, norm)

    @property
    def _passes(self) -> Sequence[LossPart]:
        """What computes PPO's loss of some rows, whole or in two parts."""
        return [self._policy_terms, self._value_term] if self._has_own_passes else [self._ppo_loss]

    @property
    def _has_own_passes(self) -> bool:
        """Whether policy and critic take turns: a worker has the activations of one model only in memory.

        Data parallelism and ZeRO need one pass with all weights.
        """
        is_wrapped = self._rt.world_size > 1 or self._rt.is_deepspeed
        return not is_wrapped and isinstance(self._models.value, TokenScores)

    @property
    def _models(self) -> ActorCritic:
        """The model where no engine is wrapped around it."""
        return cast(ActorCritic, self.model)

    def _mean_loss(
        self,
        compute: LossPart,
        batch: PPOBatch,
        rows: Sequence[int],
        coefficients: Coefficients,
        num_tokens: float,
    ) -> tuple[Tensor, Sums]:
        loss, sums = compute(batch, rows, coefficients)
        return loss / num_tokens, sums

    def _policy_terms(
        self, batch: PPOBatch, rows: Sequence[int], coefficients: Coefficients
    ) -> tuple[Tensor, Sums]:
        padded = self._padded(batch, rows)
        given = batch.micro_batch(rows, padded.response_mask)
        with self._rt.autocast():
            stats = token_stats(
                self._models.policy, padded, self._settings.temperature, token_loss(given, coefficients)
            )
        # The loss is `stats.loss`, computed by groups of tokens. Here only the metrics are computed.
        _, sums = policy_terms(stats.logprobs, stats.entropy, given, coefficients)
        return stats.loss, sums

    def _value_term(
        self, batch: PPOBatch, rows: Sequence[int], coefficients: Coefficients
    ) -> tuple[Tensor, Sums]:
        padded = self._padded(batch, rows)
        with self._rt.autocast():
            states = self._models.state_values(padded)
        return value_term(states[:, :-1], batch.micro_batch(rows, padded.response_mask), coefficients)

    def _ppo_loss(
        self, batch: PPOBatch, rows: Sequence[int], coefficients: Coefficients
    ) -> tuple[Tensor, Sums]:
        """PPO's loss of one forward pass over these rows.

        Without rows it is zero, by a pass over another row: all processes must call the model equally often.
        """
        if not rows:
            loss, sums = self._ppo_loss(batch, [0], coefficients)
            return 0 * loss, {name: 0 * x for name, x in sums.items()}
        padded = self._padded(batch, rows)
        given = batch.micro_batch(rows, padded.response_mask)
        with self._rt.autocast():
            stats, states = self.model(padded, self._settings.temperature, token_loss(given, coefficients))
        # The loss is `stats.loss`, computed by groups of tokens. Here only the metrics are computed.
        _, sums = policy_terms(stats.logprobs, stats.entropy, given, coefficients)
        if coefficients.vf_coef is None:
            return stats.loss, sums
        of_values, more = value_term(states[:, :-1], given, coefficients)
        return stats.loss + of_values, sums | more

    def _padded(self, batch: PPOBatch, rows: Sequence[int]) -> Batch:
        rollout = batch.rollout
        padded = collate([rollout.queries[i] for i in rows], [rollout.responses[i] for i in rows], self._pad)
        return padded.to(self._rt.device)

    def _ptx_rows(self) -> list[int] | None:
        """The next demonstrations, as many as a minibatch has rows."""
        size = self._settings.rollout_batch_size // self._settings.num_mini_batches
        return None if self.ptx_queue is None else self.ptx_queue.take(size)

    def _ptx_losses(self, rows: list[int]) -> list[list[Callable[[], tuple[Tensor, Sums]]]]:
        demonstrations = self._demonstrations
        assert demonstrations is not None
        num_tokens = demonstrations.weight(rows)
        return [
            [partial(self._ptx_loss, demonstrations, group, num_tokens) for group in cut]
            for cut in self._groups(demonstrations.sizes, self._rt.share(rows))
        ]

    def _ptx_loss(
        self, demonstrations: LanguageModelling, rows: list[int], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        assert self._settings.ptx is not None
        batch = demonstrations.batch(rows).to(self._rt.device)
        unused: Tensor | float = 0.0
        with self._rt.autocast():
            if self._has_own_passes:
                stats = token_stats(self._models.policy, batch, loss=lm_loss)
            else:
                stats, states = self.model(batch, loss=lm_loss)
                unused = 0 * states.sum()  # under data parallelism the critic's weights need a gradient too
        nll = lm_sums(stats)["loss"]
        loss = ptx_loss(nll, num_tokens, self._settings.ptx.coef)
        return loss + unused, {"loss": nll.detach(), "num_tokens": batch.response_mask.sum()}

    def _groups(self, sizes: Sequence[int], own: Sequence[int]) -> list[list[list[int]]]:
        cut = groups(self._rt, sizes, own, self.budget)
        padded = sum(padded_tokens(sizes, group) for part in cut for group in part)
        self._num_tokens += torch.tensor([sum(sizes[i] for i in own), padded])
        return cut

    # ------------------------------------------------------------------------------------ measurements

    def _means(self, steps: Sequence[Step]) -> Metrics:
        norms = [step.grad_norm for step in steps]
        means = token_means(self._rt, [sums for step in steps for sums in step.sums])
        first = token_means(self._rt, steps[0].sums)  # before any step: the policy is still the old one
        square = first["val/ratio_var"] + (first["val/ratio"] - 1) ** 2
        error = max(square, 0.0) ** 0.5  # rounding may leave it below 0
        return means | {"val/first_ratio_error": error, "train/grad_norm": sum(norms) / len(norms)}

    def _exceeds_target_kl(self, epoch: Sequence[Step]) -> bool:
        if self._settings.target_kl is None:
            return False
        means = token_means(self._rt, [sums for step in epoch for sums in step.sums])
        return means["policy/approxkl_avg"] > self._settings.target_kl

    @torch.no_grad()
    def _penalty_kl(self, batch: PPOBatch, coefficients: Coefficients) -> float:
        """KL(π_old ‖ π) a token, π being the policy after the epochs: d of Schulman et al. 2017, eq. 8."""
        sizes = batch.rollout.sizes
        own = self._rt.share(range(len(sizes)))
        passes = [
            [partial(self._ppo_loss, batch, group, coefficients) for group in cut]
            for cut in self._groups(sizes, own)
        ]
        return token_means(self._rt, [sums for _, sums in compute_beside(passes)])["policy/penalty_kl_avg"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "beta": self.penalty.beta,
            "ptx": self.ptx_queue.waiting if self.ptx_queue else [],
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.penalty.beta = state["beta"]
        self.budget.load_state_dict(state["budget"])
        if self.ptx_queue:
            self.ptx_queue.waiting = state["ptx"]


def token_means(rt: Runtime, sums: Sequence[Sums]) -> Metrics:
    """Sums of micro-batches → means over all their tokens, minibatches, epochs and processes."""
    keys = list(sums[0])
    stacked = torch.stack([torch.stack([part[key] for part in sums]).double().sum() for key in keys])
    total = dict(zip(keys, rt.sum(stacked).tolist(), strict=True))
    tokens = total.pop("num_tokens")
    means = {key: value / tokens for key, value in total.items()}
    if "ratio_off_squared" in means:
        means["val/ratio_var"] = means.pop("ratio_off_squared") - (means["val/ratio"] - 1) ** 2
    return means

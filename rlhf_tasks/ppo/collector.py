"""The first two steps of an update: sample a rollout from the policy, and score it with every model.

B batch · R response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids, TokenBudget, picked, realigned, sizes
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.modeling.generation import Samples, Share, sample
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.reference import Reference
from rlhf_tasks.ppo.rollout import ActorCritic, Rollout, lengths_mask, pad_rows
from rlhf_tasks.training.runtime import Runtime

T = TypeVar("T")


class Scorers(Protocol):
    """What gives responses their scores; `scorers.WeightedSum` outside of tests."""

    def parts(
        self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE
    ) -> dict[str, Tensor]:
        """(B,) by scorer, unweighted, on the CPU; `columns` are those of the prompts' rows."""

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """(B,): the weighted sum."""


def fail_together(rt: Runtime, compute: Callable[[], T], batch: Mapping[str, Any]) -> T:
    """The result of `compute`; if it meets NaN on one process, it fails on all of them.

    Raises:
        NonFiniteError: on all processes; `batch` is what the result was to be computed from.
    """
    fault, result = None, None
    try:
        result = compute()
    except NonFiniteError as error:
        fault = error
    if rt.max(int(fault is not None)):
        message = "NaN on another process" if fault is None else str(fault)
        raise NonFiniteError(message, dict(batch)) from fault
    assert result is not None
    return result


class Collector:
    """Makes rollouts of this process's share of the prompts."""

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        actor_critic: ActorCritic,
        reference: Reference,
        scorers: Scorers,
        *,
        stop: int,
        pad: int,
        seed: int,
        recomputes: bool = False,
    ) -> None:
        """With `recomputes`, the policy's own pass gives a rollout's log-probs, whoever has sampled it."""
        self._rt, self._settings, self._actor_critic = rt, settings, actor_critic
        self._reference, self._scorers, self._stop, self._pad = reference, scorers, stop, pad
        self.generator, self.budget = rt.generator(seed), TokenBudget(settings.micro_batch_tokens)
        self._recomputes = recomputes or not rt.is_float32

    @torch.no_grad()
    def sample(self, queries: list[Ids]) -> Samples:
        """One response to each row's query, `sampler.batch_size` at a time.

        The queries are n prompts, again the same n, and so on, `samples_per_prompt` times.

        Raises:
            NonFiniteError: if the policy gives no distribution; the queries are its `batch`.
        """
        return fail_together(self._rt, lambda: self._sampled(queries), {"queries": queries})

    def _sampled(self, queries: list[Ids]) -> Samples:
        num_samples = self._settings.samples_per_prompt
        with self._rt.whole(self._actor_critic.policy) as policy, self._rt.autocast():
            return sample(
                policy, queries[: len(queries) // num_samples],
                max_new_tokens=self._settings.response_length, temperature=self._settings.temperature,
                stop=self._stop, pad=self._pad, generator=self.generator,
                batch_size=getattr(self._settings.sampler, "batch_size", None), num_samples=num_samples,
                share=Share(self._rt.rank, self._rt.world_size, len(queries) * self._rt.world_size),
            )  # fmt: skip

    @torch.no_grad()
    def score(self, queries: list[Ids], samples: Samples, columns: Columns = NONE) -> Rollout:
        """The rollout: the samples with the reference's log-probs, the critic's values and the scores.

        Raises:
            NonFiniteError: if any of it is NaN or infinite; the rollout is its `batch`.
        """
        responses, width = samples.responses, self._settings.response_length
        logprobs, ref_logprobs, values, last_values = self._forward(queries, responses)
        if not self._recomputes:
            logprobs = pad_rows(samples.logprobs, width)
        batch = {"queries": queries, "responses": responses}
        parts = fail_together(self._rt, lambda: self._scorers.parts(queries, responses, columns), batch)
        rollout = Rollout(
            queries=queries,
            responses=responses,
            ended=torch.tensor([response[-1] == self._stop for response in responses]),
            mask=lengths_mask([len(response) for response in responses], width),
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            last_values=last_values,
            scores=self._scorers.total(parts),
            parts=parts,
        )
        self._require_finite(rollout)
        return rollout

    def _forward(self, queries: list[Ids], responses: list[Ids]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, R) logprobs, ref_logprobs and values, (B,) last_values; zero on padding.

        `logprobs` are computed for an engine's samples, and below float32. The sampler computes a token at a
        time, and there it rounds otherwise than training: its log-probs would make the first ratio differ
        from 1.
        """
        width, temperature = self._settings.response_length, self._settings.temperature
        logprobs, ref_logprobs, values = (torch.zeros(len(queries), width) for _ in range(3))
        last_values = torch.zeros(len(queries))
        lengths = lengths_mask([len(response) for response in responses], width)

        def forward(rows: list[int]) -> None:
            padded = picked(queries, responses, rows, self._pad)
            batch, mask, own = padded.to(self._rt.device), padded.response_mask, lengths[rows]
            with self._rt.autocast():
                reference = self._reference.logprobs(batch, temperature).float().cpu()
                if not self._recomputes:
                    states = self._actor_critic.state_values(batch)
                else:
                    stats, states = self._actor_critic(batch, temperature)
                states = states.float().cpu()
            if not rows:
                return
            if self._recomputes:
                logprobs[rows] = realigned(stats.logprobs.float().cpu(), mask, own)
            ref_logprobs[rows] = realigned(reference, mask, own)
            values[rows] = realigned(states[:, :-1], mask, own)
            last_values[rows] = states[:, -1]

        self._rt.run_batches(self.budget, sizes(queries, responses), forward)
        return logprobs, ref_logprobs, values, last_values

    def _require_finite(self, rollout: Rollout) -> None:
        names = ("logprobs", "ref_logprobs", "values", "last_values", "scores")
        wrong = [name for name in names if not bool(getattr(rollout, name).isfinite().all())]
        if self._rt.max(len(wrong)):  # all processes must stop together
            raise NonFiniteError(
                f"a rollout has NaN or infinite {', '.join(wrong) or 'numbers on another process'}",
                vars(rollout),
            )


def stop_token(settings: Ppo, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the token that ends responses."""
    return int(tokenizer.eos_token_id) if settings.stop_token == "eos" else settings.stop_token

"""Sampling a rollout and looking at it with every model.

B batch · R response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids, collate, micro_batches, sizes
from rlhf_tasks.modeling.generation import Rollout, sample
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.reference import Reference
from rlhf_tasks.ppo.rollout import ActorCritic, Episodes, lengths_mask, pad_rows
from rlhf_tasks.training.runtime import Runtime

Metrics = dict[str, float]
T = TypeVar("T")


class Scorers(Protocol):
    """What gives answers their scores; `scorers.WeightedSum` outside of tests."""

    def parts(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> dict[str, Tensor]:
        """(B,) by scorer, unweighted, on the CPU."""

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """(B,): the weighted sum."""


def agreed(rt: Runtime, compute: Callable[[], T], batch: Mapping[str, Any]) -> T:
    """What `compute` gives; where it fails for NaN on one process, all of them stop together.

    Raises:
        NonFiniteError: on all processes; `batch` is what it was computed of.
    """
    fault, found = None, None
    try:
        found = compute()
    except NonFiniteError as error:
        fault = error
    if rt.max(int(fault is not None)):
        message = "NaN on another process" if fault is None else str(fault)
        raise NonFiniteError(message, dict(batch)) from fault
    assert found is not None
    return found


class Collector:
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
    ) -> None:
        self._rt, self._settings, self._actor_critic = rt, settings, actor_critic
        self._reference, self._scorers, self._stop, self._pad = reference, scorers, stop, pad
        self.generator = rt.generator(seed)

    @torch.no_grad()
    def __call__(self, queries: list[Ids]) -> tuple[Episodes, Metrics]:
        """Sample an answer to each query; score it, and see what reference and critic say of each token.

        Raises:
            NonFiniteError: if any of it is NaN or infinite; the episodes are its `batch`.
        """
        self._actor_critic.eval()
        started = time.perf_counter()
        rollout = agreed(self._rt, lambda: self._sampled(queries), {"queries": queries})
        generated = time.perf_counter()
        responses = rollout.responses
        ref_logprobs, values, last_values = self._seen(queries, responses)
        batch = {"queries": queries, "responses": responses}
        parts = agreed(self._rt, lambda: self._scorers.parts(queries, responses), batch)
        episodes = Episodes(
            queries=queries,
            responses=responses,
            ended=torch.tensor([r[-1] == self._stop for r in responses]),
            mask=lengths_mask([len(r) for r in responses], self._settings.response_length),
            logprobs=pad_rows(rollout.logprobs, self._settings.response_length),
            ref_logprobs=ref_logprobs,
            values=values,
            last_values=last_values,
            scores=self._scorers.total(parts),
            parts=parts,
        )
        self._check(episodes)
        return episodes, {
            "time/generate_seconds": generated - started,
            "time/score_seconds": time.perf_counter() - generated,
        }

    def _sampled(self, queries: list[Ids]) -> Rollout:
        size = self._settings.sampling_batch_size or len(queries)
        whole = Rollout([], [])
        for start in range(0, len(queries), size):
            with self._rt.autocast():
                part = sample(
                    self._actor_critic.policy, queries[start : start + size],
                    max_new_tokens=self._settings.response_length, temperature=self._settings.temperature,
                    stop=self._stop, pad=self._pad, generator=self.generator,
                )  # fmt: skip
            whole = Rollout(whole.responses + part.responses, whole.logprobs + part.logprobs)
        return whole

    def _seen(self, queries: list[Ids], responses: list[Ids]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, R) ref_logprobs, (B, R) values, (B,) last_values; zero on padding."""
        width = self._settings.response_length
        ref_logprobs, values = torch.zeros(len(queries), width), torch.zeros(len(queries), width)
        last_values = torch.zeros(len(queries))
        for rows in micro_batches(sizes(queries, responses), self._settings.micro_batch_tokens):
            cut = collate([queries[i] for i in rows], [responses[i] for i in rows], self._pad)
            batch, mask, r = cut.to(self._rt.device), cut.response_mask, cut.num_response_columns
            with self._rt.autocast():
                reference = self._reference.logprobs(batch, self._settings.temperature).float().cpu()
                states = self._actor_critic.state_values(batch).float().cpu()
            ref_logprobs[rows, :r] = torch.where(mask, reference, 0)
            values[rows, :r] = torch.where(mask, states[:, :-1], 0)
            last_values[rows] = states.gather(1, mask.sum(1, keepdim=True)).squeeze(1)
        return ref_logprobs, values, last_values

    def _check(self, episodes: Episodes) -> None:
        looked_at = ("logprobs", "ref_logprobs", "values", "last_values", "scores")
        wrong = [name for name in looked_at if not bool(getattr(episodes, name).isfinite().all())]
        if self._rt.max(len(wrong)):  # all processes must stop together
            raise NonFiniteError(
                f"a rollout has NaN or infinite {', '.join(wrong) or 'numbers on another process'}",
                vars(episodes),
            )

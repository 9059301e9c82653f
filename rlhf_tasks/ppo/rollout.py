"""One rollout: answers sampled from the policy, with all that PPO learns from, on the CPU.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch, Ids, Size, collate, micro_batches, sizes
from rlhf_tasks.models import TokenScores, response_logits
from rlhf_tasks.tensors import gather_logprobs


@dataclass(frozen=True)
class Episodes:
    """This process's part of a rollout. `scores` are the reward model's, before the EOS rule."""

    queries: list[Ids]
    responses: list[Ids]
    ended: Tensor  # (B,) bool: the answer has its EOS
    mask: Tensor  # (B, R)
    logprobs: Tensor  # (B, R)
    ref_logprobs: Tensor  # (B, R)
    values: Tensor  # (B, R)
    scores: Tensor  # (B,)

    @property
    def sizes(self) -> list[Size]:
        return sizes(self.queries, self.responses)


class ActorCritic(nn.Module):
    """Policy and value model as one module, so that one optimiser and one engine hold both."""

    def __init__(self, policy: PreTrainedModel, value: TokenScores) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """((B, R, V) logits, (B, R) values): `values[t]` is read before response token t is seen."""
        return response_logits(self.policy, batch), response_values(self.value, batch)


def response_values(value: TokenScores, batch: Batch) -> Tensor:
    """(B, R): the value of the state before each response token."""
    width = batch.num_response_columns
    per_token: Tensor = value(batch)
    return per_token[:, -width - 1 : -1]


def logprobs_of(model: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
    """(B, R) log-probs of the response tokens at the sampling temperature."""
    return gather_logprobs(response_logits(model, batch).float() / temperature, batch.responses)


@torch.no_grad()
def per_token(
    compute: Callable[[Batch], Tensor],
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    *,
    width: int,
    pad: int,
    max_tokens: int,
    device: torch.device,
) -> Tensor:
    """`compute`'s (b, r) of every micro-batch put together as (B, width), zero on padding."""
    result = torch.zeros((len(queries), width))
    for rows in micro_batches(sizes(queries, responses), max_tokens):
        batch = collate([queries[i] for i in rows], [responses[i] for i in rows], pad)
        found = compute(batch.to(device)).float().cpu()
        result[rows, : found.shape[1]] = torch.where(batch.response_mask, found, 0)
    return result


def pad_rows(rows: Sequence[Tensor], width: int) -> Tensor:
    """Tensors of different lengths as (B, width), zero on padding."""
    result = torch.zeros((len(rows), width))
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result


def lengths_mask(lengths: Sequence[int], width: int) -> Tensor:
    """(B, width) bool, True below each row's length."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]

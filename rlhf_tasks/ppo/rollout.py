"""One rollout: responses sampled from the policy, and all numbers that PPO learns from, on the CPU.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch, Ids, sizes
from rlhf_tasks.modeling.head import TokenStats, head_states, token_stats
from rlhf_tasks.modeling.load import TokenScores
from rlhf_tasks.modeling.vocabulary import Loss


@dataclass(frozen=True)
class Rollout:
    """The rollout of all processes, or this one's share of it."""

    queries: list[Ids]
    responses: list[Ids]
    ended: Tensor  # (B,) bool: the response has its stop token
    mask: Tensor  # (B, R)
    logprobs: Tensor  # (B, R)
    ref_logprobs: Tensor  # (B, R)
    values: Tensor  # (B, R), of the state before each token; 0 without a critic
    last_values: Tensor  # (B,), of the state after the last token
    scores: Tensor  # (B,), the scorers' weighted sum, before scaling and the EOS rule
    parts: dict[str, Tensor]  # each scorer's own, (B,)
    importance: Tensor | None = None  # (B, R), of tokens that an engine sampled; None without one

    @property
    def sizes(self) -> list[int]:
        return sizes(self.queries, self.responses)


class ValueHead(nn.Linear):
    """A critic without a trunk of its own: a linear map of the policy's hidden state to one number.

    It starts at zero, as in lm-human-preferences: a random head would add noise to the first advantages.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class NoCritic(nn.Module):
    """The critic where advantages need none: it has no weights, and every value is 0."""

    def forward(self, batch: Batch) -> Tensor:
        """(B, R + 1) zeros."""
        num_rows, width = batch.response_mask.shape
        return torch.zeros(num_rows, width + 1, device=batch.response_mask.device)


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one optimiser and one engine hold both.

    The critic is a model of its own, or a head on the policy's trunk, or there is none.
    """

    def __init__(self, policy: PreTrainedModel, value: TokenScores | ValueHead | NoCritic) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def forward(
        self, batch: Batch, temperature: float = 1.0, loss: Loss | None = None
    ) -> tuple[TokenStats, Tensor]:
        """The policy's statistics, and (B, R + 1) values: before each response token, and after the last."""
        stats = token_stats(self.policy, batch, temperature, loss)
        if isinstance(self.value, ValueHead):
            return stats, self.value(stats.states).squeeze(-1).float()
        return stats, self.state_values(batch)

    def state_values(self, batch: Batch) -> Tensor:
        """(B, R + 1): `[:, t]` is the value of the state before response token t is seen."""
        if isinstance(self.value, ValueHead):
            found: Tensor = self.value(head_states(self.policy, batch))
            return found.squeeze(-1).float()
        values: Tensor = self.value(batch)
        return values


def logprobs_of(model: nn.Module, batch: Batch, temperature: float) -> Tensor:
    """(B, R) log-probs of the response tokens at the sampling temperature; zero on padding."""
    return token_stats(model, batch, temperature).logprobs


def pad_rows(rows: Sequence[Tensor], width: int) -> Tensor:
    """Tensors of different lengths as (B, width), zero on padding."""
    result = torch.zeros((len(rows), width))
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result


def lengths_mask(lengths: Sequence[int], width: int) -> Tensor:
    """(B, width) bool, True below each row's length."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]

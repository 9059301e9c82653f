"""What gives an answer a number: used by PPO's reward and by judges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.data.batches import Ids, collate, micro_batches, sizes
from rlhf_tasks.models import TokenScores, last_token


class RewardScorer:
    """A reward model as a function of token ids: the score of each row's last real token."""

    def __init__(
        self, scores: TokenScores, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 16384
    ) -> None:
        self._scores, self._pad, self._max_tokens = scores.eval(), tokenizer.pad_token_id, max_tokens
        self._device = next(scores.parameters()).device

    @torch.no_grad()
    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """(B,) float32 on the CPU, in the order of the rows."""
        result = torch.zeros(len(queries))
        for rows in micro_batches(sizes(queries, responses), self._max_tokens):
            batch = collate([queries[i] for i in rows], [responses[i] for i in rows], self._pad).to(
                self._device
            )
            result[rows] = last_token(self._scores(batch), batch).cpu()
        return result

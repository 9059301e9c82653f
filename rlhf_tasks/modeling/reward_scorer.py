"""A reward model as a function of token ids; stage reward depends on this scorer alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.data.batches import Ids, TokenBudget, picked, sizes
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.modeling.load import TokenScores
from rlhf_tasks.modeling.placement import OneDevice, Placement


class RewardScorer:
    """A reward model as a function of token ids: the score of each row's last real token."""

    def __init__(
        self,
        scores: TokenScores,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 16384,
        placement: Placement | None = None,
    ) -> None:
        """`placement` is where the model is or will be put; None: where it is now."""
        self._scores, self._pad, self._budget = scores.eval(), tokenizer.pad_token_id, TokenBudget(max_tokens)
        self._placement = placement or OneDevice(next(scores.parameters()).device)

    @torch.no_grad()
    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        """(B,) float32 on the CPU, in the order of the rows."""
        result = torch.zeros(len(queries))

        def score(rows: list[int]) -> None:
            batch = picked(queries, responses, rows, self._pad).to(self._placement.device)
            result[rows] = self._scores(batch, ends_only=True)[: len(rows), 0].cpu()

        self._placement.run_batches(self._budget, sizes(queries, responses), score)
        return result

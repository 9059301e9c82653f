"""Arithmetic of scorers: what several reward models say as one score, and the soft penalty on length.

M reward models · B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_tasks.config.scorers import Combination


def combined(scores: Tensor, rule: Combination) -> Tensor:
    """(M, B) weighted scores of reward models → (B,).

    `sum`, `min` (worst-case optimisation of arXiv 2310.02743), or the mean minus a multiple of the standard
    deviation over the models, which divides by M.
    """
    if rule == "sum":
        return scores.sum(dim=0)
    if rule == "min":
        return scores.amin(dim=0)
    return scores.mean(dim=0) - rule.mean_minus_deviations * scores.std(dim=0, correction=0)


def length_penalties(lengths: Sequence[int], max_tokens: int, buffer: int) -> Tensor:
    """(B,) float32, 0 to −1: the soft over-length penalty of DAPO (arXiv 2503.14476, eq. 13).

    0 up to max_tokens − buffer, then (max_tokens − buffer − length) / buffer, and −1 above max_tokens.
    """
    start = max_tokens - buffer
    return ((start - torch.tensor(lengths, dtype=torch.float32)) / buffer).clamp(-1.0, 0.0)

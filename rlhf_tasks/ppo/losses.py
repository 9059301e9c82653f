"""PPO's clipped losses, per token, before any mean.

B batch · R response; every tensor is (B, R).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """bool: a clipped term stands in the loss, so that this token's gradient is cut."""


def policy_loss(
    logratio: Tensor,
    advantages: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(−A·ratio, −A·clip(ratio, 1 − cliprange, 1 + cliprange_high)), ratio = exp(logratio).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7. With `dual_clip`, where A < 0 the loss is at most
    dual_clip · |A|: an unlikely bad token that became likely must not blow up the step
    (arXiv 1912.09729, eq. 5).
    """
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = logratio.exp()
    free, cut = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high)
    loss, clipped = torch.maximum(free, cut), cut > free
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
        loss, clipped = torch.minimum(loss, ceiling), clipped | (loss > ceiling)
    return TokenLoss(loss, clipped)


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float | None
) -> TokenLoss:
    """½·max((V − G)², (V_old + clip(V − V_old, ±cliprange_value) − G)²), G the return; null: no clip.

    The ½ is in, vf_coef is not, as in lm-human-preferences.
    """
    free = (new_values - returns) ** 2
    if cliprange_value is None:
        return TokenLoss(0.5 * free, torch.zeros_like(free, dtype=torch.bool))
    moved = new_values - values
    cut = (values + moved.clamp(-cliprange_value, cliprange_value) - returns) ** 2
    # within the range `cut` is `free` but for rounding, which is no clip
    return TokenLoss(0.5 * torch.maximum(free, cut), (cut > free) & (moved.abs() > cliprange_value))

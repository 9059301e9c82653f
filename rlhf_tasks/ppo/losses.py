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
    """bool: the clipped term was the larger, so that this token's gradient is cut."""


def policy_loss(logratio: Tensor, advantages: Tensor, cliprange: float) -> TokenLoss:
    """max(−A·ratio, −A·clip(ratio, 1 ± cliprange)), ratio = exp(new_logprobs − logprobs).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7.
    """
    ratio = logratio.exp()
    free, cut = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return TokenLoss(torch.maximum(free, cut), cut > free)


def value_loss(new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> TokenLoss:
    """½·max((V − G)², (V_old + clip(V − V_old, ±cliprange_value) − G)²), G the return.

    The ½ is in, vf_coef is not, as in lm-human-preferences.
    """
    near = values + (new_values - values).clamp(-cliprange_value, cliprange_value)
    free, cut = (new_values - returns) ** 2, (near - returns) ** 2
    return TokenLoss(0.5 * torch.maximum(free, cut), cut > free)

"""From one score an answer to one reward a token.

Departure from TRL: the score lands on the last real response token (EOS, or the last one of a
truncated answer); TRL adds it one slot after EOS when there is room.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replace_missing_eos(scores: Tensor, ended: Tensor, missing_eos_score: float) -> Tensor:
    """The EOS trick: an answer that did not end scores `missing_eos_score`, whatever the model said.

    scores (B,), ended (B,) bool. Ziegler et al. 2019; arXiv 2403.17031, detail 4.2.
    """
    return torch.where(ended, scores, missing_eos_score)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """−kl_coef · kl on each real token, plus the score on the last one; (B, R), zero on padding.

    Ziegler et al. 2019, eq. 2, spread over tokens.
    """
    last = mask.sum(dim=1, keepdim=True) - 1
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, -kl_coef * kl, 0) + (columns == last) * scores[:, None]

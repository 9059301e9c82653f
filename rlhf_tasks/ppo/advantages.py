"""Generalised advantage estimation over responses of different lengths.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, R), zero on padding.

        δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   return_t = A_t + V_t

    `values[t]` is the value of the state before token t. The state after the last real token is terminal
    and has value 0.
    Schulman et al. 2016, arXiv 1506.02438, eq. 16.
    """
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return torch.where(mask, advantages, 0), torch.where(mask, advantages + values, 0)

"""REINFORCE with the mean return of the rollout as the baseline; it needs no critic.

With `ppo.whiten_advantages: true` it is the global normalization of REINFORCE++ (arXiv 2501.03262).
"""

import torch
from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.rollout import Rollout


def batch_mean(rewards: Tensor, rollout: Rollout, config: Ppo) -> tuple[Tensor, Tensor]:
    """Each token's remaining rewards minus the mean return of all responses, of all ranks: (B, R) each."""
    rewards = torch.where(rollout.mask, rewards, 0)
    returns = rewards.flip(1).cumsum(1).flip(1)  # from each token to the end
    baseline = rewards.sum(1).mean()
    return (returns - baseline) * rollout.mask, returns * rollout.mask

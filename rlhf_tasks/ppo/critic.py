"""The critics that training starts from: stage value's and PPO's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from rlhf_tasks.models.heads import TokenScores, score_head
from rlhf_tasks.models.load import add_score_head, load_reward
from rlhf_tasks.project.paths import Paths


def new_critic(paths: Paths, init: Literal["reward", "sft", "base", "value"], seed: int) -> TokenScores:
    """A model with its trained head, or a trunk under a new head that starts at zero."""
    if init in ("reward", "value"):
        return load_reward(paths.reward if init == "reward" else paths.value)
    critic = add_score_head(paths.start if init == "sft" else paths.base, torch.Generator().manual_seed(seed))
    nn.init.zeros_(score_head(critic.model).weight)
    return critic

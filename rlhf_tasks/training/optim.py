"""AdamW, its moments, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rlhf_tasks.config import Optimization, Ppo


def adamw(model: nn.Module, settings: Optimization | Ppo) -> torch.optim.AdamW:
    """AdamW with eps 1e-5 (arXiv 2403.17031); in supervised training betas .9/.98 (arXiv 1706.03762).

    Biases and norms have no weight decay; nothing has in PPO.
    """
    if isinstance(settings, Optimization):
        weight_decay, betas = settings.weight_decay, (0.9, 0.98)
    else:
        weight_decay, betas = 0.0, settings.adam_betas
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    eps: float = getattr(settings, "adam_eps", 1e-5)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=eps, fused=True)


def learning_rate(settings: Optimization | Ppo, step: int, num_steps: int) -> float:
    """The rate of step 0 … num_steps − 1: linear warm-up, then constant, linear or cosine to zero."""
    warmup = math.ceil(settings.warmup_fraction * num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return settings.learning_rate * decay(settings.schedule, done)


def decay(schedule: str, done: float) -> float:
    """The share of the peak rate where a share `done` of the steps after the warm-up is."""
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, of_critic: float | None = None) -> None:
    """Set the rate of all groups; the critic's have a `scale` and get that multiple, or `of_critic`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if "scale" in group:
            group["lr"] = rate * group["scale"] if of_critic is None else of_critic


def reset_moments(optimizer: torch.optim.Optimizer, num_groups: int) -> None:
    """Set the moments of an AdamW's first groups to zero, and the step counts that correct them."""
    weights = [weight for group in optimizer.param_groups[:num_groups] for weight in group["params"]]
    moments: Any = optimizer.state
    zero3: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps DeepSpeed's optimizer
    if hasattr(zero3, "fp32_partitioned_groups_flat"):  # which keeps the moments of pieces of groups
        group_of, moments = zero3.sub_group_to_group_id, zero3.optimizer.state
        pieces = enumerate(zero3.fp32_partitioned_groups_flat)
        weights = [piece for number, piece in pieces if group_of[number] < num_groups]
    for weight in weights:
        for moment in moments.get(weight, {}).values():
            moment.zero_()

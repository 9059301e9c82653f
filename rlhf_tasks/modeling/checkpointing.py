"""Gradient checkpointing of a model in eval mode.

transformers checkpoints layers in training mode only, and in training mode their dropout is on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_tasks.errors import UserError


def recompute_activations(model: PreTrainedModel) -> None:
    """Let the backward pass compute the activations of every layer again, so that they need no memory.

    Raises:
        UserError: if the family has no layers that can be computed again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UserError(
            f"ppo.gradient_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer.forward = partial(_checkpoint_layer, layer.forward)


def _checkpoint_layer(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # the layer draws nothing in eval mode: no RNG state is worth keeping
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **named)

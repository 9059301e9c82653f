"""`launch.compile`: torch compiles a model's layers for the passes that train it.

The layers of a model have the same code, so that it is compiled once for all of them, for every number of
rows and tokens. The last one is left out, because each pass changes parts of it (`modeling.last_layer`).
Sampling and scoring are not compiled: a cache that grows by every token would be compiled again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_tasks.errors import UserError


def compile_layers(model: nn.Module) -> None:
    """Compile the layers, for use within `compiled_layers` alone.

    Raises:
        UserError: if torch cannot compile here.
    """
    _try_to_compile(next(model.parameters()).device)
    torch.compiler.set_stance("force_eager")
    for layers in _stacks(model):
        for layer in layers[:-1]:
            layer.compile(dynamic=True)


def compiled_layers() -> AbstractContextManager[None]:
    """Within the block, compiled layers run as compiled."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("default")
    return stance


def _stacks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The layers of each model of transformers in a module, from the first to the last."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            layers = list(module)
            if layers and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
                yield layers


def _try_to_compile(device: torch.device) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x + x

    try:
        with torch.compiler.set_stance("default"):
            torch.compile(doubled)(torch.ones(8, device=device))
    except RuntimeError as error:  # what torch._dynamo raises
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"launch.compile: true, but torch cannot compile on this machine ({reason}); install a C++ "
            "compiler (g++), or set launch.compile to false"
        ) from error

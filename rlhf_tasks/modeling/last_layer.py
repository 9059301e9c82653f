"""Spares the last layer the columns whose states nobody reads: those of the prompt.

A column of the last layer is read by no other column after its attention. So the output projection of that
attention and the MLP, two thirds of a layer, need only the columns before and of the response.

B batch · T columns · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

LAYERS: Mapping[str, tuple[str, str, str]] = {
    "gpt_neox": ("layers", "attention.dense", "mlp"),
    "gpt2": ("h", "attn.c_proj", "mlp"),
    "llama": ("layers", "self_attn.o_proj", "mlp"),
    "qwen2": ("layers", "self_attn.o_proj", "mlp"),
}
"""By model type: the list of layers, and in each the two parts that treat every column by itself."""


@contextmanager
def last_columns_only(model: PreTrainedModel, columns: int) -> Iterator[None]:
    """Within the block, the last layer's states are right in the last `columns` columns, and elsewhere wrong.

    A model of another family computes all columns as ever, as does one with gradient checkpointing: its
    layers run again in the backward pass, after the block.
    """
    names = LAYERS.get(model.config.model_type)
    with ExitStack() as stack:
        if names is not None:
            layers, *parts = names
            last = getattr(model.base_model, layers)[-1]
            for part in [] if last.gradient_checkpointing else map(last.get_submodule, parts):
                stack.enter_context(forward_replaced(part, partial(_last_columns, part.forward, columns)))
        yield


def _last_columns(forward: Callable[[Tensor], Tensor], columns: int, hidden: Tensor) -> Tensor:
    """(B, T, H) → (B, T, H), zero before the last `columns` columns."""
    found = forward(hidden[:, -columns:].contiguous())
    return F.pad(found, (0, 0, hidden.shape[1] - found.shape[1], 0))


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block the module has another forward function; its hooks stay."""
    original = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if original is not None:
            module.forward = original

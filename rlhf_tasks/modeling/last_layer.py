"""Spares the last layer the columns whose states nobody reads.

A column of the last layer is read by no other column after its attention. So the output projection of that
attention and the MLP, two thirds of a layer, need only the columns before and of the response; where a
response has one score, only its last column.

B batch · T columns · N columns that are read · H hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

Forward = Callable[..., Any]
_LOCK = threading.Lock()

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
    with _last_layer_treats(model, partial(_last_columns, columns)):
        yield


@contextmanager
def columns_only(model: PreTrainedModel, columns: Tensor) -> Iterator[None]:
    """`last_columns_only` for any N columns of each row, (B, N)."""
    with _last_layer_treats(model, partial(_columns, columns[:, :, None])):
        yield


@contextmanager
def _last_layer_treats(model: PreTrainedModel, treat: Callable[[Forward, Tensor], Tensor]) -> Iterator[None]:
    """Within the block, `treat` is called for the two parts, with their own function and their input."""
    names = LAYERS.get(model.config.model_type)
    with ExitStack() as stack:
        if names is not None:
            layers, *parts = names
            last = getattr(model.base_model, layers)[-1]
            for part in [] if last.gradient_checkpointing else map(last.get_submodule, parts):
                stack.enter_context(forward_replaced(part, treat))
        yield


def _last_columns(columns: int, forward: Forward, hidden: Tensor) -> Tensor:
    """(B, T, H) → (B, T, H), zero before the last `columns` columns."""
    found = forward(hidden[:, -columns:].contiguous())
    return F.pad(found, (0, 0, hidden.shape[1] - found.shape[1], 0))


def _columns(columns: Tensor, forward: Forward, hidden: Tensor) -> Tensor:
    """(B, T, H) → (B, T, H), zero in all but these (B, N, 1) columns."""
    found = forward(hidden.take_along_dim(columns, 1))
    result: Tensor = found.new_zeros(*hidden.shape[:2], found.shape[2])
    return result.scatter_(1, columns.expand_as(found), found)


class _Switch:
    """A module's forward function while threads replace it, each for itself."""

    def __init__(self, module: nn.Module) -> None:
        self._original: Forward = module.forward
        self._own, self._num_users = vars(module).get("forward"), 0
        self._local = threading.local()

    def __call__(self, *given: Any, **named: Any) -> Any:
        replacement: Callable[..., Any] | None = getattr(self._local, "forward", None)
        if replacement is None:
            return self._original(*given, **named)
        return replacement(self._original, *given, **named)

    @classmethod
    @contextmanager
    def at(cls, module: nn.Module) -> Iterator[_Switch]:
        """The module's switch, which stays there as long as any thread uses it."""
        with _LOCK:
            found = vars(module).get("forward")
            switch = found if isinstance(found, cls) else cls(module)
            module.forward = switch
            switch._num_users += 1
        try:
            yield switch
        finally:
            with _LOCK:
                switch._num_users -= 1
                if not switch._num_users:
                    del module.forward
                    if switch._own is not None:
                        module.forward = switch._own

    @contextmanager
    def turned(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Within the block, this thread's calls go to the replacement."""
        before = getattr(self._local, "forward", None)
        self._local.forward = replacement
        try:
            yield
        finally:
            self._local.forward = before


@contextmanager
def forward_replaced(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the block this thread's calls of the module go to `replacement(original, …)`; its hooks stay.

    `original` is the module's forward function, which other threads call meanwhile.
    """
    with _Switch.at(module) as switch, switch.turned(replacement):
        yield

"""Spares the last layer the columns whose states nobody reads, and gives all layers `attention.Attention`.

A column of the last layer is read by no other column after its attention. So the output projection of that
attention and the MLP, two thirds of a layer, need only the columns before and of the response; where a
response has one score, only its last column.

B batch · T columns · N columns that are read · H hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlhf_tasks.modeling.attention import Attention, Pick, has_plain_attention

Forward = Callable[..., Any]
_LOCK = threading.Lock()

LAYERS: Mapping[str, tuple[str, str, str]] = {
    "gpt_neox": ("layers", "attention.dense", "mlp"),
    "gpt2": ("h", "attn.c_proj", "mlp"),
    "llama": ("layers", "self_attn.o_proj", "mlp"),
    "qwen2": ("layers", "self_attn.o_proj", "mlp"),
}
"""By model type: the list of layers, and in each the two parts that treat every column by itself."""


class _Columns(NamedTuple):
    """Which columns are read."""

    pick: Pick
    spread: Callable[[Tensor, int], Tensor]
    """(B, N, H) → (B, T, H), given T: zero in all other columns."""


@contextmanager
def last_columns_only(model: PreTrainedModel, columns: int) -> Iterator[None]:
    """Within the block, the last layer's states are right in the last `columns` columns, and elsewhere wrong.

    A model of another family computes all columns as ever, as does one with gradient checkpointing: its
    layers run again in the backward pass, after the block.
    """

    def pick(x: Tensor) -> Tensor:
        return x[:, -columns:].contiguous()

    def spread(found: Tensor, width: int) -> Tensor:
        return F.pad(found, (0, 0, width - found.shape[1], 0))

    with _reading(model, _Columns(pick, spread)):
        yield


@contextmanager
def columns_only(model: PreTrainedModel, columns: Tensor) -> Iterator[None]:
    """`last_columns_only` for any N columns of each row, (B, N)."""

    def pick(x: Tensor) -> Tensor:
        return x.take_along_dim(columns.view(*columns.shape, *[1] * (x.ndim - 2)), 1)

    def spread(found: Tensor, width: int) -> Tensor:
        result: Tensor = found.new_zeros(len(found), width, found.shape[2])
        return result.scatter_(1, columns[:, :, None].expand_as(found), found)

    with _reading(model, _Columns(pick, spread)):
        yield


@contextmanager
def _reading(model: PreTrainedModel, columns: _Columns) -> Iterator[None]:
    """Within the block, the last layer treats these columns only. Layers have `Attention` where they can."""
    with ExitStack() as stack:
        for module, replacement in _replacements(model, columns):
            stack.enter_context(forward_replaced(module, replacement))
        yield


def _replacements(model: PreTrainedModel, columns: _Columns) -> Iterator[tuple[nn.Module, Forward]]:
    names = LAYERS.get(model.config.model_type)
    if names is None:
        return
    of_layers, projection, mlp = names
    layers = list(getattr(model.base_model, of_layers))
    if layers[-1].gradient_checkpointing:
        return
    yield layers[-1].get_submodule(mlp), partial(_treated, columns)
    inner, _, output = projection.rpartition(".")
    attentions = [layer.get_submodule(inner) for layer in layers]
    if _has_compiled(layers) or not has_plain_attention(model, attentions):
        yield layers[-1].get_submodule(projection), partial(_treated, columns)
        return
    attention = Attention()
    for module in attentions:
        own = columns if module is attentions[-1] else None
        yield module, partial(_attended, attention, module, output, own)


def _has_compiled(layers: Sequence[nn.Module]) -> bool:
    return any(layer._compiled_call_impl is not None for layer in layers)


def _treated(columns: _Columns, forward: Forward, hidden: Tensor) -> Tensor:
    """(B, T, H) → (B, T, H), of a part that treats every column by itself."""
    return columns.spread(forward(columns.pick(hidden)), hidden.shape[1])


def _attended(
    attention: Attention,
    module: nn.Module,
    output: str,
    columns: _Columns | None,
    _: Forward,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_named: Any,
) -> tuple[Tensor, None]:
    """What an attention module returns, from the arguments that transformers gives it.

    The others, in `_named`, are for passes with a cache; here there is none.
    """
    pick = None if columns is None else columns.pick
    heads = attention(module, pick, hidden_states, attention_mask, position_embeddings)
    found = module.get_submodule(output)(heads)
    return (found if columns is None else columns.spread(found, hidden_states.shape[1])), None


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

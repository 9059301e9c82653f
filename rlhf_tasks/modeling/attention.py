"""The attention of the known families on a CPU, with fewer passes over memory than transformers needs.

transformers rotates queries and keys by their positions in a dozen operations on short pieces of a head. Here
each pair of numbers is one complex number, and one product rotates all of them (arXiv 2104.09864, 3.2.2).
For that the two numbers of a pair must be neighbours. So the rows of the projections' weights are reordered
in each pass. Queries and keys are reordered alike, which changes no product of the two.

Where only some columns are read, queries are made for these alone.

B batch · T columns · N columns that are read · H hidden · A heads · D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlhf_tasks.modeling.products import LINEAR, product_of

Pick = Callable[[Tensor], Tensor]
"""(B, T, …) → (B, N, …): the columns that are read."""


class _Projections(NamedTuple):
    """What makes queries, keys and values of states, as one linear layer."""

    layer: nn.Linear
    """One of the layers that they come from."""
    weight: Tensor
    """(rows, H): the rows of all queries, then of all keys, then of all values."""
    bias: Tensor | None

    def product(self, hidden: Tensor, rows: slice, width: int) -> Tensor:
        """Some rows' part of the projections, by heads: (B, N, H) → (B, N, heads, D)."""
        bias = None if self.bias is None else self.bias[rows]
        found: Tensor = product_of(self.layer)(hidden, self.weight[rows], bias).unflatten(-1, (-1, width))
        return found


def has_plain_attention(model: PreTrainedModel, attentions: Iterable[nn.Module]) -> bool:
    """Whether `Attention` computes what these attention modules of the model do.

    They must be causal, without a window or dropout, and their projections unchanged linear layers with whole
    weights in float32 or float64 on the CPU.
    """
    config = model.config
    if (
        config.model_type not in _PROJECTIONS
        or config._attn_implementation != "sdpa"
        or not getattr(config, "is_causal", True)
        or getattr(config, "sliding_window", None) is not None
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    return all(map(_is_known, attentions))


def _is_known(module: Any) -> bool:
    has_dropout = module.training and module.attention_dropout > 0
    is_linear = (_is_plain(x) for x in module.children() if next(x.parameters(), None) is not None)
    return module.is_causal and not has_dropout and _width(module) % 2 == 0 and all(is_linear)


def _width(module: Any) -> int:
    width: int | None = getattr(module, "head_dim", None)  # the config's may differ from H / A
    return width or module.config.hidden_size // module.config.num_attention_heads


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is linear, nothing changes its call, and it has whole weights of its own on the CPU."""
    if type(module) not in LINEAR or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and not hasattr(weight, "ds_id")  # ZeRO-3's
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


class Attention:
    """The attention of all layers in one pass through a model."""

    def __init__(self) -> None:
        self._cosines: Tensor | None = None
        self._rotations = torch.empty(0)

    def __call__(
        self,
        module: Any,
        pick: Pick | None,
        hidden: Tensor,
        mask: Tensor | None,
        positions: tuple[Tensor, Tensor],
    ) -> Tensor:
        """(B, T, H) → (B, N, A · D), the output projection's input; N is T without `pick`.

        `mask` is (B, 1, T, T), True where a token sees another one; None is a causal one. `positions` are
        the cosines and sines that transformers computes, (B, T, 2 · pairs) each.
        """
        width = _width(module)
        num_heads = module.config.num_attention_heads
        made = _PROJECTIONS[module.config.model_type](module, width, positions[0].shape[-1] // 2)
        num_keys = (len(made.weight) // width - num_heads) // 2
        rotations = self._rotations_of(positions, width)
        if pick is None:
            heads = made.product(hidden, slice(None), width)
            rotated, v = heads.split([num_heads + num_keys, num_keys], 2)
            v = v.contiguous()  # a view would keep the whole product until the backward pass
            q, k = _rotated(rotated, rotations).split([num_heads, num_keys], 2)
        else:
            mask, of_queries = _seen_from(pick, mask, hidden), num_heads * width
            q = _rotated(made.product(pick(hidden), slice(of_queries), width), pick(rotations))
            k, v = made.product(hidden, slice(of_queries, None), width).chunk(2, 2)
            k = _rotated(k, rotations)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if q.shape[1] != k.shape[1]:  # several heads share their keys and values
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=module.scaling
        )
        return found.transpose(1, 2).flatten(2)

    def _rotations_of(self, positions: tuple[Tensor, Tensor], width: int) -> Tensor:
        """(B, T, 1, D / 2) complex: by what each pair of a head is multiplied; 1 if it is not rotated."""
        cosines = positions[0]
        if self._cosines is not cosines:
            pairs = cosines.shape[-1] // 2  # transformers has each angle twice, once for each of a pair
            angles = (x[..., :pairs] for x in positions)
            rotations = F.pad(torch.complex(*angles), (0, width // 2 - pairs), value=1)
            self._cosines, self._rotations = cosines, rotations.unsqueeze(2)
        return self._rotations


def _seen_from(pick: Pick, mask: Tensor | None, hidden: Tensor) -> Tensor:
    """The mask of the columns that are read: (B, 1, N, T)."""
    count, columns = hidden.shape[:2]
    if mask is None:
        mask = torch.ones(columns, columns, dtype=torch.bool, device=hidden.device).tril()[None, None]
    return pick(mask.expand(count, -1, -1, -1).squeeze(1)).unsqueeze(1)


def _rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    """(B, N, heads, D), rotated by (B, N, 1, D / 2)."""
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2)


@cache
def _rows(num_heads: int, width: int, pairs: int, start: int, step: int) -> Tensor:
    """The rows of one of a linear layer's projections, with the two numbers of a pair side by side.

    Head i has the rows from `start + i · step`. Number j and number `pairs + j` of a head are a pair.
    """
    with torch.inference_mode(False):  # else a pass of such a mode would leave tensors that no other can use
        order = torch.arange(width, device="cpu")
        order[: 2 * pairs] = order[: 2 * pairs].view(2, pairs).t().flatten()
        return (start + step * torch.arange(num_heads, device="cpu")[:, None] + order).flatten()


@cache
def _joined_rows(num_heads: int, width: int, pairs: int) -> Tensor:
    """The rows of a layer that has the query, key and value of the first head, then of the next one."""
    rotated = (pairs, pairs, 0)  # values are not
    with torch.inference_mode(False):
        return torch.cat([_rows(num_heads, width, p, i * width, 3 * width) for i, p in enumerate(rotated)])


def _from_one_layer(module: Any, width: int, pairs: int) -> _Projections:
    layer = module.query_key_value
    rows = _joined_rows(layer.out_features // (3 * width), width, pairs)
    bias = None if layer.bias is None else layer.bias.index_select(0, rows)
    return _Projections(layer, layer.weight.index_select(0, rows), bias)


def _from_three_layers(module: Any, width: int, pairs: int) -> _Projections:
    layers = (module.q_proj, module.k_proj, module.v_proj)
    q, k = (_rows(x.out_features // width, width, pairs, 0, width) for x in layers[:2])
    rows = (q, k, None)

    def joined(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(
            [x if i is None else x.index_select(0, i) for x, i in zip(tensors, rows, strict=True)]
        )

    bias = None if layers[0].bias is None else joined(x.bias for x in layers)
    return _Projections(layers[0], joined(x.weight for x in layers), bias)


_PROJECTIONS: Mapping[str, Callable[[Any, int, int], _Projections]] = {
    "gpt_neox": _from_one_layer,
    "llama": _from_three_layers,
    "qwen2": _from_three_layers,
}

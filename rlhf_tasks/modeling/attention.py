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

from rlhf_tasks.modeling.products import RoundedLinear, rounded_product

Pick = Callable[[Tensor], Tensor]
"""(B, T, …) → (B, N, …): the columns that are read."""


class _Part(NamedTuple):
    """A projection: the linear layer, and which of its rows, in which order."""

    linear: nn.Linear
    rows: Tensor | None


def has_plain_attention(model: PreTrainedModel, attentions: Iterable[nn.Module]) -> bool:
    """Whether `Attention` computes what these attention modules of the model do.

    They must be causal, without a window or dropout, and their projections unchanged linear layers with whole
    weights in float32 or float64 on the CPU.
    """
    config = model.config
    if (
        config.model_type not in _PARTS
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
    if type(module) not in (nn.Linear, RoundedLinear) or "forward" in vars(module):
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
        queries, keys, values = _PARTS[module.config.model_type](module, width, positions[0].shape[-1] // 2)
        rotations = self._rotations_of(positions, width)
        read, read_rotations = hidden, rotations
        if pick is not None:
            read, read_rotations, mask = pick(hidden), pick(rotations), _seen_from(pick, mask, hidden)
        q = _heads(queries, read, width, read_rotations)
        k, v = _heads(keys, hidden, width, rotations), _heads(values, hidden, width, None)
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


def _heads(part: _Part, hidden: Tensor, width: int, rotations: Tensor | None) -> Tensor:
    """A projection by heads, rotated by (B, N, 1, D / 2): (B, N, H) → (B, A, N, D)."""
    linear, rows = part
    weight, bias = (
        x if x is None or rows is None else x.index_select(0, rows) for x in (linear.weight, linear.bias)
    )
    multiply: Callable[..., Tensor] = rounded_product if isinstance(linear, RoundedLinear) else F.linear
    heads: Tensor = multiply(hidden, weight, bias).unflatten(-1, (-1, width))
    if rotations is not None:
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        heads = torch.view_as_real(pairs * rotations).flatten(-2)
    return heads.transpose(1, 2)


@cache
def _rows(num_heads: int, width: int, pairs: int, start: int, step: int) -> Tensor:
    """The rows of one of a linear layer's projections, with the two numbers of a pair side by side.

    Head i has the rows from `start + i · step`. Number j and number `pairs + j` of a head are a pair.
    """
    with torch.inference_mode(False):  # else a pass of such a mode would leave tensors that no other can use
        order = torch.arange(width, device="cpu")
        order[: 2 * pairs] = order[: 2 * pairs].view(2, pairs).t().flatten()
        return (start + step * torch.arange(num_heads, device="cpu")[:, None] + order).flatten()


def _joined_parts(module: Any, width: int, pairs: int) -> tuple[_Part, _Part, _Part]:
    """One linear layer whose rows are the query, key and value of the first head, then of the next one."""
    linear = module.query_key_value
    num_heads, step = linear.out_features // (3 * width), 3 * width
    rotated = (pairs, pairs, 0)  # values are not
    q, k, v = (_Part(linear, _rows(num_heads, width, p, i * width, step)) for i, p in enumerate(rotated))
    return q, k, v


def _own_parts(module: Any, width: int, pairs: int) -> tuple[_Part, _Part, _Part]:
    """A linear layer each for queries, keys and values."""
    q, k = (
        _Part(linear, _rows(linear.out_features // width, width, pairs, 0, width))
        for linear in (module.q_proj, module.k_proj)
    )
    return q, k, _Part(module.v_proj, None)


_PARTS: Mapping[str, Callable[[Any, int, int], tuple[_Part, _Part, _Part]]] = {
    "gpt_neox": _joined_parts,
    "llama": _own_parts,
    "qwen2": _own_parts,
}

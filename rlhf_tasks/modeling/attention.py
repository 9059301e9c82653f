"""The attention of the known families on a CPU, with fewer passes over memory than transformers needs.

transformers turns queries and keys by their positions in a dozen operations on short pieces of a head. Here
each turned pair of numbers is one complex number, and a multiplication turns all of them (arXiv 2104.09864,
3.2.2). For that the two numbers of a pair must be neighbours. So the rows of the projections' weights are
reordered in each pass. Queries and keys are reordered alike, which changes no product of the two.

Where only some columns are read, queries are made for these alone.

B batch · T columns · N columns that are read · A heads · D width of a head.
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
    """Whether `Attention` computes what these attention modules of the model do, on this device."""
    if (
        model.config.model_type not in _PARTS
        or model.config._attn_implementation != "sdpa"
        or getattr(model.config, "sliding_window", None) is not None
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    return all(_width(module) % 2 == 0 and all(map(_is_plain, module.children())) for module in attentions)


def _width(module: Any) -> int:
    width: int | None = getattr(module, "head_dim", None)  # the config's may differ from H / A
    return width or module.config.hidden_size // module.config.num_attention_heads


def _is_plain(module: nn.Module) -> bool:
    """Whether a linear layer has whole weights of its own on the CPU: no adapter, no shard, no bfloat16."""
    if type(module) not in (nn.Linear, RoundedLinear):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and not hasattr(weight, "ds_id")  # ZeRO-3's
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
    )


class Attention:
    """The attention of all layers in one pass through a model."""

    def __init__(self) -> None:
        self._cosines: Tensor | None = None
        self._turns = torch.empty(0)

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
        turns = self._turned_by(positions, width)
        queries, keys, values = _PARTS[module.config.model_type](module, width, positions[0].shape[-1] // 2)
        seen = hidden
        if pick is not None:
            hidden, mask = pick(hidden), _seen_from(pick, mask, hidden)
        q = _heads(queries, hidden, width, turns if pick is None else pick(turns))
        k, v = _heads(keys, seen, width, turns), _heads(values, seen, width, None)
        if q.shape[1] != k.shape[1]:  # several heads share their keys and values
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=module.scaling
        )
        return found.transpose(1, 2).flatten(2)

    def _turned_by(self, positions: tuple[Tensor, Tensor], width: int) -> Tensor:
        """(B, T, 1, D / 2) complex: by what each pair of a head is multiplied; 1 where it is not turned."""
        cosines = positions[0]
        if self._cosines is not cosines:
            pairs = cosines.shape[-1] // 2  # transformers has each angle twice, once for each of a pair
            angles = (x[..., :pairs] for x in positions)
            turns = F.pad(torch.complex(*angles), (0, width // 2 - pairs), value=1)
            self._cosines, self._turns = cosines, turns.unsqueeze(2)
        return self._turns


def _seen_from(pick: Pick, mask: Tensor | None, hidden: Tensor) -> Tensor:
    """The mask of the columns that are read: (B, 1, N, T)."""
    count, columns = hidden.shape[:2]
    if mask is None:
        mask = torch.ones(columns, columns, dtype=torch.bool, device=hidden.device).tril()[None, None]
    return pick(mask.expand(count, -1, -1, -1).squeeze(1)).unsqueeze(1)


def _heads(part: _Part, hidden: Tensor, width: int, turns: Tensor | None) -> Tensor:
    """A projection by heads, and turned: (B, N, H) → (B, A, N, D)."""
    linear, rows = part
    weight, bias = (
        x if x is None or rows is None else x.index_select(0, rows) for x in (linear.weight, linear.bias)
    )
    multiply: Callable[..., Tensor] = rounded_product if isinstance(linear, RoundedLinear) else F.linear
    heads: Tensor = multiply(hidden, weight, bias).unflatten(-1, (-1, width))
    if turns is not None:
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        heads = torch.view_as_real(pairs * turns).flatten(-2)
    return heads.transpose(1, 2)


@cache
def _rows(num_heads: int, width: int, pairs: int, start: int, step: int) -> Tensor:
    """The rows of one of a linear layer's projections, with the two numbers of a pair side by side.

    Head i has the rows from `start + i · step`. Number j and number `pairs + j` of a head are a pair.
    """
    order = torch.arange(width)
    order[: 2 * pairs] = order[: 2 * pairs].view(2, pairs).t().flatten()
    return (start + step * torch.arange(num_heads)[:, None] + order).flatten()


def _joined_parts(module: Any, width: int, pairs: int) -> tuple[_Part, _Part, _Part]:
    """One linear layer whose rows are the query, key and value of the first head, then of the next one."""
    linear = module.query_key_value
    num_heads, step = linear.out_features // (3 * width), 3 * width
    turned = (pairs, pairs, 0)
    q, k, v = (_Part(linear, _rows(num_heads, width, p, i * width, step)) for i, p in enumerate(turned))
    return q, k, v


def _own_parts(module: Any, width: int, pairs: int) -> tuple[_Part, _Part, _Part]:
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

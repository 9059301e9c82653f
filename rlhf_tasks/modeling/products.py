"""The linear layers of models on a CPU: float32 products by the faster library, or products in bfloat16.

A product in bfloat16 rounds its two factors and its result, and adds up in float32. With instructions for it
that takes half of the time. Autocast would convert the operands of every operation, which costs small models
more than it saves; and attention in bfloat16 is slower on a CPU, above all its backward pass. So only the
products of linear layers are rounded, and all other tensors stay float32.

The library of these products compiles code for every new number of rows. So rows are padded to a multiple of
ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from rlhf_tasks.modeling import onednn

ROWS = 64


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for products in bfloat16; without them, they would be slower."""
    features = onednn.cpu_features()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


_is_off = False


@contextmanager
def unrounded_products() -> Iterator[None]:
    """Within the block, a model with rounded products computes in float32; for passes without gradient."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


class FastLinear(nn.Linear):
    """A linear layer of float32 products."""

    def forward(self, x: Tensor) -> Tensor:
        return onednn.linear(x, self.weight, self.bias)


class FastConv1D(Conv1D):
    """GPT-2's linear layer: its weight is (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return onednn.linear(x, self.weight.t(), self.bias)


class RoundedLinear(nn.Linear):
    """A linear layer of products in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return rounded_product(x, self.weight, self.bias)


class RoundedConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return rounded_product(x, self.weight.t(), self.bias)


LINEAR = (nn.Linear, FastLinear, RoundedLinear)
"""Linear layers whose results differ by rounding only."""


def speed_up(model: nn.Module) -> None:
    """Let the linear layers of a model on a CPU have the faster library's products where there is one."""
    if onednn.is_faster():
        onednn.bound_memory()
        _replace(model, FastLinear, FastConv1D)


def multiply_as(model: nn.Module, copy: nn.Module) -> None:
    """Let a copy of a model have the model's products: it then gives the same bits."""
    if any(isinstance(module, FastLinear | FastConv1D) for module in model.modules()):
        speed_up(copy)


def round_products(model: nn.Module) -> None:
    """Make the linear layers of a model compute their products in bfloat16, forward and backward.

    The head of a reward model or critic keeps float32: its scores would rise in steps.
    """
    _replace(model, RoundedLinear, RoundedConv1D)


def _replace(model: nn.Module, linear: type[nn.Linear], conv1d: type[Conv1D]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if type(module) in (nn.Linear, FastLinear) and module.out_features > 1:
                module.__class__ = linear
        elif type(module) in (Conv1D, FastConv1D):
            module.__class__ = conv1d


def product_of(layer: nn.Linear) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The product that one of the `LINEAR` layers makes of its input, weight and bias."""
    if isinstance(layer, RoundedLinear):
        return rounded_product
    return onednn.linear if isinstance(layer, FastLinear) else F.linear


def rounded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with rounded factors: (…, in), (out, in) and (out,) → (…, out)."""
    one_column = x.ndim == 3 and x.shape[1] == 1  # of the sampler, or of one score a row: too small to pay
    if _is_off or one_column:
        return onednn.linear(x, weight, bias)
    found: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """x · weightᵀ + bias, for (…, in), (out, in) and (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, weight = rounded_rows(x), weight.bfloat16()
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        found = float32_rows(F.linear(rows, weight), (*x.shape[:-1], len(weight)))
        return found if bias is None else found.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        g_rows = rounded_rows(g)
        d_x = float32_rows(g_rows @ weight, ctx.shape) if needs_x else None
        d_weight = (g_rows.t() @ rows).float() if needs_weight else None
        return d_x, d_weight, g.reshape(-1, g.shape[-1]).sum(0) if needs_bias else None


def rounded_rows(x: Tensor) -> Tensor:
    """(…, H) → (N, H) bfloat16, N a multiple of ROWS; the rows that are too many are zero."""
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    rows = flat.new_empty((-(-count // ROWS) * ROWS, flat.shape[1]), dtype=torch.bfloat16)
    rows[:count] = flat
    rows[count:] = 0
    return rows


def float32_rows(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The rows that `rounded_rows` did not add, as a float32 tensor of this shape."""
    count = torch.Size(shape[:-1]).numel()
    return rows[:count].float().view(shape)

"""Matrix products in bfloat16 on a CPU, for models whose tensors stay float32.

oneDNN rounds the two factors of a product to bfloat16 and adds up in float32, in instructions that are
several times as fast. Autocast would convert the operands of every operation, which costs small models more
than it saves. The switch is global in torch, and attention on a CPU is slower with it: so it is on for the
products of linear layers alone. A CPU without instructions for bfloat16 computes in float32 as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


@contextmanager
def rounded_products(on: bool = True) -> Iterator[None]:
    """Within the block, matrix products of float32 tensors round their factors to bfloat16."""
    if not on:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


class RoundedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias)


class RoundedConv1D(Conv1D):
    """GPT-2's linear layer: its weight is (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight.t(), self.bias)


def round_products(model: nn.Module) -> None:
    """Make the linear layers of a model compute their products in bfloat16, forward and backward."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RoundedLinear
        elif type(module) is Conv1D:
            module.__class__ = RoundedConv1D


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    one_column = x.ndim == 3 and x.shape[1] == 1  # of the sampler: too small to pay, and never in training
    if _is_off or one_column:
        return F.linear(x, weight, bias)
    found: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """x · weightᵀ + bias, for (…, in), (out, in) and (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with rounded_products():
            return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = g.reshape(-1, g.shape[-1])
        with rounded_products():
            d_x = g @ weight if needs_x else None
            d_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return d_x, d_weight, rows.sum(0) if needs_bias else None

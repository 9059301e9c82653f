"""Products of float32 matrices by oneDNN, on CPUs where torch's own library for them is slow.

torch multiplies float32 matrices by Intel's MKL. On a processor of AMD, MKL uses registers of 256 bits, also
where there are 512; oneDNN takes half of the time. torch contains oneDNN, and `torch.compile` gives linear
layers to it by the operator that is called here.

N rows · in, out: the two sizes of a linear layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SMALLEST = 2**24
"""oneDNN compiles code for each shape. Products of fewer multiplications than this have torch's library."""
NUM_KEPT = 64
"""Number of compiled products that oneDNN keeps, for each thread and for the process; each takes 0.5 MB."""


@cache
def cpu_features() -> dict[str, Any]:
    """What this CPU can do, by name; an older torch does not tell, and gives nothing."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


@cache
def is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than torch's own library on this CPU."""
    features = cpu_features()
    return (
        str(features.get("cpu_name")).startswith("AMD")
        and bool(features.get("avx512_f"))
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def bound_memory() -> None:
    """Let oneDNN keep `NUM_KEPT` products, unless the user has set how many. Call it before the first one."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(NUM_KEPT))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: (…, in), (out, in) and (out,) → (…, out)."""
    if not _takes(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x.contiguous(), weight, bias)
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(x.contiguous(), weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of matrices, without gradient: (N, in), (out, in) and (out,) → (N, out)."""
    return _product(x, weight, bias) if _takes(x, weight) else F.linear(x, weight, bias)


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x · weightᵀ to the total in place, without gradient: (N, out), (N, in) and (out, in)."""
    if _takes(x, weight):
        total += _product(x, weight, None)
    else:
        total.addmm_(x, weight.t())


def _takes(x: Tensor, weight: Tensor) -> bool:
    kinds = (x.dtype, weight.dtype, x.device.type)
    return (
        kinds == (torch.float32, torch.float32, "cpu")
        and x.numel() * len(weight) >= SMALLEST
        and is_faster()
        and not torch.compiler.is_compiling()  # torch then chooses the library
        and not torch.is_autocast_enabled("cpu")
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    own = None if bias is None else bias.contiguous()  # its strides would not be read
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, own, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = g.reshape(-1, g.shape[-1]).contiguous()
        return (
            _product(rows, weight.t(), None).view_as(x) if needs_x else None,
            _outer(rows, x.view(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _outer(g: Tensor, x: Tensor) -> Tensor:
    """gᵀ · x, of (N, out) and (N, in). A product is faster the longer the rows of its result are."""
    if g.shape[1] > x.shape[1]:
        return _product(x.t(), g.t(), None).t().contiguous()
    return _product(g.t(), x.t(), None)

"""Faster passes of models on CPUs, where torch's own kernels are slow.

torch multiplies float32 matrices by Intel's MKL. On a processor of AMD, MKL uses registers of 256 bits, also
where there are 512; oneDNN takes half of the time. torch contains oneDNN: the operator that is called here is
the one to which `torch.compile` gives linear layers.

Under autocast, the backward pass of torch's fused attention in bfloat16 takes eight times as long as in
float32 (an Intel Xeon with AMX, torch 2.13): half of the time of a whole pass.

in, out: the two sizes of a linear layer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface

SMALLEST = 2**24
"""oneDNN compiles code for each shape: matmuls of fewer multiplications stay with torch's library."""
NUM_KEPT = 64
"""Compiled matmuls that oneDNN keeps, for each thread and for the process; each takes 0.5 MB."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
_SDPA: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]


def accelerate(model: nn.Module) -> nn.Module:
    """Let a model on a CPU use oneDNN where that is faster, and attention in float32; in place.

    This is the one place where speed changes a model. Results differ by rounding.
    """
    AttentionInterface.register("sdpa", attention)
    _keep_memory()
    if _onednn_is_faster():
        for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(variable, str(NUM_KEPT))
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear
    return model


@cache
def _keep_memory() -> None:
    """Let glibc keep memory that is freed; else each large tensor is mapped anew, and filled with zeros."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


@cache
def _onednn_is_faster() -> bool:
    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch has none
    return (
        str(features.get("cpu_name")).startswith("AMD")
        and bool(features.get("avx512_f"))
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, in float32 under autocast on a CPU; a sampler's single steps stay in 16 bits.

    query (B, heads, T, width); key and value (B, key heads, T, width); attention_mask (B, 1, T, T), which
    many models give by its name. Queries and keys are rounded as autocast rounds them, and a sampler's cache.
    """
    is_pass = query.device.type == "cpu" and torch.is_autocast_enabled("cpu") and query.shape[2] > 1
    if not is_pass or (attention_mask is not None and attention_mask.dtype != torch.bool):
        return _SDPA(module, query, key, value, attention_mask, **kwargs)
    rounded = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        query, key, value = (x.to(rounded).float() for x in (query, key, value))
        return _SDPA(module, query, key, value, attention_mask, **kwargs)


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(…, in), (out, in) and (out,) → (…, out)."""
    fits = (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * len(weight) >= SMALLEST
        and not torch.is_autocast_enabled("cpu")
    )
    if not fits:
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x.contiguous(), weight, bias)  # type: ignore[no-untyped-call]
    return result


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    own = None if bias is None else bias.contiguous()  # its strides would not be read
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, own, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    """torch gives oneDNN's operator no backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]).contiguous(), x.view(-1, x.shape[-1])
        grad_weight: Tensor | None = None
        if needs_weight and rows.shape[1] > inputs.shape[1]:  # oneDNN is faster with long rows of the result
            grad_weight = _matmul(inputs.t(), rows.t()).t().contiguous()
        elif needs_weight:
            grad_weight = _matmul(rows.t(), inputs.t())
        grad_x = _matmul(rows, weight.t()).view_as(x) if needs_x else None
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None

"""Masked arithmetic over tokens: tensors in, tensors out; no model, config or process in it.

B batch · R response. Masks are bool, True = a real response token (EOS included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.errors import UserError


class NonFiniteError(UserError, ArithmeticError):
    """NaN or infinity, which another try would meet again. `batch` is what it comes from.

    The optimizer took no step on it, except where `Distributed.step` says so.
    """

    def __init__(self, message: str, batch: Any = None) -> None:
        super().__init__(message)
        self.batch = batch


Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes; the identity on one process."""


def last_token(mask: Tensor) -> Tensor:
    """(B, R) bool: True at the last real token of each row only."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return columns == mask.sum(dim=1, keepdim=True) - 1


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Σ of `x` where `mask`, in float32; values elsewhere do not matter, even NaN."""
    return torch.where(mask, x, 0).float().sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask`. Scalar; NaN if the mask is False everywhere."""
    return masked_sum(x, mask) / mask.sum()


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) variance of `x` where `mask`, in two passes."""
    mean = masked_mean(x, mask)
    return mean, masked_mean((x - mean) ** 2, mask)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """`x` (B, R) scaled to variance 1 over the real tokens; zero elsewhere.

    The mean becomes 0; with `shift_mean=False` it does not change, as Ziegler et al. (2019) whiten rewards.
    As in their code, 1e-8 is added to the variance.
    """
    mean, variance = masked_moments(x, mask)
    white = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white if shift_mean else white + mean, 0)


def distinct(responses: Sequence[Sequence[int]], n: int) -> Tensor:
    """(B,): distinct n-grams of a response over all its n-grams (Li et al. 2016); 1 without n-grams."""
    grams = [[tuple(r[i : i + n]) for i in range(len(r) - n + 1)] for r in responses]
    return torch.tensor([len(set(g)) / len(g) if g else 1.0 for g in grams])


def copy_to_cpu(part: Any, copies: dict[Any, Tensor] | None = None) -> Any:
    """A copy of a nested state, its tensors on the CPU; a tensor that it has twice is copied once."""
    copies = {} if copies is None else copies
    if isinstance(part, Tensor):
        place = (part.device, part.data_ptr(), part.shape, part.stride(), part.dtype)
        if place not in copies:
            copies[place] = part.detach().to("cpu", copy=True)
        return copies[place]
    if isinstance(part, Mapping):
        return {key: copy_to_cpu(value, copies) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(copy_to_cpu(value, copies) for value in part)
    return part

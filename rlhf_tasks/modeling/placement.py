"""Where models compute that are not trained: on one device, or sharded over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from rlhf_tasks.data.batches import TokenBudget


class Placement(Protocol):
    """`OneDevice`, or the `Runtime` of a training stage."""

    device: torch.device

    def put(self, model: nn.Module) -> None:
        """Put a model there."""

    def on_device(self, model: nn.Module) -> AbstractContextManager[bool]:
        """Within the block, a whole model is where it can be computed; whether this process is to do it."""

    def run_batches(
        self, budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None]
    ) -> None:
        """Call `compute` with every micro-batch of the rows, whose tokens are given.

        For an empty list it must make a pass like any other, whose result nobody reads.
        """


class OneDevice:
    """One device that holds every model whole."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, model: nn.Module) -> None:
        model.to(self.device)

    def on_device(self, model: nn.Module) -> AbstractContextManager[bool]:
        model.to(self.device)
        return nullcontext(True)

    def run_batches(
        self, budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None]
    ) -> None:
        budget.each(rows, compute)

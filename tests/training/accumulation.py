"""A gradient in many micro-batches: `python -m tests.training.accumulation LAYOUT`, in bf16 by one process.

Prints the error of a step of SGD relative to the sum of the micro-batches' gradients in float64.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_tasks.config import Launch
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed
from tests.training.first_update import join_alone

NUM_MICRO_BATCHES = 200


class Weighted(nn.Module):
    """The gradient of its weight is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 32))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def main(layout: Any) -> None:
    join_alone(layout)
    dist = Distributed(Launch(parallelism=layout, precision="bf16"), seed=1)
    model = Weighted()
    prepared, optimizer = dist.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    gradients = list(torch.randn(NUM_MICRO_BATCHES, 64, 32).bfloat16())
    for gradient in dist.passes(prepared, gradients):
        with dist.autocast():
            loss = prepared(gradient)
        dist.backward(prepared, loss)
    dist.step(prepared, optimizer, None)
    total = -torch.stack(gradients).double().sum(0)
    [weight] = sharding.weights_of(model).values()
    print(float((weight - total).norm() / total.norm()))


if __name__ == "__main__":
    main(*sys.argv[1:])

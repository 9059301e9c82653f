"""An update of PPO on a pretended GPU whose floats have no numbers: its memory, and what it multiplies.

So models are measured that this machine could neither hold nor train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

from benchmarks import shapes, workloads
from benchmarks.shapes import Shape
from benchmarks.workloads import Workload
from tests import small
from tests.gpu import toy
from tests.gpu.pretend import Gpu

RATES: Mapping[str, float] = {"bfloat16": 600e12, "tf32": 350e12, "float32": 50e12}
"""FLOP a second that matmuls achieve on an H100, estimated from NVIDIA's 989, 494 and 67 TFLOP/s."""


class DryRun(NamedTuple):
    """What an update needs of a GPU."""

    peaks: Mapping[str, int]
    """The most bytes held in each phase."""
    flop: Mapping[tuple[str, str], int]
    """By phase and type of number, of all matmuls."""

    @classmethod
    def of(cls, gpu: Gpu) -> DryRun:
        flop = Counter[tuple[str, str]]()
        for matmul, count in gpu.matmuls.items():
            flop[matmul.phase, matmul.type] += count * matmul.flop
        return cls(dict(gpu.peaks), flop)

    @property
    def seconds(self) -> dict[str, float]:
        """The time of the matmuls by type of number, without sampling, whose time is not that of matmuls."""
        found = dict.fromkeys(RATES, 0.0)
        for (phase, kind), flop in self.flop.items():
            if phase != "sample":
                found[kind] += flop / RATES[kind]
        return found

    @property
    def float32_share(self) -> float:
        """The share of float32 in that time."""
        return self.seconds["float32"] / sum(self.seconds.values())


def dry_run(shape: Shape, *, checkpointing: bool = False) -> tuple[DryRun, Workload]:
    """An update of two steps, with a reward model, and a held-out one that waits for evaluations."""
    gpu, make = Gpu(numbers=False), shapes.models

    def on_meta(shape: Shape, device: object = None) -> shapes.Models:
        return make(shape, "meta")

    with gpu.present(), toy.phases(gpu), mock.patch.object(shapes, "models", on_meta):
        dist = small.distributed(shape.precision)
        work = workloads.of_shape(dist, small.ppo(gradient_checkpointing=checkpointing), shape, num_updates=1)
        steps = {"num_ppo_epochs": 1, "num_mini_batches": 2}
        work = replace(work, settings=work.settings.model_copy(update=steps))
        heldout = on_meta(shape).reward
        dist.freeze(heldout)
        list(work.updates())
    return DryRun.of(gpu), work

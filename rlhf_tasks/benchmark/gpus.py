"""GPUs as their makers publish them, and what a plan assumes beside that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB, TERA = 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The published figures of one kind of GPU, in bytes and in operations per second."""

    name: str
    memory: float
    bf16: float
    """FLOP per second of dense matrix products in bfloat16, without sparsity."""
    fp32: float
    """FLOP per second in float32, without TF32, which torch does not use unless it is allowed to."""
    bandwidth: float
    """Bytes per second that its memory gives."""
    link: float
    """Bytes per second to another GPU of the machine, in one direction."""
    source: str


GPUS: Mapping[str, Gpu] = {
    "l4": Gpu(
        name="L4 24 GB", memory=24 * GB, bf16=121 * TERA, fp32=30.3 * TERA, bandwidth=300 * GB,
        link=32 * GB, source="NVIDIA L4 Tensor Core GPU datasheet",
    ),
    "l40s": Gpu(
        name="L40S 48 GB", memory=48 * GB, bf16=362 * TERA, fp32=91.6 * TERA, bandwidth=864 * GB,
        link=32 * GB, source="NVIDIA L40S GPU datasheet",
    ),
    "a100": Gpu(
        name="A100 80 GB SXM", memory=80 * GB, bf16=312 * TERA, fp32=19.5 * TERA, bandwidth=2039 * GB,
        link=300 * GB, source="NVIDIA A100 Tensor Core GPU datasheet",
    ),
    "h100": Gpu(
        name="H100 80 GB SXM", memory=80 * GB, bf16=989 * TERA, fp32=67 * TERA, bandwidth=3350 * GB,
        link=450 * GB, source="NVIDIA H100 Tensor Core GPU datasheet",
    ),
    "h200": Gpu(
        name="H200 141 GB SXM", memory=141 * GB, bf16=989 * TERA, fp32=67 * TERA, bandwidth=4800 * GB,
        link=450 * GB, source="NVIDIA H200 Tensor Core GPU datasheet",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is in no data sheet. The first four can be measured by `rlhf bench` on one such GPU."""

    matrix_share: float = 0.4
    """Share of the published matrix rate that passes over whole rows reach."""
    bandwidth_share: float = 0.6
    """Share of the published bandwidth that sampling reaches."""
    layer_seconds: float = 5e-4
    """Least time of one layer in one forward pass, which a GPU spends on starting its kernels."""
    usable_memory: float = 0.9
    """Share of the memory that is left beside CUDA's own and what its allocator cannot use."""
    gpus_per_machine: int = 8
    machine_link: float = 50
    """GB/s and GPU between machines: a network card of 400 Gbit/s each."""
    machine_memory: float = 2000
    """GB of memory of a machine, beside that of its GPUs."""
    machine_bandwidth: float = 200
    """GB/s that the memory of a machine gives, where the optimiser of `launch.offload` steps."""
    host_link: float = 25
    """GB/s between a GPU and its machine, in one direction: a half of PCIe 5.0's 16 lanes."""
    folder_rate: float = 2
    """GB/s at which weights are written into the engine's folder, and read from there."""

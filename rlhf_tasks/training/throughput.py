"""How fast a stage is on GPUs, and what share of their peak rate that is.

The share is the model FLOPs utilization of PaLM (arXiv 2204.02311, appendix B): 2 FLOPs for each parameter
and token of a forward pass, 4 more for the backward pass. Recomputed activations and attention's scores are
not counted.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed

PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense TFLOP/s in bfloat16, by words in the name of a GPU; NVIDIA's data sheets."""


def pass_flops(*models: nn.Module, gradients: bool = False) -> float:
    """FLOPs for each token that all of these models read, and with the gradients of what they train."""
    total = 0.0
    for model in models:
        whole = sharding.num_parameters(model)
        total += 2 * whole
        if gradients:  # 2 for those of the states, and 2 for those of the weights that train
            total += 2 * (whole + sharding.num_parameters(model, trained=True))
    return total


def speed(dist: Distributed, num_tokens: float, flops: float, seconds: float) -> dict[str, float]:
    """Metrics `time/…` of some work of all ranks: tokens a second and GPU, and the share of the peak rate.

    There are none on a CPU, and no share of a GPU whose peak is not known.
    """
    if dist.device.type != "cuda":
        return {}
    gpu_seconds = seconds * dist.world_size
    metrics = {"time/tokens_per_second_per_gpu": num_tokens / gpu_seconds}
    name = torch.cuda.get_device_name(dist.device)
    if peak := next((rate for kind, rate in PEAKS.items() if re.search(rf"\b{kind}\b", name)), None):
        metrics["time/mfu"] = flops / gpu_seconds / (1e12 * peak)
    return metrics

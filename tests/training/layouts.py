"""What a stage wrote in one layout and in another one, which must differ by rounding only."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE, METRICS_TOLERANCE = 1e-4, 1e-3
"""The largest difference of a weight or a loss, and of a metric, relative to numbers above 1."""
UNEQUAL = ("time/", "eps", "val/first_ratio_error", "train/epoch", "sampler/load_seconds")
"""Metrics that differ by their nature: times, the cut into micro-batches, and rounding itself."""
PARTITIONED = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")


@dataclass(frozen=True)
class Written:
    """What a stage wrote: weights by model and name, losses of all steps, and final metrics."""

    weights: Mapping[str, Tensor]
    losses: Sequence[float]
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, project: Path, stage: str) -> Written:
        folders = {
            "reward": ("reward", "reward_heldout"),
            "ppo": ("policy",),
            "sft": ("sft",),
            "value": ("value",),
            "dpo": ("dpo",),
        }
        weights = {
            f"{folder}/{name}": value
            for folder in folders[stage]
            for name, value in load_file(project / "models" / folder / "model.safetensors").items()
        }
        with (project / f"plots/{stage}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        losses = [float(row[key]) for row in rows for key in sorted(row) if "loss" in key and row[key]]
        metrics = json.loads((project / f"metrics/{stage}.json").read_text(encoding="utf-8"))
        return cls(weights, losses, {k: v for k, v in metrics.items() if not k.startswith(UNEQUAL)})


def assert_equal_but_for_rounding(one: Written, other: Written) -> None:
    """Whole checkpoints with the same weights, and the same losses and metrics, up to the tolerances."""
    assert one.weights.keys() == other.weights.keys()
    assert one.metrics.keys() == other.metrics.keys()
    for name, value in one.weights.items():
        assert largest_difference(value, other.weights[name]) < TOLERANCE, name
    assert largest_difference(torch.tensor(one.losses), torch.tensor(other.losses)) < TOLERANCE
    for name, number in one.metrics.items():
        difference = largest_difference(torch.tensor(number), torch.tensor(other.metrics[name]))
        assert difference < METRICS_TOLERANCE, name


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float(((a - b).abs() / a.abs().clamp_min(1)).max()) if a.numel() else 0.0


def partition_small_weights(project: Path) -> None:
    """Let ZeRO-3 partition every weight between uses, as it does the weights of large models."""
    file = project / "infra/deepspeed/zero3.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    tree["zero_optimization"] |= {f"stage3_{name}": 0 for name in PARTITIONED}
    file.write_text(json.dumps(tree), encoding="utf-8")

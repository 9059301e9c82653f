"""Two processes in every layout against one: `python -m benchmarks.layouts`.

A toy project of random models goes through the stages sft, reward, ppo and judge: once in one process, then
on two processes of this machine in each layout, each stage on the checkpoints of the one before. Every
weight is partitioned, however small. The table shows the largest differences to the single process: of a
weight, of a loss of any step, and of a final metric; and whether they are within the tolerances below.
Writes docs/results/layouts.md. It takes some minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_tasks.config import Stage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.training import launch
from tests import toy

OUT = Path(__file__).parents[1] / "docs/results/layouts.md"
TOLERANCE, METRICS_TOLERANCE = 1e-4, 1e-3
"""The largest difference of a weight or a loss, and of a metric, relative to numbers above 1."""
TRAINED: tuple[Stage, ...] = ("sft", "reward", "ppo")
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "`ddp`": {"parallelism": "ddp"},
    "`zero2`": {"parallelism": "zero2"},
    "`zero2`, `offload`": {"parallelism": "zero2", "offload": True},
    "`zero3`": {"parallelism": "zero3"},
    "`zero3`, `offload`": {"parallelism": "zero3", "offload": True},
    "`fsdp2`": {"parallelism": "fsdp2"},
    "`fsdp2`, `offload`": {"parallelism": "fsdp2", "offload": True},
}
PPO = {
    "schedule": "constant", "learning_rate": 1e-2, "total_episodes": 96, "num_selections": 2, "kl_coef": 0.01,
}  # fmt: skip
"""Steps that are large enough for the selection to keep trained weights."""
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
        folders = {"reward": ("reward", "reward_heldout"), "ppo": ("policy",), "sft": ("sft",)}
        weights = {
            f"{folder}/{name}": value
            for folder in folders.get(stage, ())
            for name, value in load_file(project / "models" / folder / "model.safetensors").items()
        }
        with (project / f"plots/{stage}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        losses = [float(row[key]) for row in rows for key in sorted(row) if "loss" in key and row[key]]
        metrics = json.loads((project / f"metrics/{stage}.json").read_text(encoding="utf-8"))
        return cls(weights, losses, {k: v for k, v in metrics.items() if not k.startswith(UNEQUAL)})


@dataclass(frozen=True)
class Difference:
    """The largest differences; of numbers above 1 relative to them."""

    weights: float
    losses: float
    metrics: float

    @property
    def is_rounding(self) -> bool:
        return max(self.weights, self.losses) < TOLERANCE and self.metrics < METRICS_TOLERANCE


def compared(one: Written, other: Written) -> Difference:
    """Raises ValueError if they have not the same weights, steps or metrics."""
    if one.weights.keys() != other.weights.keys() or one.metrics.keys() != other.metrics.keys():
        raise ValueError("they have different weights or metrics")
    return Difference(
        max([_largest(value, other.weights[name]) for name, value in one.weights.items()], default=0.0),
        _largest(torch.tensor(one.losses), torch.tensor(other.losses)),
        _largest(*(torch.tensor([x.metrics[key] for key in one.metrics]) for x in (one, other))),
    )


def _largest(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ValueError(f"{tuple(a.shape)} numbers against {tuple(b.shape)}")
    return float(((a - b).abs() / a.abs().clamp_min(1)).max()) if a.numel() else 0.0


def partition_small_weights(project: Path) -> None:
    """Let ZeRO-3 partition every weight between uses, as it does the weights of large models."""
    file = project / "infra/deepspeed/zero3.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    tree["zero_optimization"] |= {f"stage3_{name}": 0 for name in PARTITIONED}
    file.write_text(json.dumps(tree), encoding="utf-8")


def prepared(folder: Path) -> Path:
    """A toy project with data and a base model."""
    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        toy.write_given()
        toy.copy_project()
        toy.foreign("foreign/base", "gpt_neox")
        settings = toy.write_params()
        for stage in ("prepare", "base", "sft", "preferences"):
            toy.run(stage, settings)
        shutil.rmtree("models/sft")
        partition_small_weights(folder)
    finally:
        os.chdir(before)
    return folder


def run(prepared_project: Path, folder: Path, changes: Mapping[str, Any]) -> dict[str, Written]:
    """Run all stages in a copy of the project; what each wrote. The training stages share their processes.

    Raises:
        SystemExit: if a stage fails.
    """
    shutil.copytree(prepared_project, folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        settings = toy.write_params(launch=changes, ppo=PPO)
        if changes:
            words = launch.command(Paths(), "ppo", settings.launch, os.environ)
            words[words.index("--module") :] = ["--module", "benchmarks.layouts", "--train"]
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(OUT.parents[2])}
            if launch.supervise("ppo", words, os.environ | own):
                raise SystemExit(f"training with {dict(changes)} failed")
        else:
            train()
        runner.run("judge", Paths())
        return {stage: Written.of(folder, stage) for stage in (*TRAINED, "judge")}
    finally:
        os.chdir(before)


def train() -> None:
    """The training stages in the folder of this process."""
    for stage in TRAINED:
        runner.run(stage, Paths())


def table(found: Mapping[str, Mapping[str, Difference]]) -> str:
    """A row a layout and stage."""
    lines = ["| Layout | Stage | Weights | Losses | Metrics | Within |", "|---|---|---|---|---|---|"]
    for layout, stages in found.items():
        for stage, one in stages.items():
            numbers = " | ".join(_shown(x) for x in (one.weights, one.losses, one.metrics))
            lines.append(f"| {layout} | {stage} | {numbers} | {'yes' if one.is_rounding else '**no**'} |")
    return "\n".join(lines)


def _shown(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}"


PAGE = """\
# Layouts

A layout is what the processes of a training share of a model: see
[use several GPUs](../how-to/several-gpus.md). It must change no result beyond rounding.
`python -m benchmarks.layouts` compares two processes in each layout with one process. They run the
stages sft, reward, ppo and judge on a CPU, and talk by gloo.

The numbers are the largest differences of any weight of the checkpoints, of any loss, and of any final
metric. A number above 1 is compared relative to its size. It is "within" if weights and losses differ by
less than {tolerance:g}, and metrics by less than {metrics:g}. Every stage
reads what the stage before wrote in the same layout. The judge runs in one process, on the plain
checkpoints that the layout saved.

{table}

The models are random ones of {parameters:,} parameters in float32. PPO takes {updates} updates. ZeRO-3
partitions every weight, which it otherwise does only with large ones. A larger model in bf16 rounds more.

Not run here, because there was no GPU: NCCL, the copies of `offload` between GPU and machine, and the
memory and speed of any layout.
"""


def page(found: Mapping[str, Mapping[str, Difference]], parameters: int) -> str:
    updates = math.ceil(PPO["total_episodes"] / toy.SMALL["ppo"]["rollout_batch_size"])
    return PAGE.format(
        tolerance=TOLERANCE, metrics=METRICS_TOLERANCE, table=table(found), parameters=parameters,
        updates=updates,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--train", action="store_true", help="train in this folder, as one of several processes"
    )
    if parser.parse_args().train:
        return train()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        given = prepared(folder / "given")
        one, found = run(given, folder / "one", {}), dict[str, dict[str, Difference]]()
        if not one["ppo"].metrics["selected_episode"]:
            raise SystemExit("PPO has kept its first weights, so they would be compared with themselves")
        for number, (title, changes) in enumerate(LAYOUTS.items()):
            two = run(given, folder / str(number), {"num_processes": 2, **changes})
            found[title] = {stage: compared(one[stage], two[stage]) for stage in one}
            print(table({title: found[title]}), flush=True)
        parameters = sum(weight.numel() for weight in one["sft"].weights.values())
    OUT.write_text(page(found, parameters), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()

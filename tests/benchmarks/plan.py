"""What `rlhf plan` calculates, beside what `rlhf bench` measures here: `python -m tests.benchmarks.plan`.

Each size is params.yaml with another model and ROWS episodes. `rlhf bench` measures them in one process, on
one thread, in CPU seconds, with random models and prompts of the greatest length. The plan is made for this
processor: its matrix rate is what `rlhf bench` finds, and its bandwidth is that of a large copy. The share of
the matrix rate is what the training of CALIBRATED reaches, so only the other cells predict a speed. Memory is
without that of Python and its libraries, which a process without models holds too.

Writes docs/results/plan.md, with the tables of `rlhf plan` below. `--tables` renews those alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks.benchmark.footprint import SLICE, Networks, footprint
from rlhf_tasks.benchmark.gpus import GPUS, Assumptions, Gpu
from rlhf_tasks.benchmark.speed import Machine, update_seconds

from rlhf_tasks import config
from rlhf_tasks.benchmark import architecture
from rlhf_tasks.cli import plan
from tests import small
from tests.ppo.toy import ENGINE

OUT = Path(__file__).parents[2] / "docs/results/plan.md"
SIZES: Mapping[str, tuple[int, int]] = {
    "64 wide, 2 layers": (64, 2),
    "96 wide, 4 layers": (96, 4),
    "160 wide, 4 layers": (160, 4),
}
"""Ascending: the peak memory is that of the process so far."""
CALIBRATED = "96 wide, 4 layers"
ROWS = 16  # episodes of an update
NUM_GPUS = (1, 8, 16)
MEASURE = """\
import json, resource, sys, time
time.perf_counter = time.process_time  # other programs on the machine then cost nothing: there is one thread
from pathlib import Path
import torch
from rlhf_tasks import config, console
from rlhf_tasks.benchmark import measurement, workloads
from rlhf_tasks.cli import bench
from tests import small
small.runtime()
console.set_quiet(True)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
trees, updates = json.load(sys.stdin)
found = [bench.measured(config.validate(tree, ""), Path("none"), None, updates) for tree in trees]
a, b, seconds = torch.zeros(2**26), torch.zeros(2**26), []
for _ in range(5):
    start = time.perf_counter()
    a.copy_(b)
    seconds.append(time.perf_counter() - start)
print(json.dumps([base, 2 * a.nbytes / min(seconds), found]))
"""


@dataclass(frozen=True)
class Row:
    """One size: what was calculated and what was measured, in GB and seconds."""

    parameters: int
    planned: Mapping[str, float]
    measured: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=1, help="updates to measure for each size")
    parser.add_argument("--tables", action="store_true", help="renew the tables of `rlhf plan` alone")
    options = parser.parse_args()
    before, _, _ = OUT.read_text(encoding="utf-8").partition(MARK) if options.tables else ("", "", "")
    text = before or HEAD + comparison(measured(options.updates))
    OUT.write_text(text + MARK + tables(), encoding="utf-8")


# ---------------------------------------------------------------------------------------- comparison


def measured(updates: int) -> Mapping[str, Row]:
    trees = []
    for hidden, layers in SIZES.values():
        tree = small.params({"model.scratch.hidden_size": hidden, "model.scratch.num_layers": layers})
        tree["ppo"]["rollout_batch_size"] = ROWS
        trees.append(tree)
    base, bandwidth, benches = json.loads(_run(["-c", MEASURE], json.dumps([trees, updates])))
    settings = [config.validate(tree, "test") for tree in trees]
    found = dict(zip(SIZES, zip(settings, benches, strict=True), strict=True))
    rate = found[CALIBRATED][1]["matrix_flops_per_second"]
    chip = Gpu(
        name="this processor", memory=1e12, bf16=rate, fp32=rate, bandwidth=bandwidth, link=1e12,
        source="measured",
    )  # fmt: skip
    return {name: row(*each, chip, _share(*found[CALIBRATED], chip), base) for name, each in found.items()}


def _share(settings: config.Config, bench: Mapping[str, Any], chip: Gpu) -> float:
    """The share of the matrix rate that training reaches."""
    whole = Assumptions(matrix_share=1.0, bandwidth_share=1.0, layer_seconds=1e-6)
    machine = Machine(gpu=chip, num_gpus=1, assumed=whole)
    return update_seconds(networks(settings), machine, "single").train / float(bench["train_seconds"])


def row(settings: config.Config, bench: Mapping[str, Any], chip: Gpu, share: float, base: float) -> Row:
    models = networks(settings)
    assumed = Assumptions(matrix_share=share, bandwidth_share=1.0, layer_seconds=1e-6)
    machine = Machine(gpu=chip, num_gpus=1, assumed=assumed)
    seconds = update_seconds(models, machine, "single")
    # a processor makes smaller slices of the logits, and `rlhf bench` loads one reward model
    other = 4 * models.policy.score_parameters - 2 * 4 * (SLICE - 2**21)
    planned = {
        "memory": (footprint(models, "single", 1).peak + other) / 1e9,
        "generate": seconds.generate, "score": seconds.score, "train": seconds.train,
        "total": seconds.total,
    }  # fmt: skip
    taken = {
        "memory": bench["peak_memory_gb"] - base / 1e9,
        **{part: bench[f"{part}_seconds"] for part in ("generate", "score", "train")},
        "total": bench["seconds_per_update"],
    }
    return Row(models.policy.parameters, planned, taken)


def networks(settings: config.Config) -> Networks:
    return Networks(
        policy=architecture.of_params(settings, Path("none")), settings=settings.ppo,
        has_reward_model=False, is_bf16=False, longest=settings.data.max_prompt_tokens,
    )  # fmt: skip


def _run(words: Sequence[str], given: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(Path.cwd()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], env=environment, input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def comparison(rows: Mapping[str, Row]) -> str:
    """A line for each size: calculated, measured, and the error of the first."""
    parts = ("memory", "generate", "score", "train", "total")
    units = {"memory": "GB"}
    head = " | ".join(f"{part}, {units.get(part, 's')}" for part in parts)
    lines = [f"| Model | parameters | {head} |", "|---" * 7 + "|"]
    for name, found in rows.items():
        cells = [_cell(found.planned[part], found.measured[part]) for part in parts]
        lines.append(f"| {name} | {found.parameters:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + NOTE


def _cell(planned: float, measured: float) -> str:
    return f"{planned:.2f} / {measured:.2f} ({planned / measured - 1:+.0%})"


# -------------------------------------------------------------------------------------------- tables

HEAD = f"""\
# A plan before the bill

`rlhf plan` calculates memory, layout, speed and cost of PPO on GPUs that are not here. This page sets what it
calculates beside what `rlhf bench` measures on a processor, and shows its tables for three published sizes.
`python -m tests.benchmarks.plan` makes both.

## Calculated and measured

One thread of one processor, in float32 and CPU seconds, with the shipped `params.yaml`, {ROWS} episodes an
update and other models from scratch. A cell is calculated / measured, and the error of the first. Memory is
without Python and its libraries. The share of the matrix rate is that of training {CALIBRATED}, so
this cell is no prediction.

"""
NOTE = """
Small models are dominated by the fixed cost of each step, which this plan leaves out (`--layer-seconds` on a
GPU), and by buffers of a fixed size. So they need more than calculated. Wider products reach a larger share
of the matrix rate, so the widest model takes less time than calculated.

The sizes from scratch are counted with the largest vocabulary that `params.yaml` allows, 1,024 tokens. The
tokenizer of the built-in task is smaller, so the model that it trains has 480,960 parameters. Once
`models/sft` exists, `rlhf plan` counts its weights.
"""
MARK = "\n## What larger models need\n"
OFFLOADED = {
    "ppo.sampler": ENGINE,
    "launch.parallelism": "fsdp2",
    "launch.num_processes": 8,
    "launch.offload": True,
}
LARGE: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "64 × H100, engine": ("h100", 64, {"ppo.sampler": ENGINE}),
    "32 × H200, engine": ("h200", 32, {"ppo.sampler": ENGINE}),
    "8 × H100, engine, offload": ("h100", 8, OFFLOADED),
    "32 × H100, engine, offload": ("h100", 32, OFFLOADED),
}
"""Plans of the model of 70 billion parameters: the kind and number of GPUs, and changes to params.yaml."""
LARGE_TEXT = """
### 70B, with an engine

Without an engine each GPU gathers the whole policy to sample, 141 GB in bf16. An H100 cannot hold that,
however many there are. With a vLLM sampler a pass gathers some layers at a time. The rest is divided by the
number of GPUs, or `launch.offload` moves it into the memory of the machines. No such run was made: the page
[several GPUs](../how-to/several-gpus.md) names what was not run on a GPU.

"""


def tables() -> str:
    """The tables of `rlhf plan` for the shipped params.yaml on H100s."""
    settings, gpu, assumed = config.validate(small.params(), "params.yaml"), GPUS["h100"], Assumptions()
    text = "\nThe batch and the lengths are those of the shipped `params.yaml`: `rlhf plan --gpus 1 8 16`.\n"
    for num_gpus in NUM_GPUS:
        found = plan.plans(settings, Path("none"), gpu, num_gpus, assumed, 2.5)
        text += f"\n### {num_gpus} × {gpu.name}\n\n| | {' | '.join(found)} |\n" + "|---" * 5 + "|\n"
        text += "".join(f"| {' | '.join(cells)} |\n" for cells in plan.rows(found))
    text += LARGE_TEXT + large(assumed)
    notes = [f"- {note[0].upper()}{note[1:]}." for note in plan.assumptions(settings, gpu, assumed, 2.5)]
    return text + "\n### What is assumed\n\n" + "\n".join(notes) + "\n"


def large(assumed: Assumptions) -> str:
    found = {}
    for title, (kind, num_gpus, changes) in LARGE.items():
        settings = config.validate(small.params(changes), "params.yaml")
        found[title] = plan.plans(settings, Path("none"), GPUS[kind], num_gpus, assumed, 2.5)["70B"]
    head = f"| | {' | '.join(found)} |\n" + "|---" * (1 + len(found)) + "|\n"
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in plan.rows(found))


if __name__ == "__main__":
    main()

"""The memory that PPO needs of a GPU, measured without one, against what `rlhf plan` calculates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.shapes import Shape
from rlhf_tasks.training import memory_plan
from rlhf_tasks.training.memory_plan import GB, Run
from tests.gpu import dry, toy
from tests.gpu.conftest import Child
from tests.gpu.pretend import Gpu

LLAMA: dict[str, Any] = {"vocab": 128256, "micro": 1, "precision": "bf16", "heads": 32, "response": 16}
BILLION: dict[str, Any] = LLAMA | {
    "layers": 16,
    "hidden": 2048,
    "llama": {"num_key_value_heads": 8, "intermediate_size": 8192},
    "batch": 32,
    "query": 512,
    "query_min": 512,
    "micro_tokens": 8192,
}
EIGHT: dict[str, Any] = LLAMA | {
    "layers": 32,
    "hidden": 4096,
    "llama": {"num_key_value_heads": 8, "intermediate_size": 14336},
    "batch": 8,
    "query": 256,
    "query_min": 256,
    "micro_tokens": 4096,
}
RUNS: Mapping[str, tuple[Shape, bool]] = {
    "1B": (Shape(**BILLION), False),
    "1B with checkpointing": (Shape(**BILLION), True),
    "1B in float32": (Shape(**BILLION | {"precision": "fp32"}), False),
    "8B": (Shape(**EIGHT), False),
}
"""Shapes of Llama 3.2 1B and 3.1 8B, with tied embeddings, and whether layers are computed again."""
MEASURED = ("1B", "8B")


def measure(name: str) -> dict[str, Any]:
    """Bytes and FLOP of a run, and the bytes that the plan calculates for it."""
    shape, checkpointing = RUNS[name]
    found, work = dry.dry_run(shape, checkpointing=checkpointing)
    run = Run(
        policy=memory_plan.sizes_of(work.actor_critic.policy),
        ppo=work.settings,
        longest=shape.query,
        num_gpus=1,
        is_bf16=shape.precision == "bf16",
        has_reward_model=True,
    )
    return {
        "peaks": found.peaks,
        "plan": memory_plan.memory(run)["peak"],
        "flop": {" ".join(key): flop for key, flop in found.flop.items()},
        "float32_share": found.float32_share,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_plan_is_within_a_fifth_of_the_peak(name: str, child: Child) -> None:
    found = child(measure, name)
    peaks = {phase or "else": f"{peak / GB:.1f}" for phase, peak in found["peaks"].items()}
    print(f"{name}: {found['plan'] / GB:.1f} GB planned; GB at most by phase: {peaks}")
    assert 0.8 < found["plan"] / max(found["peaks"].values()) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_tenth_of_the_time_of_matmuls_at_most_is_float32(name: str, child: Child) -> None:
    found = child(measure, name)
    tera = {key: f"{flop / 1e12:.1f}" for key, flop in found["flop"].items()}
    print(f"{name}: {found['float32_share']:.1%} of the time of matmuls is float32; TFLOP: {tera}")
    assert found["float32_share"] <= 0.1


def measure_toy() -> list[Any]:
    """The matmuls of an update with numbers, and of one without; and the bytes."""
    found = list[Any]()
    for numbers in (True, False):
        gpu = Gpu(numbers=numbers)
        toy.update(gpu)
        found.append([sorted((*m, n) for m, n in gpu.matmuls.items()), dict(gpu.peaks)])
    return found


def test_without_numbers_the_same_is_multiplied_and_held(child: Child) -> None:
    (matmuls, peaks), (other_matmuls, other_peaks) = child(measure_toy)
    assert other_matmuls == matmuls
    assert other_peaks == peaks

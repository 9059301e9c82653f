"""`python -m benchmarks.dry`: PPO of params.yaml on a GPU that is not here."""

from __future__ import annotations

from typing import Any

from benchmarks import dry
from tests.gpu.conftest import Child


def measure() -> dict[str, Any]:
    return dry.measure(None, 80.0, 16)


def test_the_shipped_parameters_run_dry(child: Child) -> None:
    """Score: reference, critic and reward model read the rollout, and in bf16 the policy too."""
    found = child(measure)
    flop = {(phase, kind): number for phase, kind, number in found["flop"]}
    assert found["parameters"] == 644160
    assert {phase for phase, _ in flop} == {"sample", "score", "train"}
    assert flop["train", "bfloat16"] > 2 * flop["score", "bfloat16"] > 0
    assert 0 < found["peaks"]["train"] < found["plan"] * 1.5

"""`python -m benchmarks.dry`: PPO of params.yaml on a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import dry
from tests import small
from tests.gpu.conftest import Child


def measure(model: str | None = None) -> dict[str, Any]:
    return dry.measure(model, 80.0, 16)


def test_the_shipped_parameters_run_dry(child: Child) -> None:
    """Score: reference, critic and reward model read the rollout, and in bf16 the policy too."""
    found = child(measure)
    flop = {(phase, kind): number for phase, kind, number in found["flop"]}
    assert found["parameters"] == 644160
    assert {phase for phase, _ in flop} == {"sample", "score", "train"}
    assert flop["train", "bfloat16"] > 2 * flop["score", "bfloat16"] > 0
    assert 0 < found["peaks"]["train"] < found["plan"] * 1.5


def test_a_model_whose_files_are_in_16_bits_trains_in_float32(child: Child, tmp_path: Path) -> None:
    peaks = list[dict[str, Any]]()
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        small.causal().save_pretrained(folder)
        known = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(known | {"dtype": dtype}), "utf-8")
        peaks.append(child(measure, str(folder))["peaks"])
    assert peaks[0] == peaks[1]

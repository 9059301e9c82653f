"""Before PPO's first step the policy is its reference and all ratios are 1, in each layout and precision."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import Model
from rlhf_tasks.data import tokenizer
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.ppo.guards import BF16_RATIO_ERROR, SHARDED_BF16_RATIO_ERROR
from tests.project.test_packaged import SMOLLM2
from tests.small import ROOT

LAYOUTS = ("ddp", "zero2", "zero3", "fsdp2")


def first_update(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.training.first_update", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kl_before_training_is_zero_and_all_ratios_are_one(layout: str, precision: str) -> None:
    """In float32 the rollout has the sampler's own log-probs, which differ from a pass by rounding."""
    found = first_update(layout, precision)
    assert found["pass"] == 0
    rounding = 0.0 if precision == "bf16" else 1e-5
    assert found["rollout"] <= rounding
    assert found["ratio_error"] <= rounding


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    load_causal(SMOLLM2).save_pretrained(folder)
    tokenizer.load_base(Model(base=SMOLLM2, scratch=None)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra smollm2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_model_stays_below_the_guard_in_bf16(layout: str, smollm2: Path) -> None:
    """Also where out-of-memory makes micro-batches smaller between scoring and training."""
    found: dict[str, Any] = first_update(layout, "bf16", str(smollm2))
    assert found["pass"] == found["rollout"] == found["ratio_error"] == 0
    guard = BF16_RATIO_ERROR if layout == "ddp" else SHARDED_BF16_RATIO_ERROR
    assert found["ratio_error_of_another_cut"] < guard / 1.5

"""`launch.compile`: the same numbers, and a clear message where torch cannot compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_tasks.models.sampling import sample
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Nowhere
from rlhf_tasks.training.supervised import LanguageModeling, train
from tests import small

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by g++")


def losses(model: PreTrainedModel, *, compiles: bool) -> list[float]:
    """The losses of two epochs; rows of many lengths."""
    tracker = NullTracker("sft")
    train(
        small.distributed(compiles=compiles),
        model,
        LanguageModeling(*small.rows(24), small.PAD),
        small.optimization(num_epochs=2.0, learning_rate=1e-3, micro_batch_tokens=32),
        seed=1,
        name="test",
        tracker=tracker,
        snapshots=Nowhere(),
    )
    return [row["train/loss"] for row in tracker.history()]


@needs_compiler
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_compiled_model_takes_the_same_steps_and_samples_as_it_is_written(family: small.Family) -> None:
    """In a process of its own: what torch compiles with must not meet modules of other tests."""
    code = f"from tests.training import test_compiling; test_compiling.compare({family!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=small.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(family: small.Family) -> None:
    models, frames = [small.causal(family) for _ in range(2)], torch._dynamo.utils.counters["frames"]
    plain = losses(models[0], compiles=False)
    assert not frames["total"]
    assert losses(models[1], compiles=True) == pytest.approx(plain, abs=1e-5)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one - other).abs().max() < 1e-5
    compiled = int(frames["total"])  # torch has no public count
    assert compiled
    how: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "ends": (small.EOS,), "pad": small.PAD}
    sample(models[1], small.rows(4)[0], generator=torch.Generator().manual_seed(1), **how)
    assert frames["total"] == compiled


PROGRAM = """
import torch
from rlhf_tasks.errors import UserError
from rlhf_tasks.training.distributed import compile_layers
try:
    compile_layers(torch.nn.Linear(2, 2))
except UserError as error:
    print(error)
"""


def test_without_a_compiler_the_message_names_the_remedy(tmp_path: Path) -> None:
    nowhere = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | nowhere,
        cwd=small.ROOT,
        capture_output=True,
        text=True,
    )
    assert "launch.compile: true, but torch cannot compile on this machine" in done.stdout, done.stderr
    assert "no-such-compiler" in done.stdout
    assert "set launch.compile to false" in done.stdout

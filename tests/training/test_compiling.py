"""`launch.compile`: the same numbers, and a clear message where torch cannot compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_tasks.modeling.sampling import sample
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Nowhere
from rlhf_tasks.training.supervised import LanguageModeling, train
from tests import small

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by g++")


def in_its_own_process(call: str) -> None:
    """What torch compiles with must not meet modules that other tests have loaded."""
    code = f"from tests.training import test_compiling as t; t.{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=small.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def losses(model: PreTrainedModel, *, compiles: bool) -> list[float]:
    """The losses of two epochs; rows of many lengths."""
    tracker = NullTracker("sft")
    train(
        small.runtime(compiles=compiles),
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
def test_a_compiled_model_takes_the_same_steps(family: small.Family) -> None:
    in_its_own_process(f"compare_steps({family!r})")


def compare_steps(family: small.Family) -> None:
    models = [small.causal(family) for _ in range(2)]
    plain, compiled = (losses(model, compiles=on) for model, on in zip(models, (False, True), strict=True))
    assert compiled == pytest.approx(plain, abs=1e-5)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one - other).abs().max() < 1e-5


@needs_compiler
def test_sampling_runs_no_compiled_layer() -> None:
    in_its_own_process("count_compiled_frames()")


def count_compiled_frames() -> None:
    def frames() -> int:
        return int(torch._dynamo.utils.counters["frames"]["total"])  # torch has no public count

    model, before = small.causal(), frames()
    losses(model, compiles=True)
    compiled = frames()
    assert compiled > before
    sample(
        model, small.rows(4)[0], max_new_tokens=3, temperature=1.0, stop=small.EOS, pad=small.PAD,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert frames() == compiled


PROGRAM = """
import torch
from rlhf_tasks.errors import UserError
from rlhf_tasks.training.runtime import compile_layers
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

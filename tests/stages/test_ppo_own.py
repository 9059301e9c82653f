"""The examples by `rlhf ppo`, named in params.yaml, on one and two processes and with two micro-batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from rlhf_tasks.cli import main
from tests import small
from tests.ppo.toy import without_critic
from tests.stages.test_ppo import POLICY, SETTINGS, run
from tests.training import stages

SCORER = """
def length(prompts, responses):
    return [len(response) / 10 for response in responses]
"""
EXAMPLES: dict[str, dict[str, Any]] = {
    "gspo": without_critic("group")
    | {"loss": "examples.gspo:gspo", "loss_reduction": "response_mean", "cliprange": 0.01},
    "estimator": without_critic("examples.estimator:batch_mean", 1),
    # most lengths of a group are equal, and Adam's eps hides differences of 0.01
    "reward": without_critic("examples.estimator:batch_mean", 1)
    | {"scorers": [{"kind": "function", "weight": 1000.0, "function": "examples.reward:brevity"}]},
}
SHORTER = {"kind": "function", "name": "shorter", "function": "examples.judge:shorter", "pairwise": True}
SELECTION = without_critic("group") | {"select_by": {"judge": SHORTER, "max_failure_share": 0.5}}


def trained_by(example: dict[str, Any], processes: int, max_tokens: int) -> dict[str, torch.Tensor]:
    """The policy's weights after training without anything that would select others."""
    ppo = {"scorers": [{"kind": "function", "weight": 1.0, "function": "scorer:length"}]} | example
    ppo |= {
        "micro_batch_tokens": max_tokens,
        "truncation": {"kind": "none"},
        "learning_rate": 1e-3,
        "schedule": "constant",
    }
    without = {key: value for key, value in small.WITHOUT_REWARD.items() if "critic" not in key}
    changes = SETTINGS | without | {f"ppo.{key}": value for key, value in ppo.items()}
    changes |= {"launch.num_processes": processes, "tracking.enabled": False}
    YAML().dump(small.params(changes), Path("params.yaml"))
    if processes == 1:  # without a start of Python
        run(**changes)
        return stages.weights(str(POLICY))
    command = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    environment = os.environ | {"PYTHONPATH": str(small.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return stages.weights(str(POLICY))


def with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the working folder a project with the examples."""
    shutil.copy(small.ROOT / "dvc.yaml", Path())
    monkeypatch.setenv("RLHF_STATE_DIR", "state")
    shutil.copytree(small.ROOT / "examples", "examples")
    Path("scorer.py").write_text(SCORER, encoding="utf-8")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("gspo", 1),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in EXAMPLES if name != "gspo"),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in EXAMPLES),
    ],
)
def test_an_example_takes_the_same_steps_however_its_batch_is_cut(
    name: str, processes: int, models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_examples(monkeypatch)
    start = stages.weights("models/sft")
    expected = trained_by(EXAMPLES[name], 1, 16384)
    assert max(float((expected[key] - start[key]).abs().max()) for key in start) > 1e-3
    for key, value in trained_by(EXAMPLES[name], processes, 64).items():
        torch.testing.assert_close(value, expected[key], atol=5e-5, rtol=0)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_judge_of_the_examples_selects_the_same_weights(
    processes: int, models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prefers fewer words than the references have; of equal win rates the first weights are kept."""
    with_examples(monkeypatch)
    expected = trained_by(SELECTION, 1, 16384)
    for key, value in trained_by(SELECTION, processes, 64).items():
        torch.testing.assert_close(value, expected[key], atol=5e-5, rtol=0)
    assert "the best by the judge shorter" in (POLICY / "README.md").read_text(encoding="utf-8")


def test_from_the_command_to_backward_are_at_most_twelve_frames_in_six_files(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(small.ROOT / "dvc.yaml", Path())
    monkeypatch.setenv("RLHF_STATE_DIR", "state")
    YAML().dump(small.params(SETTINGS | {"tracking.enabled": False}), Path("params.yaml"))
    stacks: list[list[str]] = []
    backward: Any = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        files = [frame.filename for frame in traceback.extract_stack()]
        stacks.append([file for file in files if file.startswith(str(small.ROOT / "rlhf_tasks"))])
        backward(loss, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    assert main.main(["ppo"]) == 0
    assert stacks
    assert max(map(len, stacks)) <= 12
    assert max(len({*files}) for files in stacks) <= 6

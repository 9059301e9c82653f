"""A stage of the project in this folder, started as a user starts it, what it wrote, and its snapshots."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_tasks import config
from rlhf_tasks.config import SftView, Stage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import auto, checkpoint
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed
from tests import small


def rlhf(stage: Stage) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf_tasks.cli", stage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def metrics(stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"metrics/{stage}.json").read_text(encoding="utf-8"))
    return found


def curve(stage: str) -> list[dict[str, str]]:
    with Path(f"plots/{stage}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def loop(view: SftView | None = None, dist: Distributed | None = None) -> AbstractContextManager[Snapshots]:
    """The snapshots of a loop of stage sft."""
    view = view or SftView.of(auto.resolve(config.load(), Path()))
    return checkpoint.open_snapshots(dist or small.distributed(), Paths(), view, "loop")


PROGRAM = """
import os, pathlib, signal, time
import torch
from rlhf_tasks.training.distributed import Distributed

calls = 0

def spoilt(backward):
    return lambda self, model, loss: backward(self, model, loss * float("nan"))

def full(*given):
    raise torch.OutOfMemoryError("no memory is left")

def scores(prompts, responses):
    global calls
    calls += 1
    if os.environ["RANK"] == "VICTIM" and calls == 4:
        pathlib.Path("reached").touch()
        ACTION
    return [float(len(response)) for response in responses]
"""


def faulty(rank: int, action: str) -> dict[str, Any]:
    """The scorers of a PPO in which this rank writes `reached` in its fourth rollout, and then acts."""
    code = PROGRAM.replace("VICTIM", str(rank)).replace("ACTION", action)
    Path("faulty.py").write_text(code, encoding="utf-8")
    function = {"kind": "function", "function": "faulty:scores", "weight": 0.1}
    return {"scorers": [{"kind": "reward_model", "weight": 1.0, "path": None}, function]}

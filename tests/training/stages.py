"""A stage of the project in this folder, started as a user starts it, and what it wrote."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_tasks.config import Stage


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

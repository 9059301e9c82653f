"""The tables of the presets on SmolLM2: the fit, and which cells run again."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cells
from benchmarks.smollm2 import gao

VARIANTS = {"plain": {}, "large": {"ppo.kl_coef": "1.0"}}


def test_the_fit_finds_the_constants_of_its_own_curve() -> None:
    kls = [0.5, 2.0, 5.0, 11.0, 30.0]
    points = [(0.0, 0.0), *((kl, math.sqrt(kl) * (0.9 - 0.4 * math.log(math.sqrt(kl)))) for kl in kls)]
    assert gao(points) == pytest.approx((0.9, 0.4, 1.0))


def test_a_finished_cell_is_kept_and_a_trial_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = list[list[str]]()

    def run(words: list[str], **how: Any) -> argparse.Namespace:
        started.append([*words])
        if words[:2] == ["git", "clone"]:
            Path(words[-1]).mkdir()
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cells, "pass_on_sigterm", lambda: None)

    def found(only: list[str], *changes: str) -> list[cells.Cell]:
        started.clear()
        args = argparse.Namespace(seeds=[2], only=only, set=list(changes), jobs=1)
        return cells.run("name", VARIANTS, lambda folder: {"folder": folder.as_posix()}, args, preset="smoke")

    large, plain = ({"seed": 2, "variant": v, "folder": ".rlhf/name/2"} for v in ("large", "plain"))
    assert found(["large"]) == [large]
    assert started[1:3] == [
        ["git", "checkout", "--quiet", "--", "params.yaml"],  # no value of another variant is left
        ["rlhf", "preset", "smoke", "--set", "seed=2", "ppo.kl_coef=1.0"],
    ]
    assert found(["plain"], "ppo.total_episodes=8")[0]["folder"] == ".rlhf/name-trial/2"
    assert found(["plain", "large"]) == [plain, large]
    assert [words[0] for words in started] == ["git", "rlhf", "rlhf"]
    lines = Path(".rlhf/name/cells.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [large, plain]


def test_after_a_failure_no_further_cell_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], **how: Any) -> argparse.Namespace:
        if words[:2] == ["git", "clone"]:
            Path(words[-1]).mkdir()
        return argparse.Namespace(returncode=0)

    def measure(folder: Path) -> cells.Cell:
        raise OSError(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cells, "pass_on_sigterm", lambda: None)
    args = argparse.Namespace(seeds=[1, 2], only=["large", "plain"], set=[], jobs=1)
    with pytest.raises(OSError, match="name/1"):
        cells.run("name", VARIANTS, measure, args)
    assert [folder.name for folder in Path(".rlhf/name").iterdir() if folder.is_dir()] == ["1"]


def test_a_stopped_benchmark_lets_its_program_save(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal\n"
        "def save(*_): pathlib.Path('saved').touch(); exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path('up').touch(); signal.pause()\n"
    )
    benchmark = (
        "import subprocess, sys\n"
        "from benchmarks import cells\n"
        "cells.pass_on_sigterm()\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    words = [sys.executable, "-c", benchmark, program]
    with subprocess.Popen(words, cwd=tmp_path, env=environment) as stopped:
        _wait_for(tmp_path / "up")
        stopped.terminate()
    assert stopped.returncode == 128 + signal.SIGTERM
    _wait_for(tmp_path / "saved")


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)

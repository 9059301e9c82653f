"""Killed by SIGKILL at random moments, a whole run ends with the bytes of a run that nobody touched.

The moments and the victims are drawn from a seed: the program that was started, any one process of it, or all
at once. `test_resume.py` has the single stages and their settings.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import identity
from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.project import processes
from tests import small, toy
from tests.flows import toy as projects

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MARK = "RLHF_TEST_KILLED"  # in the environment of every process of a run
SMOKE: Mapping[str, Any] = {
    "data": {"num_validation": 16, "num_test": 32},
    "prepare": {"synthetic_prompt_rows": 96, "synthetic_sft_rows": 64, "synthetic_preference_rows": 64},
    "model.scratch": {"hidden_size": 16, "num_layers": 2, "num_heads": 2},
    "base": {"batch_size": 8},
    "sft": {"batch_size": 8, "num_epochs": 2.0},
    "preferences": {"num_prompts": 32},
    "reward": {"batch_size": 8, "num_epochs": 2.0},
    "ppo": {"total_episodes": 128, "rollout_batch_size": 16, "num_mini_batches": 2, "learning_rate": 1e-3},
    "ppo.guards": None,
    "ppo.num_sample_generations": 3,
    "ppo.num_selections": 1,
    "ppo.num_selection_prompts": 8,
    "judge": {"num_examples": 16, "retention": None},
    "resume.every_seconds": 0.1,
    "tracking.enabled": False,
    "service.retries": 0,
}
KILLS: Mapping[Stage, int] = {"base": 3, "sft": 4, "preferences": 3, "reward": 4, "ppo": 4, "judge": 2}
KILLS_OF_TWO: Mapping[Stage, int] = {"base": 2, "sft": 2, "reward": 3, "ppo": 3}
KILLS_OF_FLOW = 3


@dataclass
class Project:
    """A clone of the repository with a small pipeline, and how long its programs take undisturbed."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        own = {MARK: str(self.folder), "PREFECT_HOME": str(self.folder.parent / "prefect")}
        own["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "300"
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_tasks.cli", *command.split()],
            cwd=self.folder,
            env=projects.environment() | own,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, command: str) -> None:
        begin = time.monotonic()
        assert self.start(command).wait(600) == 0, command
        self.seconds[command] = time.monotonic() - begin

    def kill(self, command: str, seconds: float, rng: random.Random) -> bool:
        """Start the command and kill some of it at a random moment; False if it was done before."""
        process = self.start(command)
        try:
            return process.wait(rng.uniform(0, seconds)) != 0
        except subprocess.TimeoutExpired:
            # Without Prefect's own server: a flow waits for one that is killed while it starts.
            alive = [p for p in processes.find(MARK, str(self.folder)) if p not in self.servers()]
            for victim in alive if rng.random() < 0.4 else rng.choice([[process], [rng.choice(alive)]]):
                victim.kill()
        status = process.wait(300)
        for server in self.servers():  # the process that ends it with its flow may have been killed, too
            server.kill()
        projects.until(lambda: not processes.find(MARK, str(self.folder)), "the end of what it had started")
        return status != 0

    def servers(self) -> list[psutil.Process]:
        """The Prefect servers that flows have started."""
        return [p for p in processes.find(MARK, str(self.folder)) if "uvicorn" in " ".join(p.cmdline())]

    def survive(self, command: str, kills: int, rng: random.Random, seconds: float) -> None:
        """Run a command to its end, after as many kills."""
        while kills:
            kills -= self.kill(command, seconds, rng)
        self.run(command)


def project(folder: Path, **changes: Any) -> Project:
    projects.git(toy.ROOT, "clone", "-q", str(toy.ROOT), str(folder))
    projects.identify(folder)
    small.write_params(folder, {**SMOKE, **changes})
    return Project(folder)


def run_stages(
    made: Project, kills: Mapping[Stage, int], undisturbed: Mapping[str, float], seed: int
) -> None:
    """All stages in order, some of which are killed."""
    rng = random.Random(seed)
    for stage in STAGES:
        made.survive(stage, kills.get(stage, 0), rng, undisturbed.get(stage, 0.0))


def differences(one: Project, other: Project) -> list[str]:
    """What differs between two finished runs: weights, and metrics but for times."""
    return identity.differences(identity.contents(one.folder), identity.contents(other.folder))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = project(tmp_path_factory.mktemp("untouched") / "project")
    run_stages(made, {}, {}, 0)
    weights = identity.contents(made.folder)
    policy, sft = (weights[f"models/{name}/model.safetensors"] for name in ("policy", "sft"))
    assert policy != sft, "PPO must have changed what is compared"
    return made


def test_one_process_killed_twenty_times_ends_with_the_same_bytes(untouched: Project, tmp_path: Path) -> None:
    killed = project(tmp_path / "project")
    run_stages(killed, KILLS, untouched.seconds, seed=1)
    assert differences(untouched, killed) == []


def test_two_processes_killed_ten_times_end_with_the_same_bytes(tmp_path: Path) -> None:
    pair = [project(tmp_path / name, **{"launch.num_processes": 2}) for name in ("untouched", "killed")]
    run_stages(pair[0], {}, {}, 0)
    run_stages(pair[1], KILLS_OF_TWO, pair[0].seconds, seed=2)
    assert differences(*pair) == []


def test_a_flow_killed_at_random_moments_ends_with_the_same_bytes(untouched: Project, tmp_path: Path) -> None:
    """With the record of MLflow; DVC may be killed, too."""
    killed = project(tmp_path / "project", **{"tracking.enabled": True})
    killed.survive("run --flow", KILLS_OF_FLOW, random.Random(3), sum(untouched.seconds.values()) / 2)
    assert differences(untouched, killed) == []
    assert not processes.find(MARK, str(killed.folder))

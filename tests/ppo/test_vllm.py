"""PPO with the real vLLM. `RLHF_VLLM` names its program, such as /opt/vllm/bin/vllm, in its own environment.

docs/how-to/sample-with-vllm.md has the installation. On a CPU, vLLM takes heads of 32 and more.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ruamel.yaml import YAML

from rlhf_tasks.config import Scratch
from rlhf_tasks.data.batches import load_tokenizer
from rlhf_tasks.modeling import contracts
from rlhf_tasks.modeling.load import TokenScores, from_scratch, save_checkpoint
from rlhf_tasks.ppo.engines.protocol import EngineGone, check
from rlhf_tasks.ppo.engines.vllm import VllmEngine
from rlhf_tasks.ppo.rollout import ActorCritic, FrozenCopy
from rlhf_tasks.project.processes import Daemon
from tests import small, toy
from tests.ppo import test_engines
from tests.ppo.test_engines import LIMITS, QUERIES, SEEDS, alive, of_servers, until
from tests.ppo.toy import ENGINE, Toy
from tests.ppo.toy import toy as training
from tests.stages.test_ppo import POLICY, SETTINGS
from tests.training import stages

VLLM = os.environ.get("RLHF_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="RLHF_VLLM does not name a vLLM program"),
]
SHAPE = Scratch(family="llama", hidden_size=64, num_layers=2, num_heads=2, vocab_size=1024, tokenizer="words")


def causal(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return from_scratch(SHAPE, small.tokenizer(), max_positions=128).eval()


def command() -> list[str]:
    assert VLLM is not None
    return ["env", "VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", VLLM, "serve", "--enforce-eager"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    """`start(**changes)`: an engine that is closed at the end of the test."""
    started: list[VllmEngine] = []

    def one(**changes: Any) -> VllmEngine:
        section = {"command": command(), "start_seconds": 600.0, "timeout_seconds": 120.0} | changes
        started.append(test_engines.engine(tmp_path, **section))
        return started[-1]

    yield one
    running = of_servers(tmp_path)
    for engine in started:
        engine.close()
    until(lambda: not alive(running))


def learner(engine: VllmEngine, ahead: int, **changes: Any) -> Toy:
    policy = causal()
    reference = copy.deepcopy(policy).requires_grad_(False)
    return training(
        engine=engine,
        engine_section=ENGINE | {"ahead": ahead},
        truncation__kind="none",
        actor_critic=ActorCritic(policy, small.scores(seed=3)),
        reference=FrozenCopy(reference, moves=False),
        rollout_batch_size=64,
        num_ppo_epochs=4,
        kl_coef=0.0,
        schedule="linear",
        **changes,
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_token_is_learned_through_vllm(ahead: int, start: Callable[..., VllmEngine]) -> None:
    engine = start(ahead=ahead)
    history = list(learner(engine, ahead, total_episodes=20 * 64, learning_rate=5e-3).updates)
    for name in ("logprob_diff", "logprob_diff_max", "kl", "load_seconds"):
        values = [m[f"engine/{name}"] for m in history]
        first, low, high = values[0], min(values[1:]), max(values[1:])
        print(f"ahead {ahead}, {name}: first {first:.3g}, then {low:.3g} to {high:.3g}")
    scores = [m["objective/raw_scores"] for m in history]
    print(f"ahead {ahead}, {engine.name}, scores:", *(f"{score:.2f}" for score in scores))
    assert engine.name.startswith("vLLM 0.")
    assert scores[0] < 0.1
    assert sum(scores[-3:]) / 3 > 0.5
    if ahead == 0:
        assert max(m["engine/logprob_diff_max"] for m in history) < 1e-4
    assert [m["engine/lag"] for m in history] == [0.0] + [float(ahead)] * 19


def test_a_server_that_is_killed_while_it_samples_is_started_again_once(
    start: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    """The second end is an error, not a wait."""
    engine, many = start(), QUERIES * 100
    engine.load(causal(), 1)
    expected = engine.sample(QUERIES, 1, SEEDS)
    first = of_servers(tmp_path)
    assert len(first) >= 3, "what ends it, the server, and its engine"
    with killed_soon(tmp_path) as is_killed:
        while not is_killed():
            check(engine.sample(many, 1, SEEDS * 100), len(many), 1, LIMITS)
    assert engine.sample(QUERIES, 1, SEEDS).responses == expected.responses
    assert not alive(first)
    with killed_soon(tmp_path), pytest.raises(EngineGone, match="started again once before, and its log"):
        sample_without_end(engine)


def sample_without_end(engine: VllmEngine) -> None:
    while True:
        engine.sample(QUERIES * 100, 1, SEEDS * 100)


@contextmanager
def killed_soon(home: Path) -> Iterator[Callable[[], bool]]:
    """Within the block all processes of the server are killed, and the yielded function becomes True."""
    killer = threading.Timer(0.3, kill, [home])
    killer.start()
    yield lambda: not killer.is_alive()
    killer.join()


def kill(home: Path) -> None:
    """Kill the server alone: its engine must not outlive it."""
    for process in of_servers(home):
        words = " ".join(process.cmdline())
        if "--logprobs-mode" in words and "rlhf_tasks.training.attached" not in words:
            process.kill()


# ------------------------------------------------------------------------------------ the whole stage

START_SECONDS = 600.0
"""Longest wait for a server; it takes more than a minute."""
SECONDS = 900.0
"""From the last kill of a server to the end of the stage, which may have started another one."""


@pytest.fixture
def project(models_here: Path) -> Path:
    """A project for `rlhf ppo`, with models whose heads vLLM takes on a CPU."""
    shutil.copy(small.ROOT / "dvc.yaml", models_here)
    words, parents = load_tokenizer(models_here / "models/sft"), dict[str, Any]()
    for name in ("sft", "reward", "reward_heldout"):
        made = from_scratch(SHAPE, words, max_positions=256)
        if name != "sft":
            made = TokenScores.from_policy(models_here / "models/sft", torch.Generator()).model
            parents = {"parents": {"sft": contracts.fingerprint(models_here / "models/sft")}}
        shutil.rmtree(models_here / "models" / name)
        save_checkpoint(made, words, models_here / "models" / name, identity=parents, card="a card")
    section = {"url": None, "command": command(), "start_seconds": START_SECONDS, "timeout_seconds": 120.0}
    changes = {
        "ppo.sampler": ENGINE | section, "data.max_completion_tokens": 64, "ppo.response_length": 64,
        "ppo.rollout_batch_size": 32, "ppo.total_episodes": 96, "tracking.enabled": False,
        "resume.every_seconds": 1e-6,
    }  # fmt: skip
    with (models_here / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(small.params(SETTINGS | changes), file)
    return models_here


def is_sampling(home: Path) -> bool:
    """Whether the server computes responses now, by its own count."""
    for file in home.rglob("vllm-*.json"):
        try:
            text = httpx.get(f"{Daemon(file.stem, file.parent).record()['url']}/metrics", timeout=5).text
        except (httpx.HTTPError, KeyError):
            continue
        counts = re.findall(r"^vllm:num_requests_running.* ([\d.]+)$", text, re.MULTILINE)
        if any(float(count) for count in counts):
            return True
    return False


@pytest.mark.e2e
@pytest.mark.parametrize("kills", [1, 2])
def test_a_stage_whose_server_is_killed_in_the_first_rollout_ends(kills: int, project: Path) -> None:
    """Killed once, it is started again and the stage ends well; killed twice, with an error that says so."""
    log, state = project / "stage.log", project / "state"
    with log.open("w", encoding="utf-8") as out:
        stage = subprocess.Popen(
            [sys.executable, "-m", "rlhf_tasks.cli", "ppo"], stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(small.ROOT), "RLHF_STATE_DIR": str(state)},
        )  # fmt: skip
    try:
        for _ in range(kills):
            until(lambda: stage.poll() is not None or is_sampling(project), START_SECONDS)
            assert stage.poll() is None, log.read_text(encoding="utf-8")
            assert not list(state.glob("*/*/*/step-*")), "no update is done"
            kill(project)
            killed = time.monotonic()
        status = stage.wait(SECONDS)
    finally:
        stage.kill()
        stage.wait()
    said = log.read_text(encoding="utf-8")
    print(f"killed {kills} times: status {status}, {time.monotonic() - killed:.0f} s after the last one")
    assert "it is started again, once" in said
    assert status == (0 if kills == 1 else 1), said
    if kills == 1:
        identity = json.loads((project / POLICY / contracts.IDENTITY).read_text(encoding="utf-8"))
        assert identity["sampler"].startswith("vLLM 0.")
        assert json.loads(Path("metrics/ppo.json").read_text(encoding="utf-8"))["episode"] == 96
    else:
        assert "started again once before, and its log is" in said.splitlines()[-1]
    until(lambda: not of_servers(project))


@pytest.mark.e2e
def test_two_processes_that_share_the_weights_learn_from_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage ppo under FSDP2, started as a user starts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    toy.write_given()
    toy.copy_project()
    toy.foreign("foreign/base", "llama", hidden_size=64, intermediate_size=128)
    settings = toy.write_params()
    for stage in ("prepare", "base", "sft", "preferences", "reward"):
        toy.run(stage, settings)
    engine = ENGINE | {"url": None, "command": command(), "start_seconds": 240.0, "timeout_seconds": 120.0}
    toy.write_params(launch={"num_processes": 2, "parallelism": "fsdp2"}, ppo={"sampler": engine})
    stages.rlhf("ppo")
    rows = [row for row in stages.curve("ppo") if row["engine/logprob_diff_max"]]
    print("logprob_diff_max:", *(row["engine/logprob_diff_max"] for row in rows))
    assert len(rows) == 2
    assert max(float(row["engine/logprob_diff_max"]) for row in rows) < 1e-4
    assert "sampled by vLLM 0." in Path("models/policy/README.md").read_text(encoding="utf-8")
    assert not alive(of_servers(tmp_path))

"""PPO with the real vLLM. `RLHF_VLLM` names its program, such as /opt/vllm/bin/vllm, in its own environment.

docs/how-to/sample-with-vllm.md has the installation. On a CPU, vLLM takes heads of 32 and more.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.config import Scratch
from rlhf_tasks.modeling import models
from rlhf_tasks.ppo.engines.protocol import EngineGone, check
from rlhf_tasks.ppo.engines.vllm import VllmEngine
from rlhf_tasks.ppo.reference import OwnModel
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.ppo.trainer import Trainer
from tests import small
from tests.ppo import test_engines
from tests.ppo.test_engines import LIMITS, QUERIES, SEEDS, alive, of_servers, until
from tests.ppo.toy import ENGINE, trainer

VLLM = os.environ.get("RLHF_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="RLHF_VLLM does not name a vLLM program"),
]
SHAPE = Scratch(family="llama", hidden_size=64, num_layers=2, num_heads=2, vocab_size=1024, tokenizer="words")


def causal(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return models.from_scratch(SHAPE, small.tokenizer(), max_positions=128).eval()


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


def learner(engine: VllmEngine, ahead: int, **changes: Any) -> Trainer:
    policy = causal()
    reference = copy.deepcopy(policy).requires_grad_(False)
    return trainer(
        engine=engine, engine_section=ENGINE | {"ahead": ahead}, truncation="none",
        actor_critic=ActorCritic(policy, small.scores(seed=3)), reference=OwnModel(reference, moves=False),
        rollout_batch_size=64, num_ppo_epochs=4, kl_coef=0.0, schedule="linear", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_token_is_learned_through_vllm(ahead: int, start: Callable[..., VllmEngine]) -> None:
    engine = start(ahead=ahead)
    history = list(learner(engine, ahead, total_episodes=20 * 64, learning_rate=5e-3).updates())
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

"""PPO with the real vLLM. `RLHF_VLLM` names its program, such as /opt/vllm/bin/vllm, in its own environment.

docs/how-to/sample-with-vllm.md has the installation. On a CPU, vLLM takes heads of 32 and more.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.config import Scratch
from rlhf_tasks.models.heads import ActorCritic
from rlhf_tasks.models.load import from_scratch
from rlhf_tasks.ppo.rollout import Reference
from rlhf_tasks.ppo.vllm import VllmError, VllmServer
from tests import small, toy
from tests.ppo.test_vllm import QUERIES, SEEDS, alive, make_server, of_servers, until
from tests.ppo.toy import VLLM_SAMPLER
from tests.ppo.toy import toy as training
from tests.training import stages

VLLM = os.environ.get("RLHF_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="RLHF_VLLM does not name a vLLM program"),
]
SHAPE = Scratch(family="llama", hidden_size=64, num_layers=2, num_heads=2, vocab_size=1024, tokenizer="words")


def causal() -> Any:
    torch.manual_seed(0)
    return from_scratch(SHAPE, small.tokenizer(), max_positions=128).eval()


def section() -> dict[str, Any]:
    assert VLLM is not None
    words = ["env", "VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", VLLM, "serve", "--enforce-eager"]
    return {"command": words, "start_seconds": 600.0, "timeout_seconds": 120.0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VllmServer]:
    one = make_server(tmp_path, **section())
    yield one
    running = of_servers(tmp_path)
    one.close()
    until(lambda: not alive(running))


def test_a_token_is_learned_through_vllm(server: VllmServer) -> None:
    policy = causal()
    reference = copy.deepcopy(policy).requires_grad_(False)
    learner = training(
        server=server,
        truncation__kind="none",
        actor_critic=ActorCritic(policy, small.scores(seed=3)),
        reference=Reference(reference),
        rollout_batch_size=64,
        total_episodes=20 * 64,
        learning_rate=5e-3,
        num_ppo_epochs=4,
        kl_coef=0.0,
        schedule="linear",
    )
    history = list(learner.updates)
    scores = [m["objective/raw_scores"] for m in history]
    assert server.name.startswith("vLLM 0.")
    assert scores[0] < 0.1
    assert sum(scores[-3:]) / 3 > 0.5
    assert max(m["sampler/logprob_diff_max"] for m in history) < 1e-4


def test_a_server_that_is_killed_while_it_samples_is_an_error_and_not_a_wait(
    server: VllmServer, tmp_path: Path
) -> None:
    server.load(causal())
    assert len(of_servers(tmp_path)) >= 3, "what ends it, the server, and its engine"

    def sample_without_end() -> None:
        while True:
            server.sample(QUERIES * 100, 1, SEEDS * 100)

    with killed_soon(tmp_path), pytest.raises(VllmError, match="its log is"):
        sample_without_end()


@contextmanager
def killed_soon(home: Path) -> Iterator[None]:
    """Within the block the server alone is killed, whose engine must not outlive it."""

    def kill() -> None:
        for process in of_servers(home):
            words = " ".join(process.cmdline())
            if "--logprobs-mode" in words and "rlhf_tasks.project.processes" not in words:
                process.kill()

    killer = threading.Timer(0.3, kill)
    killer.start()
    yield
    killer.join()


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
    toy.run_stages(toy.write_params())
    sampler = VLLM_SAMPLER | {"url": None} | section()
    toy.write_params(launch={"num_processes": 2, "parallelism": "fsdp2"}, ppo={"sampler": sampler})
    stages.rlhf("ppo")
    rows = [row for row in stages.curve("ppo") if row["sampler/logprob_diff_max"]]
    assert len(rows) == 2
    assert max(float(row["sampler/logprob_diff_max"]) for row in rows) < 1e-4
    assert "sampled by vLLM 0." in Path("models/policy/README.md").read_text(encoding="utf-8")
    assert not alive(of_servers(tmp_path))

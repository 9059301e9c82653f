"""A stage that has ended is restored by every later run, whichever way the first run ended."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from flows import pipeline as flows_pipeline
from rlhf_tasks.config import STAGES
from rlhf_tasks.project import dvc_cli, git, processes
from tests.flows import toy
from tests.flows.chain import Chain, times

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),  # those of Prefect and its server
]
BEFORE_PPO = STAGES.index("ppo")
PPO_TWICE = times(*[1] * BEFORE_PPO, 2, 1)


@pytest.fixture
def chain(root: Path) -> Chain:
    return Chain(root)


def keys(folder: Path) -> dict[str, str]:
    """`{stage: key}` of the runs that made the outs."""
    files = {stage: folder / f"models/lineage/{stage}.json" for stage in STAGES}
    return {stage: json.loads(file.read_text(encoding="utf-8"))["rlhf.run"] for stage, file in files.items()}


def run(**parameters: Any) -> Any:
    """A run of the flow in a workspace; its final state."""
    return flows_pipeline.pipeline(return_state=True, **parameters)


def once_held(chain: Chain, act: Callable[[int], None]) -> None:
    """Act in the background, given the pid of the stage that waits, once it does."""

    def wait() -> None:
        act(int(toy.until(lambda: chain.waiting.exists() and chain.waiting.read_text("utf-8"), "the outs")))

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_each_of_two_seeds_runs_once_however_often_they_change(chain: Chain) -> None:
    dvc_cli.run(chain.root, "repro")
    first = keys(chain.root)
    toy.commit(chain.root)
    chain.set_seed(2)
    dvc_cli.run(chain.root, "repro")
    assert chain.ran() == times(2)
    changes = json.loads(dvc_cli.run(chain.root, "metrics", "diff", "--json"))
    assert changes["metrics/ppo.json"]["seed"] == {"old": 1, "new": 2, "diff": 1}
    curves = json.loads(dvc_cli.run(chain.root, "plots", "diff", "--json"))["data"]["Base model loss"]
    values = curves[0]["content"]["data"]["values"]
    assert {(point["rev"], point["train/loss"]) for point in values} == {("HEAD", "1"), ("workspace", "2")}
    chain.set_seed(1)
    dvc_cli.run(chain.root, "repro")
    assert chain.ran() == times(2)
    assert keys(chain.root) == first, "restored outs name the run that made them"
    assert git.list_changes(chain.root) == [], "metrics, curves and dvc.lock are those of the first run"


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_runs_and_repro_restore_what_a_failed_run_and_each_other_have_done(chain: Chain) -> None:
    chain.hold("ppo")
    once_held(chain, lambda stage: os.kill(stage, signal.SIGKILL))
    assert run(seed=5).type == StateType.FAILED
    assert chain.ran() == dict.fromkeys(STAGES[: BEFORE_PPO + 1], 1)
    assert run(seed=5, name="second").type == StateType.COMPLETED
    assert chain.ran() == PPO_TWICE
    chain.set_seed(6)
    dvc_cli.run(chain.root, "repro")
    made = keys(chain.root)
    assert "nothing had to run" in run(seed=6, name="third").message, "a flow after `dvc repro`"
    revision = git.find_experiment(chain.root, "third")
    assert revision is not None
    dvc_cli.run(chain.root, "exp", "apply", "third")
    assert keys(chain.root) == made
    assert chain.ran() == {stage: number + 1 for stage, number in PPO_TWICE.items()}


@pytest.mark.slow
def test_a_cancelled_run_goes_on_at_its_stage_and_so_does_the_one_after_a_crash(tmp_path: Path) -> None:
    chain = Chain(toy.make(tmp_path / "project"))
    with toy.service(chain.root) as service:
        chain.hold("ppo")
        identity = service.start(seed=5)
        toy.until(chain.waiting.exists, "the outs of ppo")
        service.cancel(identity)
        assert service.end(identity)["type"] == "CANCELLED"
        scheduled = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
        service.call("POST", f"/flow_runs/{identity}/set_state", scheduled)  # "Retry" in the UI
        toy.until(lambda: service.run(identity)["run_count"] == 2, "the retry")
        assert service.end(identity)["type"] == "COMPLETED", service.logs(identity)
        assert chain.ran() == PPO_TWICE
        chain.hold("ppo")
        identity = service.start(seed=6)
        toy.until(chain.waiting.exists, "the outs of ppo")
        for process in processes.find("PREFECT__FLOW_RUN_ID", identity):
            process.kill()
        assert service.end(identity)["type"] == "CRASHED"
        again = service.start(seed=6)
        assert service.end(again)["type"] == "COMPLETED", service.logs(again)
        assert chain.ran() == {stage: 2 * number for stage, number in PPO_TWICE.items()}

"""Stage ppo with vLLM: what it writes, how it ends when the server fails, and that no server is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks.cli import main as cli
from rlhf_tasks.models import contracts
from rlhf_tasks.ppo.vllm import VllmError
from tests import small
from tests.ppo import standin
from tests.ppo.test_vllm import alive, of_servers, until
from tests.ppo.toy import started
from tests.stages.test_ppo import POLICY, SETTINGS, run


def section(*options: str, **changes: Any) -> dict[str, Any]:
    """A server that the stage starts, with options of the stand-in."""
    return {"ppo.sampler": started(*options, **changes)}


def test_the_policy_names_the_sampler_and_the_run_has_its_metrics(models_here: Path) -> None:
    _, history = run(**section())
    rows = [row for row in history if "sampler/logprob_diff" in row]
    assert [row["episode"] for row in rows] == [16, 32, 48]
    assert all(0 < row["sampler/logprob_diff"] <= row["sampler/logprob_diff_max"] < 1e-4 for row in rows)
    assert all(row["sampler/kl"] < 1e-6 and row["sampler/load_seconds"] > 0 for row in rows)
    identity = json.loads((POLICY / contracts.IDENTITY).read_text(encoding="utf-8"))
    assert identity["sampler"] == f"vLLM {standin.VERSION}"
    assert f"its rollouts were sampled by vLLM {standin.VERSION}" in (POLICY / "README.md").read_text("utf-8")
    assert not of_servers(models_here)
    assert len(list((models_here / ".rlhf/vllm").iterdir())) == 1, "the log alone is kept"


def test_a_server_that_ends_ends_the_stage_with_one_message_that_names_its_log(
    models_here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contracts.fingerprint(POLICY)
    with pytest.raises(VllmError, match=r"vLLM at .* does not answer .*; its log is .*\.log"):
        run(**section("--fault", "die"))
    assert contracts.fingerprint(POLICY) == before
    assert not of_servers(models_here)

    def fail(*_: object) -> int:
        raise VllmError("vLLM has gone")

    monkeypatch.setattr("rlhf_tasks.stages.runner.run", fail)
    assert cli.main(["ppo"]) == 1
    assert capsys.readouterr().err == "rlhf: vLLM has gone\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_cancelled_stage_leaves_no_server(models_here: Path) -> None:
    """The server hangs in the first rollout. The first SIGTERM waits for the update, the second does not."""
    shutil.copy(small.ROOT / "dvc.yaml", Path())
    marker = models_here / "marker"
    server = section("--canned", "--fault", "hang", "--marker", str(marker))
    changes = SETTINGS | server | {"tracking.enabled": False}
    YAML().dump(small.params(changes), Path("params.yaml"))
    environment = os.environ | {"PYTHONPATH": str(small.ROOT)}
    words = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    stage = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: stage.poll() is not None or marker.exists())
    assert stage.poll() is None
    running = of_servers(models_here)
    assert len(running) == 2
    while stage.poll() is None:
        stage.terminate()
        time.sleep(0.1)
    assert stage.returncode == 143
    until(lambda: not alive(running))

"""Secrets stay out of what a run writes, and no server listens to other machines.

`tests/browser/test_scripts.py` has the pages, and `tests/models/test_load.py` the formats of weights.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import small
from tests.flows import toy
from tests.judging import endpoint
from tests.loopback import serving
from tests.scoring.server import Server as Scorer
from tests.scoring.server import scores, status
from tests.training import test_killed

ROOT = Path(__file__).parents[1]
SCORER, MLFLOW, PREFECT = (f"planted:{secrets.token_hex(8)}" for _ in range(3))
"""In no file of the repository, of which a test has a clone."""
SECRETS = {
    "SCORER_KEY": SCORER,
    "JUDGE_KEY": endpoint.KEY,
    "MLFLOW_TRACKING_USERNAME": "somebody",
    "MLFLOW_TRACKING_PASSWORD": MLFLOW,
    "PREFECT_API_AUTH_STRING": PREFECT,
}
HIDDEN = (SCORER, endpoint.KEY, MLFLOW, PREFECT)


@pytest.fixture
def judge_server() -> Iterator[endpoint.Server]:
    with serving(endpoint.Server()) as started:
        yield started


@pytest.fixture
def scorer_server() -> Iterator[Scorer]:
    with serving(Scorer()) as made:
        yield made


def run(folder: Path, stage: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(
        [sys.executable, "-m", "rlhf_tasks.cli", stage],
        cwd=folder,
        env=os.environ | SECRETS | own,
        capture_output=True,
        text=True,
        check=False,
    )


def assert_hidden(folder: Path, *outputs: str) -> None:
    """No secret is in a file below the folder, in MLflow's store, or in what was printed."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert any(file.name == "mlflow.db" for file in files) or any("outbox" in str(file) for file in files)
    for file in files:
        text = content(file)
        assert [secret for secret in HIDDEN if secret.encode() in text] == [], file
    assert [secret for secret in HIDDEN if secret in "".join(outputs)] == []


def content(file: Path) -> bytes:
    """The bytes of a file, whatever its name in the DVC cache; those of a table uncompressed."""
    found = file.read_bytes()
    return str(pq.read_table(file).to_pylist()).encode() if found.startswith(b"PAR1") else found


@pytest.mark.e2e
def test_planted_keys_are_nowhere_in_what_a_run_wrote(
    trained: Path, tmp_path: Path, judge_server: endpoint.Server, scorer_server: Scorer
) -> None:
    """Judging by a language model, and PPO whose HTTP scorer at last refuses its key; with tracking."""
    folder = tmp_path / "project"
    shutil.copytree(trained, folder)
    shutil.copy(ROOT / "dvc.yaml", folder)
    (folder / "prompt.txt").write_text(endpoint.PROMPT, encoding="utf-8")
    changes: dict[str, Any] = {
        "ppo.total_episodes": 32,
        "ppo.rollout_batch_size": 16,
        "ppo.num_mini_batches": 2,
        "ppo.response_length": 6,
        "ppo.num_selections": 1,
        "ppo.num_selection_prompts": 8,
        "ppo.guards": None,
        "judge.num_examples": 4,
        "judge.retention": None,
        **paid(judge_server, scorer_server),
    }
    small.write_params(folder, changes)
    judged = run(folder, "judge")
    assert judged.returncode == 0, judged.stderr
    assert sum(judge_server.paid.values()) > 0, "the judge's key was accepted"
    scorer_server.script = [scores, scores, *[status(401)] * 99]
    failed = run(folder, "ppo")
    assert failed.returncode != 0
    assert "rejected the request" in failed.stderr
    assert scorer_server.logins[0] == f"Bearer {SCORER}", "the key was sent"
    assert_hidden(folder, *(one.stdout + one.stderr for one in (judged, failed)))


@pytest.mark.slow
@pytest.mark.e2e
def test_planted_keys_are_nowhere_in_what_a_flow_run_wrote(
    tmp_path: Path, judge_server: endpoint.Server, scorer_server: Scorer
) -> None:
    """The whole pipeline by the service; then a run whose scorer refuses its key."""
    changes = {"tracking.enabled": True, **paid(judge_server, scorer_server)}
    folder = test_killed.project(tmp_path / "project", **changes).folder
    (folder / "prompt.txt").write_text(endpoint.PROMPT, encoding="utf-8")
    toy.commit(folder)
    with toy.service(folder, SECRETS) as service:
        done = service.start()
        assert service.end(done)["type"] == "COMPLETED", service.logs(done)
        assert scorer_server.logins[0] == f"Bearer {SCORER}", "the key was sent"
        assert sum(judge_server.paid.values()) > 0, "the judge's key was accepted"
        scorer_server.script = [status(401)]
        failed = service.start(overrides={"ppo.kl_coef": 0.2})
        assert "rejected the request" in service.end(failed)["message"]
        toy.until(lambda: "rejected the request" in service.logs(failed), "the log")
        commands = " ".join(word for process in service.processes() for word in process.cmdline())
    assert {".rlhf/prefect/prefect.db", ".rlhf/mlflow.db", ".rlhf/service/worker.log"} <= {
        str(file.relative_to(folder)) for file in folder.rglob("*")
    }
    words = ["git", "cat-file", "--batch-all-objects", "--batch"]
    objects = subprocess.run(words, cwd=folder, check=True, capture_output=True).stdout
    assert_hidden(folder, commands, objects.decode(errors="replace"))


def paid(judge_server: endpoint.Server, scorer_server: Scorer) -> dict[str, Any]:
    """Settings of a scorer and a judge, whose keys are in environment variables."""
    scorer = {
        "kind": "http",
        "weight": 1.0,
        "url": scorer_server.url,
        "key_variable": "SCORER_KEY",
        "timeout_seconds": 30.0,
        "batch_size": 8,
    }
    judge = {
        "kind": "llm",
        "name": "gpt",
        "base_url": judge_server.url,
        "model": endpoint.MODEL,
        "key_variable": "JUDGE_KEY",
        "prompt": "prompt.txt",
        "logprobs": False,
        "max_reply_tokens": 8,
        "concurrency": 2,
        "timeout_seconds": 30.0,
        "max_retries": 0,
        "budget": None,
    }
    return {"ppo.scorers": [scorer], "judge.judges": [judge, small.HELDOUT]}


SERVED = re.compile(r"(?:HTTPServer\(|\.bind\(\(|--host\b|--bind\b|host=).*")
"""How a server is told where to listen."""


def test_every_server_of_this_package_listens_on_loopback() -> None:
    """In the code; `tests/flows/test_service.py` looks at the ports of the running service."""
    lines = [
        f"{file.relative_to(ROOT)}: {found.group(0)}"
        for folder in ("rlhf_tasks", "flows")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for found in SERVED.finditer(file.read_text(encoding="utf-8"))
    ]
    assert len(lines) >= 3, "prefect, mlflow, and the probe of a port"
    assert [line for line in lines if "HOST" not in line and "127.0.0.1" not in line] == []
    assert "--bind 127.0.0.1" in (ROOT / "Makefile").read_text(encoding="utf-8")

"""The flow's last task: what `rlhf promote` ends with, the run's state says."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows import pipeline as flows_pipeline
from flows import programs, promotion, results, stages
from rlhf_tasks import config
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.command import GOES_ON, UNDECIDED, verdict_file
from tests.flows import toy

pytestmark = pytest.mark.filterwarnings("ignore")  # Prefect's and its server's own
REFUSED = "rlhf-policy version 2 (models/policy): KL 11.2 > 10"
CRITERION = {"key": "kl", "title": "KL", "value": 11.2, "relation": "<=", "bound": 10.0, "lacking": "",
             "margin": -1.2, "passed": False}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose second stage makes a policy."""
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN"):
        monkeypatch.delenv(name, raising=False)
    made = toy.make(
        tmp_path / "project",
        service={"retries": 0, "grace_seconds": 20.0, "gpu_slots": 0},
    )
    yaml = toy.STAGES.replace("    outs: [second.txt]", "    outs: [second.txt, models/policy]")
    (made / "dvc.yaml").write_text(yaml, encoding="utf-8")
    toy.write_script(made, [toy.SECOND.strip(), "mkdir -p models/policy && echo w > models/policy/weights"])
    monkeypatch.chdir(made)
    return made


def gate_says(root: Path, text: str, status: int) -> None:
    """The command `rlhf promote` of this project says this."""
    code = root / "rlhf_tasks"
    code.mkdir(exist_ok=True)
    (code / "__init__.py").touch()
    (code / "cli.py").write_text(f"import sys\nprint('a line')\nprint({text!r})\nsys.exit({status})\n")
    toy.commit(root)


@pytest.mark.parametrize(
    ("text", "status", "state", "message"),
    [
        ("Promoted: version 3 is champion now", 0, "Promoted", "version 3 is champion now"),
        (f"Refused: {REFUSED}", 3, "Refused", REFUSED),
        (f"Deferred: MLflow does not answer{GOES_ON}", 4, "Deferred", "MLflow does not answer"),
        ("rlhf: no weights", 2, "Deferred", "the gate could not be asked (no weights)"),
        ("ValueError: a fault", 1, "Deferred", "the gate could not be asked (ValueError: a fault)"),
    ],
)
def test_every_end_is_a_completed_state_with_a_name_and_a_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int, state: str, message: str
) -> None:
    monkeypatch.setattr(programs, "get_run_logger", logging.getLogger)
    gate_says(root, text, status)
    values = config.load(root / "params.yaml")
    found: Any = promotion.promote.fn(root, toy.run_environment(), values)
    assert (found.is_completed(), found.name) == (True, state)
    assert found.message == message, "and no command, which would put another policy to the gate"


def test_a_slot_is_waited_for_only_where_there_is_something_to_judge(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try is to do it without; only one that leaves it undecided is followed by another."""
    toy.write_params(root, service={"gpu_slots": 1})
    values, asked = config.load(root / "params.yaml"), list[int]()

    def slots(number: int) -> AbstractContextManager[None]:
        asked.append(number)
        return nullcontext()

    monkeypatch.setattr(programs, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(stages, "slots", slots)
    gate_says(root, f"Refused: {REFUSED}", 3)
    environment = toy.run_environment()
    found: Any = promotion.promote.fn(root, environment, values)
    assert (found.name, asked) == ("Refused", [])
    code = "import sys\nquick = '--unless-judging' in sys.argv\n"
    code += "print('Undecided: wait' if quick else 'Promoted: it is champion now')\n"
    (root / "rlhf_tasks/cli/main.py").write_text(f"{code}sys.exit({UNDECIDED} if quick else 0)\n")
    found = promotion.promote.fn(root, environment, values)
    assert (found.name, found.message, asked) == ("Promoted", "it is champion now", [1])


def test_there_is_something_to_promote_only_with_gate_registry_and_policy(root: Path) -> None:
    values = config.load(root / "params.yaml")
    assert promotion.is_due(values, root)
    assert not promotion.is_due(values.model_copy(update={"promotion": None}), root)
    untracked = values.tracking.model_copy(update={"enabled": False})
    assert not promotion.is_due(values.model_copy(update={"tracking": untracked}), root)
    (root / "dvc.yaml").write_text(toy.STAGES, encoding="utf-8")
    assert not promotion.is_due(values, root), "no stage makes models/policy"


def test_the_verdict_stands_on_the_page_of_results(root: Path) -> None:
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], check=True)
    file = verdict_file(Paths().home, dvc_files.locked(root)[promotion.POLICY])
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"criteria": [CRITERION]}), encoding="utf-8")
    outcome = results.Outcome("n", {}, [], "c", None, [], f"Refused: {REFUSED}", promotion.criteria(root))
    page = results.page(outcome, root, {}, {}, {})
    assert f"## Promotion\n\nRefused: {REFUSED}" in page
    assert "| KL | 11.2 | <= 10 | -1.2 | FAILED |" in page


@pytest.mark.slow
@pytest.mark.e2e
def test_a_refused_run_is_completed_and_says_why(root: Path, server: None) -> None:
    gate_says(root, f"Refused: {REFUSED}", 3)
    state: Any = flows_pipeline.pipeline(where="checkout", return_state=True)
    assert (state.is_completed(), state.name) == (True, "Refused")
    assert state.message.startswith(f"Refused: {REFUSED}; ran first, second")
    with get_client(sync_client=True) as client:
        tasks = {run.name: run.state.name for run in client.read_task_runs() if run.state is not None}
    assert tasks["promote"] == "Refused"

"""The flow's last task: the run's state has the end of `rlhf promote`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows import pipeline as flows_pipeline
from flows import promotion, results
from flows.results import Outcome
from flows.slots import Slots
from rlhf_tasks import config
from rlhf_tasks.cli import main as cli
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.command import POLICY, RETRY_HINT, UNDECIDED, verdict_file
from tests.flows import toy

pytestmark = [
    pytest.mark.usefixtures("no_run"),
    pytest.mark.filterwarnings("ignore"),  # those of Prefect and its server
]
REFUSED = "rlhf-policy version 2 (models/policy): KL 11.2 > 10"
CRITERION = {"key": "kl", "title": "KL", "value": 11.2, "relation": "<=", "bound": 10.0, "margin": -1.2}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose second stage makes a policy."""
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN"):
        monkeypatch.delenv(name, raising=False)
    made = toy.make(tmp_path / "project", service={"retries": 0, "grace_seconds": 20.0, "gpu_slots": 0})
    yaml = toy.STAGES.replace("    outs: [second.txt]", "    outs: [second.txt, models/policy]")
    (made / "dvc.yaml").write_text(yaml, encoding="utf-8")
    toy.write_script(made, [toy.SECOND.strip(), "mkdir -p models/policy && echo w > models/policy/weights"])
    monkeypatch.chdir(made)
    return made


def replace_promote(root: Path, code: str) -> None:
    """Replace the command `rlhf promote` of this project by a program."""
    package = root / "rlhf_tasks/cli"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(f"import sys\n{code}\n", encoding="utf-8")
    toy.commit(root)


def end_with(root: Path, text: str, status: int) -> None:
    """`rlhf promote` of this project prints a text and ends with a status."""
    replace_promote(root, f"print('a line')\nprint({text!r})\nsys.exit({status})")


def promote(root: Path) -> Any:
    environment = toy.run_environment() | {"PYTHONPATH": str(root)}
    return promotion.promote.fn(root, environment, config.load(root / "params.yaml"))


@pytest.mark.parametrize(
    ("text", "status", "state", "message"),
    [
        ("Promoted: version 3 is champion now", 0, "Promoted", "version 3 is champion now"),
        (f"Not promoted: {REFUSED}", 3, "Not promoted", REFUSED),
        (f"Deferred: MLflow does not answer{RETRY_HINT}", 4, "Deferred", "MLflow does not answer"),
        ("rlhf: no weights", 2, "Deferred", "the gate did not run (no weights)"),
        ("ValueError: a fault", 1, "Deferred", "the gate did not run (ValueError: a fault)"),
    ],
)
def test_every_end_is_a_state_with_a_name_and_a_reason_and_the_run_has_its_results(
    root: Path, text: str, status: int, state: str, message: str
) -> None:
    end_with(root, text, status)
    result = promote(root)
    assert (result.is_completed(), result.name) == (True, state), "the run has its results"
    assert result.message == message, "a command in it would promote another policy"


def test_only_a_promotion_that_must_judge_takes_a_slot(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try does without judging; only an undecided one is followed by a second try."""
    toy.write_params(root, service={"gpu_slots": 1})
    taken = list[int]()
    monkeypatch.setattr(Slots, "hold", lambda slots, number, show: taken.append(number))
    end_with(root, f"Not promoted: {REFUSED}", 3)
    assert (promote(root).name, taken) == ("Not promoted", [])
    code = "quick = '--unless-judging' in sys.argv\n"
    code += "print('Undecided: wait' if quick else 'Promoted: it is champion now')\n"
    replace_promote(root, f"{code}sys.exit({UNDECIDED} if quick else 0)")
    result = promote(root)
    assert (result.name, result.message, taken) == ("Promoted", "it is champion now", [1])


def test_nothing_is_promoted_without_gate_registry_or_policy(root: Path) -> None:
    values = config.load(root / "params.yaml")
    untracked = values.tracking.model_copy(update={"enabled": False})
    assert promotion.verdict(root, values.model_copy(update={"promotion": None}), {}) == {}
    assert promotion.verdict(root, values.model_copy(update={"tracking": untracked}), {}) == {}
    (root / "dvc.yaml").write_text(toy.STAGES, encoding="utf-8")
    assert promotion.verdict(root, values, {}) == {}, "no stage makes models/policy"


def test_the_page_of_results_shows_the_verdict_and_its_criteria(root: Path) -> None:
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], check=True)
    file = verdict_file(Paths(root).home, dvc_files.locked(root)[POLICY])
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"criteria": [CRITERION]}), encoding="utf-8")
    criteria = promotion.criteria(root)
    refused = Outcome(
        name="n", how={}, revision="c", verdict="Not promoted", reason=REFUSED, criteria=criteria
    )
    page = results.page(refused, root, {})
    assert f"## Results\n\n- Not promoted: {REFUSED}" in page
    assert "| KL | 11.2 | <= 10 | -1.2 | FAILED |" in page


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_with_a_refused_policy_ends_as_not_promoted_with_the_reason(root: Path, server: None) -> None:
    end_with(root, f"Not promoted: {REFUSED}", 3)
    not_asked: Any = flows_pipeline.pipeline(where="checkout", promote=False, return_state=True)
    assert (not_asked.is_completed(), not_asked.name) == (True, "Completed")
    assert cli.main(["run", "--flow"]) == 0, "the run has its results"
    state: Any = flows_pipeline.pipeline(where="checkout", return_state=True)
    assert (state.is_completed(), state.name) == (True, "Not promoted")
    assert state.message == f"Not promoted: {REFUSED}; nothing had to run"
    with get_client(sync_client=True) as client:
        tasks = {run.name: run.state.name for run in client.read_task_runs() if run.state is not None}
    assert tasks["promote"] == "Not promoted"

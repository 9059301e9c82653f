"""A project with planted metrics, and an MLflow store that is made once and copied."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import console
from rlhf_tasks.promotion import command
from tests.promotion import planted

VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "RLHF_PARENT_RUN", "DVC_EXP_NAME", "RANK", "LOCAL_RANK")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without a run: making its tables takes seconds."""
    from mlflow.tracking import MlflowClient

    from rlhf_tasks.tracking.store import embedded_uri

    home = tmp_path_factory.mktemp("store")
    MlflowClient(embedded_uri(home)).create_experiment(
        "rlhf", artifact_location=(home / "artifacts").as_uri()
    )
    return home / "mlflow.db"


@pytest.fixture
def home(tmp_path: Path, empty_store: Path) -> Path:
    """The `.rlhf` of the project at `tmp_path`."""
    (tmp_path / ".rlhf").mkdir()
    shutil.copyfile(empty_store, tmp_path / ".rlhf/mlflow.db")
    return tmp_path / ".rlhf"


@pytest.fixture
def project(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test: git, DVC, the shipped parameters, and a better policy."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for words in (["init", "-q"], ["config", "user.name", "t"], ["config", "user.email", "t@example.org"]):
        subprocess.run(["git", *words], check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    shutil.copy(planted.ROOT / "dvc.yaml", tmp_path)
    planted.params(tmp_path)
    planted.pipeline(tmp_path)
    console.set_quiet(False)
    return tmp_path


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No model is run: what a contest measures is given, and who was asked against whom is noted."""
    told: dict[str, Any] = {
        "champion": planted.over_champion(),
        "sft": planted.BETTER,
        "asked": [],
        "cost": {},
    }

    def contest(settings: Any, criteria: Any, model: str, against: str, name: str) -> dict[str, float]:
        weights = Path(against, "weights")
        told["asked"].append((name, weights.read_text(encoding="utf-8") if weights.exists() else against))
        return dict(told[name])

    monkeypatch.setattr(command, "_contest", contest)
    monkeypatch.setattr(
        "rlhf_tasks.promotion.cost.measured", lambda settings, policy, sft: dict(told["cost"])
    )
    monkeypatch.setattr("rlhf_tasks.evaluation.judges.optimised", lambda settings, policy: {})
    return told

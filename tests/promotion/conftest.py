"""A project with planted results, and an MLflow store that is made once and copied."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.judging import head_to_head
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import measurement
from rlhf_tasks.promotion.verdict import Kl
from tests.flows import toy
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
    """The `.rlhf` folder of the project at `tmp_path`."""
    (tmp_path / ".rlhf").mkdir()
    shutil.copyfile(empty_store, tmp_path / ".rlhf/mlflow.db")
    return tmp_path / ".rlhf"


@pytest.fixture
def project(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test: git, DVC, the shipped parameters, and a policy that passes the gate."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy.repository(), tmp_path, dirs_exist_ok=True)
    shutil.copy(planted.ROOT / "dvc.yaml", tmp_path)
    planted.params(tmp_path)
    planted.pipeline(tmp_path)
    console.set_quiet(False)
    return tmp_path


@dataclass
class Measured:
    """What the measurements of a test give, and which of them were made."""

    champion: EvaluationResults = field(default_factory=planted.over_champion)
    sft: EvaluationResults = field(default_factory=planted.results)
    cost: tuple[EvaluationResults, Kl | None] = field(default_factory=planted.cost)
    compared: list[str] = field(default_factory=list)
    """The weights that the candidate was compared with, or their folder."""
    costs: int = 0

    def compare(
        self, view: JudgeView, model: str, against: str, *, paths: Paths, **rest: Any
    ) -> EvaluationResults:
        weights = paths.root / against / "weights"
        self.compared.append(weights.read_text(encoding="utf-8") if weights.exists() else against)
        results = self.sft if against == "models/sft" else self.champion
        names = {"a": model, "b": against}
        comparisons = tuple(one.model_copy(update=names) for one in results.comparisons)
        return EvaluationResults(comparisons=comparisons)

    def measure(self, settings: Any, paths: Paths, policy: Path) -> tuple[EvaluationResults, Kl | None]:
        self.costs += 1
        return self.cost


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """No model runs: comparisons and costs are planted."""
    given = Measured()
    monkeypatch.setattr(head_to_head, "compare_models", given.compare)
    monkeypatch.setattr(measurement, "measure_cost", given.measure)
    return given

"""A project with a store of its own, whose runs are delivered when a test says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks.tracking import context, courier, rendezvous
from rlhf_tasks.tracking.store import embedded_uri


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables made, which takes seconds, to copy from."""
    home = tmp_path_factory.mktemp("store")
    MlflowClient(embedded_uri(home)).search_experiments()
    return home / "mlflow.db"


@pytest.fixture
def home(project: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The .rlhf folder of a project; couriers wait for `deliver`, so that tests say when."""
    folder = project / ".rlhf"
    folder.mkdir()
    shutil.copy(empty_database, folder)
    monkeypatch.setattr(rendezvous, "start_courier", lambda post: None)
    monkeypatch.setattr(rendezvous, "await_delivery", lambda *waited: True)
    monkeypatch.setattr(courier, "RETRY_SECONDS", 0.0)
    for name, value in context.HTTP_BOUNDS.items():
        monkeypatch.setenv(name, value if name != "MLFLOW_HTTP_REQUEST_MAX_RETRIES" else "0")
    return folder

"""A project with a store of its own. Runs are delivered by the test, or by their own threads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf_tasks.tracking import context, sync
from rlhf_tasks.tracking.store import open_store


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose tables exist: creating them takes seconds."""
    home = tmp_path_factory.mktemp("store")
    open_store(None, home)
    return home / "mlflow.db"


@pytest.fixture
def store(project: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's `.rlhf` folder with a store; runs deliver themselves."""
    for name, value in context.HTTP_BOUNDS.items():
        monkeypatch.setenv(name, value if name != "MLFLOW_HTTP_REQUEST_MAX_RETRIES" else "0")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = project / ".rlhf"
    folder.mkdir()
    shutil.copy(empty_database, folder)
    return folder


@pytest.fixture
def home(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without threads: a test calls `sync`, or delivers live runs by `toy.step`."""
    monkeypatch.setattr(sync.Sender, "start", lambda _: None)
    monkeypatch.setattr(sync.Sender, "close", lambda *_: None)
    return store

"""A toy project up to the reward models, whose stages are started as a user starts them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import toy


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy project up to the reward models, made in this process."""
    folder = tmp_path_factory.mktemp("toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
        toy.write_given()
        toy.copy_project()
        toy.foreign("foreign/base", "gpt_neox")
        settings = toy.write_params()
        toy.run_stages(settings)
    return folder


@pytest.fixture
def toy_project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "project"

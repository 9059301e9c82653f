"""Calls on a pretended GPU (`pretend.py`), each in a process of its own: no other test sees that GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.gpu.child import compile_stub
from tests.small import ROOT

Child = Callable[..., Any]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, the same for all of its worker processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def stub(shared_folder: Path) -> Path:
    """The library of stub.cpp."""
    library = shared_folder / "stub.so"
    with FileLock(library.with_suffix(".lock")):
        if not library.exists() and (missing := compile_stub(library)):
            pytest.skip(missing)
    return library


@pytest.fixture(scope="session")
def child(shared_folder: Path, stub: Path) -> Child:
    """What a function returns for some words, as JSON keeps it, in a process that may pretend a GPU.

    It is called once in a run of pytest, whatever tests ask for it.
    """

    def call(function: Callable[..., Any], *words: str) -> Any:
        file = shared_folder / f"{'.'.join([function.__module__, function.__name__, *words])}.json"
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                command = [str(stub), function.__module__, function.__name__, str(file), *words]
                known = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
                done = subprocess.run(
                    [sys.executable, "-m", "tests.gpu.child", *command],
                    cwd=ROOT,
                    env=known | {"OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(file.read_text(encoding="utf-8"))

    return call

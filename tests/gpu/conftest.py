"""Calls on a pretended GPU (`pretend.py`), each in a process of its own: no other test sees that GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

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
    if torch.backends.cuda.is_built():
        pytest.skip("a GPU is pretended to a CPU build of torch only")
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library, folder = shared_folder / "stub.so", Path(torch.__file__).parent
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{folder / 'include'}"]
            command += ["-o", str(library), str(ROOT / "tests/gpu/stub.cpp")]
            command += [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
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

"""A project of shell stages to run flows in, and a Prefect server for all tests of a process."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from flows import devices, promotion, settings, subprocesses
from tests.flows import toy

ShowGpus = Callable[..., None]


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """A Prefect server without telemetry."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.QUIET.items():
            patch.setenv(name, value)
        with prefect_test_harness(server_startup_timeout=300):
            yield


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a project whose name no other test of this server uses."""
    made = toy.make(
        tmp_path / "project",
        tracking={"enabled": False, "experiment": f"test-{uuid.uuid4()}"},
        service={"retries": 0, "grace_seconds": 20.0},
    )
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT works as in a foreground shell, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs log, although no run is there."""
    for module in (subprocesses, promotion):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test of programs"))


@pytest.fixture
def show_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShowGpus:
    """Puts a stand-in for `nvidia-smi` on the path, with this listing, which then acts."""
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def put(listing: str, act: str = "exit 0") -> None:
        (programs / "listing").write_text(listing, encoding="utf-8")
        program = programs / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {programs}/listing\n{act}\n', "utf-8")
        program.chmod(0o755)

    return put

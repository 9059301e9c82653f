"""The flow runs dvc.yaml's stages in order, stops at a failure, and stops them when it is cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from flows import pipeline as flows_pipeline

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # Prefect's and its server's own

STAGES = """\
stages:
  first:
    cmd: echo one > first.txt; echo $RLHF_PARENT_RUN > parent.txt
    outs: [first.txt]
  second:
    cmd: {command}
    deps: [first.txt]
    outs: [second.txt]
  third:
    cmd: cp second.txt third.txt
    deps: [second.txt]
    outs: [third.txt]
"""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    return tmp_path


def write_stages(folder: Path, command: str) -> None:
    (folder / "dvc.yaml").write_text(STAGES.format(command=json.dumps(command)), encoding="utf-8")


def test_stages_run_in_order_and_share_the_flow_as_parent(folder: Path) -> None:
    write_stages(folder, "cp first.txt second.txt")
    flows_pipeline.pipeline()
    assert (folder / "third.txt").read_text() == "one\n"
    assert (folder / "parent.txt").read_text().startswith("prefect-")


def test_a_failed_stage_fails_the_flow_and_starts_no_other(folder: Path) -> None:
    write_stages(folder, "exit 3")
    with pytest.raises(RuntimeError, match="stage second failed"):
        flows_pipeline.pipeline()
    assert not (folder / "third.txt").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a foreground shell, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stage_hears_interrupts_though_its_parent_does_not(folder: Path) -> None:
    asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (folder / "asks.py").write_text(asks, encoding="utf-8")
    write_stages(folder, f"{sys.executable} asks.py > second.txt")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        flows_pipeline.pipeline()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (folder / "second.txt").read_text(encoding="utf-8") == "True\n"


def test_an_interrupted_flow_stops_the_stage_itself(folder: Path, interruptible: None) -> None:
    trap = f"{sys.executable} slow.py"
    (folder / "slow.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('started').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path('interrupted').touch()\n",
        encoding="utf-8",
    )
    write_stages(folder, trap)

    def interrupt() -> None:
        while not (folder / "started").exists():
            time.sleep(0.05)
        time.sleep(1)  # until the flow waits for the stage again: Prefect's logging can swallow an interrupt
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(BaseException):  # noqa: B017, PT011  which one is Prefect's to choose
        flows_pipeline.pipeline()
    assert (folder / "interrupted").exists()
    assert not (folder / "third.txt").exists()

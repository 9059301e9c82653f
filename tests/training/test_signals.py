"""Ctrl-C and SIGTERM in every phase of a stage: what it says within two seconds, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context
from rlhf_tasks.training import checkpoint, failures, signals
from tests import small, toy
from tests.training.stages import loop

HEARD_SECONDS = 10.0  # on a busy machine; a signal is heard within two
PASSED_ON_SECONDS = 6.0  # until the processes that were launched hear it, on a busy machine
AT_ONCE_SECONDS = 4.0
PYTHON_SECONDS = 15.0  # for the end of Python itself after torch, on a busy machine


# ------------------------------------------------------------------------------------------ in this process


def loop_with_signals(*at: int) -> list[str]:
    """Runs three steps of a loop; SIGTERM arrives in the middle of the steps in `at`."""
    seen: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with loop() as snapshots:
            for step in (1, 2, 3):
                for _ in range(at.count(step)):
                    os.kill(os.getpid(), signal.SIGTERM)
                seen.append(f"step {step}")
                if snapshots.due():
                    seen.append(f"save {step}")
                    snapshots.save(step, {"step": step})
    except (signals.Stopped, signals.PeerFailed) as error:
        seen.append(type(error).__name__)
    assert signal.getsignal(signal.SIGTERM) == before
    return seen


@pytest.mark.parametrize(
    ("signals", "is_worker", "expected"),
    [
        ([2], False, ["step 1", "step 2", "save 2", "Stopped"]),
        ([2, 2], False, ["step 1", "Stopped"]),  # the second one does not wait
        ([2, 2], True, ["step 1", "step 2", "save 2", "Stopped"]),  # to a worker it is a copy
    ],
)
def test_the_first_signal_waits_for_the_end_of_the_step_and_a_snapshot(
    signals: list[int],
    is_worker: bool,
    expected: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "is_worker", lambda: is_worker)
    assert loop_with_signals(*signals) == expected
    assert checkpoint.point(Paths(), "sft") == ("step 2 of loop" if "save 2" in expected else None)


def test_a_signal_after_the_failure_of_another_worker_does_not_wait(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "is_worker", lambda: True)
    monkeypatch.setenv(failures.FAILURE, str(tmp_path / "failure.json"))
    failures.write({"kind": "fault", "message": "it failed", "process": "1"})
    assert loop_with_signals(2) == ["step 1", "PeerFailed"]


def test_a_signal_after_the_last_step_ends_the_stage(project: Path) -> None:
    with pytest.raises(signals.Stopped), loop():
        os.kill(os.getpid(), signal.SIGTERM)


# -------------------------------------------------------------------------------------------- real programs

PROGRAM = Path(__file__).with_name("slow_stage.py")


class Stage:
    """A stage whose phase takes minutes; what it prints is in `log`."""

    def __init__(self, log: Path, *words: str, command: list[str] | None = None) -> None:
        self.log, self._returned = log, set[int]()
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command or [sys.executable, str(PROGRAM), *words],
                env=os.environ | {"PYTHONPATH": str(toy.ROOT), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, words: str, seconds: float) -> str:
        """The first line not yet returned that has these words: processes print in any order."""
        deadline = time.monotonic() + seconds
        while True:
            is_last = self.process.poll() is not None or time.monotonic() > deadline
            lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
            for number, line in enumerate(lines):
                if words in line and line.endswith("\n") and number not in self._returned:
                    self._returned.add(number)
                    return line.rstrip()
            assert not is_last, "".join([f"it did not print {words!r}\n", *lines])
            time.sleep(0.02)

    def end(self, seconds: float) -> int:
        """The exit status. Nothing that the stage has started lives longer than a moment."""
        status = self.process.wait(seconds)
        deadline = time.monotonic() + 5
        while left := [one for one in psutil.process_iter() if _session(one) == self.process.pid]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return status


def _session(process: psutil.Process) -> int:
    """The session of a living process, else -1."""
    try:
        return -1 if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.Error, OSError):
        return -1


@pytest.fixture
def begin(project: Path) -> Iterator[Callable[..., Stage]]:
    """Starts a stage and waits until it is in its phase."""
    started: list[Stage] = []
    small.write_params(project, {"tracking.enabled": False})

    def start(*words: str, command: list[str] | None = None) -> Stage:
        stage = Stage(project / f"{len(started)}.log", *words, command=command)
        started.append(stage)
        stage.wait_for("reached", 120)
        return stage

    yield start
    for stage in started:
        if stage.process.poll() is None:
            for process in psutil.Process(stage.process.pid).children(recursive=True):
                process.kill()
            stage.process.kill()
        stage.process.wait()


@pytest.mark.parametrize(
    ("phase", "number", "said", "seconds"),
    [
        ("load", signal.SIGTERM, "rlhf: SIGTERM", AT_ONCE_SECONDS),
        ("load-in-c", signal.SIGINT, "rlhf: Ctrl-C", signals.CLOSING_SECONDS + AT_ONCE_SECONDS),
    ],
)
def test_outside_a_loop_a_signal_ends_the_stage_at_once_also_in_a_long_call_of_c(
    begin: Callable[..., Stage], phase: str, number: signal.Signals, said: str, seconds: float
) -> None:
    stage = begin(phase)
    stage.process.send_signal(number)
    line = stage.wait_for("ending", HEARD_SECONDS)
    why = "without a snapshot the next run starts it from the beginning"
    assert line == f"{said}: ending stage sft now; {why}"
    assert stage.end(seconds) == 128 + number


def test_in_a_loop_a_signal_waits_for_the_step_and_a_snapshot(begin: Callable[..., Stage]) -> None:
    stage = begin("loop")
    stage.process.send_signal(signal.SIGINT)
    said = stage.wait_for("Ctrl-C", HEARD_SECONDS)
    assert "stage sft is finishing this step and saving a snapshot (about " in said
    assert "; Ctrl-C again ends it at once; the next run resumes from step " in said
    saved = stage.wait_for("saved a snapshot after step", 10)
    assert stage.end(PYTHON_SECONDS) == 130
    step = saved.partition("step ")[2].partition(";")[0]
    assert checkpoint.point(Paths(), "sft") == f"step {step}", "which the next run resumes from"


def test_a_second_signal_ends_a_step_that_hangs_in_a_call_of_c(begin: Callable[..., Stage]) -> None:
    stage = begin("loop-in-c")
    stage.process.send_signal(signal.SIGINT)
    stage.wait_for("finishing this step", HEARD_SECONDS)
    time.sleep(signals.AT_ONCE_SECONDS + 1)
    assert stage.process.poll() is None, "the first signal waits for the step"
    stage.process.send_signal(signal.SIGINT)
    stage.wait_for("ending stage sft at once", HEARD_SECONDS)
    assert stage.end(AT_ONCE_SECONDS) == 130


@pytest.mark.e2e
@pytest.mark.parametrize("phase", ["loop", pytest.param("loop-in-c", marks=pytest.mark.slow)])
def test_launched_workers_are_stopped_in_the_same_way(begin: Callable[..., Stage], phase: str) -> None:
    small.write_params(Path(), {"tracking.enabled": False, "launch.num_processes": 2})
    stage = begin(phase)
    started = psutil.Process(stage.process.pid).children(recursive=True)
    workers = [one for one in started if "LOCAL_RANK" in one.environ()]
    assert len(workers) >= 2
    os.killpg(stage.process.pid, signal.SIGINT)  # as a terminal does, and DVC lets it
    stage.wait_for("Ctrl-C: stage sft is stopping its processes", HEARD_SECONDS)
    if phase == "loop-in-c":
        stage.wait_for("finishing this step", PASSED_ON_SECONDS)
        os.killpg(stage.process.pid, signal.SIGINT)
    else:
        stage.wait_for("finishing this step and saving a snapshot", PASSED_ON_SECONDS)
        stage.wait_for("saved a snapshot after step", PYTHON_SECONDS)
    assert stage.end(2 * PYTHON_SECONDS) == 130
    assert {_session(worker) for worker in workers} == {-1}


@pytest.mark.e2e
def test_a_terminals_ctrl_c_for_dvc_ends_its_stage_in_the_same_way(begin: Callable[..., Stage]) -> None:
    dvc = [sys.executable, "-m", "dvc"]
    Path("code.py").touch()
    subprocess.run([*dvc, "init", "--no-scm", "-q"], check=True)
    text = Path("dvc.yaml").read_text(encoding="utf-8")
    Path("dvc.yaml").write_text(text.replace("cmd: rlhf sft", f"cmd: {sys.executable} {PROGRAM} loop"))
    stage = begin(command=[*dvc, "repro", "--single-item", "sft"])
    os.killpg(stage.process.pid, signal.SIGINT)
    stage.wait_for("finishing this step and saving a snapshot", HEARD_SECONDS)
    stage.wait_for("saved a snapshot after step", 10)
    assert stage.end(2 * PYTHON_SECONDS) != 0

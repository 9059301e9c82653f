"""What runs a stage: DVC's plan, the program's output, its end, and what an interrupt leaves."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from flows import stage_tasks, subprocesses
from flows.stage_tasks import Dvc, StageFailed, StageRefused
from rlhf_tasks.project import dvc_cli
from rlhf_tasks.training import checkpoint
from tests.flows import toy

pytestmark = pytest.mark.usefixtures("no_run")


@pytest.fixture
def dvc(root: Path) -> Dvc:
    return Dvc(root, toy.run_environment(), 20.0)


def test_unchanged_restorable_and_changed_stages_differ(root: Path, dvc: Dvc) -> None:
    rows = root / "given/rows.txt"
    stages = ["first", "second"]
    assert dvc.plans(stages) == ["run"], "the plan of the next one depends on what this one makes"
    dvc_cli.run(root, "repro")
    assert dvc.plans(stages) == ["unchanged", "unchanged"]
    rows.write_text("other rows\n", encoding="utf-8")
    dvc_cli.run(root, "repro", "--single-item", "first")
    assert dvc.plans(stages) == ["unchanged", "run"]
    rows.write_text("rows\n", encoding="utf-8")
    assert dvc.plans(stages) == ["restore"]
    (root / "first.txt").unlink()
    assert dvc.plans(["second"]) == ["run"], "its input is missing"
    (root / "dvc.lock").write_text("stages: 5\n", encoding="utf-8")
    assert dvc.plans(stages) == ["run"], "DVC then says what is wrong"


def test_the_output_of_a_stage_is_logged_without_hints_for_a_terminal(
    dvc: Dvc, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        dvc.reproduce("first")
    assert any("Running stage 'first'" in line for line in caplog.messages)
    assert not any(word in line for line in caplog.messages for word in ("git add", "autostage", "push"))


def test_a_failed_stage_says_why_and_the_next_try_starts_afresh(root: Path, dvc: Dvc) -> None:
    dvc.reproduce("first")
    for lines, error, message in (
        (toy.refusal("fix it"), StageRefused, "^stage second refused: fix it$"),
        (
            ["echo 'No space left on device'", "exit 3"],
            StageFailed,
            "second failed: No space left on device; E",
        ),
        (["kill -9 $$"], StageFailed, "^stage second failed: "),
    ):
        toy.write_script(root, lines)
        with pytest.raises(error, match=message):
            dvc.reproduce("second")
    toy.write_script(root, [toy.SECOND.strip()])
    dvc.reproduce("second")
    lock = (root / "dvc.lock").read_text(encoding="utf-8")
    (root / "dvc.lock").write_text("stages: 5\n", encoding="utf-8")
    with pytest.raises(StageFailed, match=r"^stage first failed: .*in schema"):
        dvc.reproduce("first")
    (root / "dvc.lock").write_text(lock, encoding="utf-8")
    shutil.rmtree(root / "given")
    with pytest.raises(StageRefused, match=r"^stage first refused: given must exist"):
        dvc.reproduce("first")


def test_output_is_logged_and_the_input_of_a_program_is_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = "echo a; echo; echo b >&2; wc -c; printf 'no end'; exit 3"
    with caplog.at_level(logging.INFO):
        status, lines = subprocesses.run(["sh", "-c", script], tmp_path, toy.run_environment(), 1.0)
    assert (status, lines) == (3, ["a", "b", "0", "no end"])
    assert caplog.messages == lines


def test_a_process_that_outlives_its_program_does_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "DRAIN_SECONDS", 0.1)
    script = "echo a; (while [ ! -e stop ]; do sleep 0.1; done) &"
    assert subprocesses.run(["sh", "-c", script], tmp_path, toy.run_environment(), 1.0) == (0, ["a"])
    (tmp_path / "stop").touch()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("trap", ["", "trap '' INT"])
def test_an_interrupt_ends_dvc_and_its_stage_and_leaves_no_lock(root: Path, trap: str) -> None:
    """A stage that ignores the interrupt is killed after the grace."""
    dvc = Dvc(root, toy.run_environment(), 1.0 if trap else 20.0)
    toy.write_script(root, [trap, "echo $$ > pid", "while true; do sleep 1; done"])
    dvc.reproduce("first")

    def interrupt() -> None:
        toy.until((root / "pid").exists, "the stage")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        dvc.reproduce("second")
    thread.join()
    left = [p for p in psutil.process_iter() if p.pid == int((root / "pid").read_text(encoding="utf-8"))]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    toy.write_script(root, [toy.SECOND.strip()])
    dvc.reproduce("second")


def test_a_try_says_what_it_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_tasks.describe_beginning("first", tmp_path, 2) == "attempt 2 starts from the beginning"
    assert stage_tasks.describe_beginning("first", tmp_path, 1) == ""
    monkeypatch.setattr(checkpoint, "point", lambda paths, stage: "rollout 12")
    assert stage_tasks.describe_beginning("first", tmp_path, 1) == "resumes from rollout 12 of an earlier run"
    assert stage_tasks.describe_beginning("first", tmp_path, 2) == "attempt 2 resumes from rollout 12"


def test_a_deadline_interrupts_a_program_and_its_progress_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "FOLLOW_SECONDS", 0.1)
    followed = list[bool]()
    script = "trap 'touch kept; exit 130' INT; while true; do sleep 0.1; done"
    with pytest.raises(subprocesses.OutOfTime):
        subprocesses.run(
            ["sh", "-c", script],
            tmp_path,
            toy.run_environment(),
            5.0,
            deadline=time.monotonic() + 3.0,  # the shell may be slow to set its trap
            follow=lambda: followed.append(True),
        )
    assert (tmp_path / "kept").exists()
    assert followed

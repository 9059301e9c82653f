"""Programs of a flow: what they print, how they end, and one DVC for many questions."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows import programs
from flows.programs import Dvc
from rlhf_tasks.errors import UserError
from tests.flows import toy


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flow runs here, whose log it would be."""
    monkeypatch.setattr(programs, "get_run_logger", lambda: logging.getLogger("of the test"))


@pytest.fixture
def dvc(root: Path) -> Iterator[Dvc]:
    with Dvc(root, toy.run_environment(), 20.0) as made:
        yield made


def hosts() -> list[int]:
    """The processes that answer for DVC, of this test."""
    mine = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == os.getpid()]
    return [p.pid for p in mine if any(word.endswith("dvc_host.py") for word in p.info["cmdline"] or ())]


def repro(dvc: Dvc, name: str) -> tuple[int, list[str]]:
    return dvc.ask("repro", "--single-item", name, logged=True)


def test_one_process_answers_all(root: Path, dvc: Dvc) -> None:
    status, lines = dvc.ask("repro", "--dry", "first", logged=False)
    assert status == 0
    first = hosts()
    assert len(first) == 1
    assert repro(dvc, "first")[0] == 0
    status, lines = repro(dvc, "first")
    assert status == 0
    assert any("Stage 'first' didn't change, skipping" in line for line in lines)
    assert not any("Running stage" in line for line in lines), "of the question before"
    (root / "given/rows.txt").write_text("others\n", encoding="utf-8")
    status, lines = repro(dvc, "first")
    assert any("Running stage 'first'" in line for line in lines), "nothing is remembered of the files"
    assert hosts() == first


def test_the_words_are_those_that_dvc_prints_by_itself(root: Path, dvc: Dvc) -> None:
    alone = subprocess.run(
        ["dvc", "repro", "--dry", "first"],
        cwd=root,
        env=toy.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line for line in dvc.ask("repro", "--dry", "first", logged=False)[1] if line] == [
        x for x in alone if x
    ]


def test_what_is_logged_is_told_but_for_hints(root: Path, dvc: Dvc, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dvc.ask("repro", "--dry", "first", logged=False)
        assert caplog.messages == []
        _, lines = repro(dvc, "first")
    assert caplog.messages == [line for line in lines if programs.is_told(line)]
    assert any("git add" in line for line in lines)
    assert not any("git add" in line for line in caplog.messages)


def test_after_a_failure_it_answers_on(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, ["echo 'rlhf: mend it'", "exit 2"])
    assert repro(dvc, "first")[0] == 0
    before = hosts()
    status, lines = repro(dvc, "second")
    assert status != 0
    assert "rlhf: mend it" in lines
    toy.write_script(root, [toy.SECOND.strip()])
    assert repro(dvc, "second")[0] == 0
    assert hosts() == before


def test_a_stage_reads_no_questions_and_its_last_line_may_lack_an_end(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, ["wc -c", "printf 'no end'", "mkdir -p plots", "cp given/ppo.csv plots/ppo.csv",
                            "cp first.txt second.txt"])  # fmt: skip
    assert repro(dvc, "first")[0] == 0
    status, lines = repro(dvc, "second")
    assert status == 0
    assert "0" in [line.strip() for line in lines], "the stage's input is empty"
    assert any("no end" in line for line in lines)
    assert repro(dvc, "second")[0] == 0


def test_a_process_that_was_killed_is_replaced_or_told(root: Path, dvc: Dvc) -> None:
    assert repro(dvc, "first")[0] == 0
    pid = hosts()[0]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert repro(dvc, "first")[0] == 0
    toy.write_script(root, [f"kill -9 {hosts()[0]}"])
    assert repro(dvc, "second")[0] == -signal.SIGKILL


def test_what_a_stage_has_left_running_may_print_on(root: Path, dvc: Dvc) -> None:
    """Whole lines, or none: neither is taken for an answer, nor hides one."""
    for text in ("tick\\n", "tick"):
        toy.write_script(
            root, [toy.SECOND.strip(), "rm -f stop", f"(while [ ! -e stop ]; do printf '{text}'; done) &"]
        )
        assert repro(dvc, "first")[0] == 0
        try:
            for _ in range(5):
                assert repro(dvc, "second")[0] == 0
        finally:
            (root / "stop").touch()


def test_one_that_ends_without_an_answer_has_not_succeeded(root: Path, dvc: Dvc) -> None:
    assert repro(dvc, "first")[0] == 0
    pid = hosts()[0]
    toy.write_script(root, [f"kill -INT {pid}", "sleep 1"])
    (root / "dvc.yaml").write_text(
        toy.STAGES.replace("sh ./second.sh", "sh ./second.sh; exit 1"), encoding="utf-8"
    )
    assert repro(dvc, "second")[0] != 0
    host = programs.Host([sys.executable, "-c", "pass"], root, toy.run_environment(), 5.0)
    assert host.ask(["repro"], None) == programs.FAULT
    host.close()


def test_one_that_ends_before_its_answer_is_read_has_answered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = programs.Host._hear

    def late(self: programs.Host, line: str) -> None:
        toy.until(lambda: not self.is_alive, "its end")
        hear(self, line)

    monkeypatch.setattr(programs.Host, "_hear", late)
    words = [sys.executable, "-c", "import sys; input(); print(sys.argv[1], 0, flush=True); sys.exit(3)"]
    host = programs.Host(words, root, toy.run_environment(), 5.0)
    assert host.ask(["repro"], None) == 0
    host.close()


def test_one_that_does_not_end_is_ended(root: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    host = programs.Host(words, root, toy.run_environment(), 0.5)
    host.close()
    assert not host.is_alive


def test_an_interrupt_that_comes_with_the_question_ends_it_too(
    root: Path, dvc: Dvc, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write_script(root, ["sleep 600"])
    assert repro(dvc, "first")[0] == 0

    def interrupted(self: programs.Host, is_so: object) -> None:
        toy.until(lambda: psutil.Process(hosts()[0]).children(), "the stage")
        raise KeyboardInterrupt

    monkeypatch.setattr(programs.Host, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repro(dvc, "second")
    assert hosts() == []


def test_an_interrupt_ends_dvc_and_its_stage_and_leaves_no_lock(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, ["echo $$ > pid", "sleep 600"])
    assert repro(dvc, "first")[0] == 0

    def interrupt() -> None:
        toy.until((root / "pid").exists, "the stage")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            repro(dvc, "second")
    finally:
        signal.signal(signal.SIGINT, heard)
    thread.join()
    assert not psutil.pid_exists(int((root / "pid").read_text(encoding="utf-8")))
    assert hosts() == []
    toy.write_script(root, [toy.SECOND.strip()])
    assert repro(dvc, "second")[0] == 0


def test_its_end_leaves_no_process(root: Path) -> None:
    with Dvc(root, toy.run_environment(), 20.0) as dvc:
        dvc.ask("repro", "--dry", "first", logged=False)
        assert len(hosts()) == 1
    assert hosts() == []
    with Dvc(root, toy.run_environment(), 20.0):
        assert hosts() == [], "one that is never asked is never started"


def test_a_program_tells_its_status_and_its_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        status, lines = programs.run(
            ["sh", "-c", "echo a; echo b >&2; exit 3"], tmp_path, toy.run_environment(), 1.0
        )
    assert (status, sorted(lines)) == (3, ["a", "b"])
    assert sorted(caplog.messages) == ["a", "b"]


def test_a_command_that_fails_is_told_in_dvcs_own_words(dvc: Dvc) -> None:
    assert dvc.run("stage", "list").split()[0] == "first"
    with pytest.raises(UserError, match=r"`dvc exp apply nobody` failed: .*nobody"):
        dvc.run("exp", "apply", "nobody")

"""Programs that a flow starts: their output, their end, and one DVC process for many commands."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows import dvc_client, dvc_server, programs
from flows.dvc_client import Dvc, Server
from rlhf_tasks.errors import UserError
from tests.flows import toy

LOGGER = logging.getLogger("test of programs")


@pytest.fixture
def dvc(root: Path) -> Iterator[Dvc]:
    with Dvc(root, toy.run_environment(), 20.0, LOGGER) as made:
        yield made


def servers() -> list[int]:
    """The DVC processes of this test."""
    mine = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == os.getpid()]
    return [p.pid for p in mine if any(word.endswith("dvc_server.py") for word in p.info["cmdline"] or ())]


def repro(dvc: Dvc, name: str) -> int:
    return dvc.reproduce(name)[0]


def test_one_process_runs_all_commands(root: Path, dvc: Dvc) -> None:
    assert dvc.changed() == {"first", "second"}
    first = servers()
    assert len(first) == 1
    assert repro(dvc, "first") == 0
    status, lines = dvc.reproduce("first")
    assert status == 0
    assert not any("Running stage" in line for line in lines), "these lines are of an earlier command"
    (root / "given/rows.txt").write_text("others\n", encoding="utf-8")
    assert "first" in (dvc.changed() or set()), "the process must read the files again"
    assert servers() == first


def test_dvc_prints_the_same_as_without_this_process(root: Path, dvc: Dvc) -> None:
    alone = subprocess.run(
        ["dvc", "repro", "--dry", "first"],
        cwd=root,
        env=toy.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert dvc.call("repro", "--dry", "first")[1] == [line for line in alone if line]


def test_the_output_of_a_stage_is_logged_without_hints_for_a_terminal(
    root: Path, dvc: Dvc, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        dvc.call("repro", "--dry", "first")
        assert caplog.messages == []
        _, lines = dvc.reproduce("first")
    assert caplog.messages == lines
    assert any("Running stage 'first'" in line for line in lines)
    assert not any("git add" in line or "autostage" in line for line in lines)


def test_unchanged_restorable_and_changed_stages_differ(root: Path, dvc: Dvc) -> None:
    rows = root / "given/rows.txt"
    assert repro(dvc, "first") == 0
    assert dvc.changed("first") == set()
    rows.write_text("other rows\n", encoding="utf-8")
    assert dvc.changed("first") == {"first"}
    assert not dvc.is_restorable("first"), "dvc.lock has the outs of other inputs"
    assert repro(dvc, "first") == 0
    rows.write_text("rows\n", encoding="utf-8")
    assert dvc.changed("first") == {"first"}
    assert dvc.is_restorable("first")
    (root / "first.txt").unlink()
    rows.write_text("other rows\n", encoding="utf-8")
    assert dvc.is_restorable("first"), "only the outs are missing"
    assert not dvc.is_restorable("second"), "its input is missing"


def test_the_process_survives_the_failure_of_a_stage(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, toy.refusal("fix it"))
    assert repro(dvc, "first") == 0
    before = servers()
    assert repro(dvc, "second") != 0
    assert dvc.failure() == {"kind": "user", "message": "fix it"}
    toy.write_script(root, [toy.SECOND.strip()])
    assert repro(dvc, "second") == 0
    assert dvc.failure() is None, "the failure of an earlier try is not of this one"
    assert servers() == before


def test_a_stage_has_an_empty_input_and_may_print_an_unfinished_line(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, ["wc -c", "printf 'no end'", "mkdir -p plots", "cp given/ppo.csv plots/ppo.csv",
                            "cp first.txt second.txt"])  # fmt: skip
    assert repro(dvc, "first") == 0
    status, lines = dvc.reproduce("second")
    assert status == 0
    assert "0" in [line.strip() for line in lines], "the input of the stage is empty"
    assert any("no end" in line for line in lines)
    assert repro(dvc, "second") == 0


def test_a_killed_process_is_replaced_and_its_command_fails(root: Path, dvc: Dvc) -> None:
    assert repro(dvc, "first") == 0
    pid = servers()[0]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert repro(dvc, "first") == 0
    toy.write_script(root, [f"kill -9 {servers()[0]}"])
    assert repro(dvc, "second") == -signal.SIGKILL


def test_output_of_a_background_process_is_never_an_answer(root: Path, dvc: Dvc) -> None:
    """The process prints whole lines, or text without a line break; neither hides an answer."""
    for text in ("tick\\n", "tick"):
        toy.write_script(
            root, [toy.SECOND.strip(), "rm -f stop", f"(while [ ! -e stop ]; do printf '{text}'; done) &"]
        )
        assert repro(dvc, "first") == 0
        try:
            for _ in range(5):
                assert repro(dvc, "second") == 0
        finally:
            (root / "stop").touch()


def test_a_process_that_ends_without_an_answer_has_failed(root: Path, dvc: Dvc) -> None:
    assert repro(dvc, "first") == 0
    pid = servers()[0]
    toy.write_script(root, [f"kill -INT {pid}", "sleep 1"])
    (root / "dvc.yaml").write_text(
        toy.STAGES.replace("sh ./second.sh", "sh ./second.sh; exit 1"), encoding="utf-8"
    )
    assert repro(dvc, "second") != 0
    server = Server([sys.executable, "-c", "pass"], root, toy.run_environment(), 5.0)
    assert server.call(["repro"], None, {}) == dvc_client.FAULT
    server.close()


def test_an_answer_counts_even_if_the_process_ends_before_it_is_read(root: Path) -> None:
    class LateReader(Server):
        def _handle(self, line: str) -> None:
            toy.until(lambda: not self.is_alive, "the end of the process")
            super()._handle(line)

    words = [sys.executable, "-c", "import sys; input(); print(sys.argv[1], 0, flush=True); sys.exit(3)"]
    server = LateReader(words, root, toy.run_environment(), 5.0)
    assert server.call(["repro"], None, {}) == 0
    server.close()


def test_a_process_that_does_not_end_is_killed_after_the_grace(root: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = Server(words, root, toy.run_environment(), 0.5)
    server.close()
    assert not server.is_alive


def test_an_interrupt_right_after_the_command_ends_its_stage(root: Path) -> None:
    class Interrupted(Server):
        def _wait_until(self, condition: Callable[[], bool]) -> None:
            toy.until(lambda: psutil.Process(servers()[0]).children(), "the stage")
            raise KeyboardInterrupt

    toy.write_script(root, ["sleep 600"])
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q", "first"], cwd=root, check=True)
    words = [sys.executable, "-P", str(dvc_server.__file__)]
    server = Interrupted(words, root, toy.run_environment(), 20.0)
    with pytest.raises(KeyboardInterrupt):
        server.call(["repro", "--single-item", "second"], None, {})
    assert servers() == []


def test_an_interrupt_ends_dvc_and_its_stage_and_leaves_no_lock(root: Path, dvc: Dvc) -> None:
    toy.write_script(root, ["echo $$ > pid", "sleep 600"])
    assert repro(dvc, "first") == 0

    def interrupt() -> None:
        toy.until((root / "pid").exists, "the stage")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores SIGINT
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            repro(dvc, "second")
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert not psutil.pid_exists(int((root / "pid").read_text(encoding="utf-8")))
    assert servers() == []
    toy.write_script(root, [toy.SECOND.strip()])
    assert repro(dvc, "second") == 0


def test_dvc_starts_with_its_first_command_and_leaves_no_process(root: Path) -> None:
    with Dvc(root, toy.run_environment(), 20.0) as dvc:
        assert servers() == []
        dvc.changed()
        assert len(servers()) == 1
    assert servers() == []


def test_a_program_returns_its_status_and_its_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        status, lines = programs.run(
            ["sh", "-c", "echo a; echo b >&2; exit 3"], tmp_path, toy.run_environment(), 1.0, LOGGER
        )
    assert (status, sorted(lines)) == (3, ["a", "b"])
    assert sorted(caplog.messages) == ["a", "b"]


def test_a_command_that_fails_raises_dvcs_message(dvc: Dvc) -> None:
    assert dvc.run("stage", "list").split()[0] == "first"
    with pytest.raises(UserError, match=r"`dvc exp apply nobody` failed: .*nobody"):
        dvc.run("exp", "apply", "nobody")

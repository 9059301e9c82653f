"""The card at the end of a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rlhf_tasks import config, console
from rlhf_tasks.config import STAGES
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import run_card
from tests.promotion import planted


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A folder with the shipped parameters and planted results of stage judge."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    console.set_quiet(False)
    planted.params(tmp_path)
    atomic.write_json(Paths().metrics("ppo"), {"episode": 8192.0, "selected_kl": 1.5})
    Paths().evaluation_results.parent.mkdir(parents=True)
    Paths().evaluation_results.write_text(planted.results(gold=0.84).model_dump_json(), encoding="utf-8")
    return Paths()


def shown(paths: Paths, capsys: pytest.CaptureFixture[str]) -> list[str]:
    run_card.show(paths, config.load(paths.params))
    return capsys.readouterr().out.splitlines()


def test_the_card_tells_a_run_in_at_most_eight_lines(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in STAGES:
        tree = {"rlhf.run": f"{stage}-20260102T030405-aa", "seconds": 75.0, "git.rev": "a" * 40}
        atomic.write_json(paths.lineage(stage), tree)
    atomic.write_json(paths.verdict, {"passed": True, "summary": "all 14 criteria are met"})
    paths.reports.mkdir()
    (paths.reports / "index.html").touch()
    lines = shown(paths, capsys)
    assert len(lines) <= 8
    assert [line.split("  ")[0] for line in lines] == [
        *("Trained", "Verdict", "Win rate", "KL", "Time", "Report", "Next", "")
    ]
    assert "8,192 episodes of PPO" in lines[0]
    assert lines[1].endswith("passed: all 14 criteria are met")
    assert "over the SFT model" in lines[2]
    assert lines[3].endswith("1.50 nats from SFT")
    assert lines[4].endswith("11m15s for all stages; commit aaaaaaaaaa; preset none")
    assert lines[5].endswith(f"{(paths.reports / 'index.html').resolve().as_uri()}")
    assert "rlhf mlflow" in lines[6]
    assert lines[7].endswith("rlhf promote   (make it the champion)")


def test_a_refused_policy_and_unknown_times_are_said(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    atomic.write_json(paths.verdict, {"passed": False, "summary": "KL 11.2 > 10; a; b; c"})
    atomic.write_json(paths.lineage("sft"), {"rlhf.run": "sft-1", "seconds": 70.0})
    lines = shown(paths, capsys)
    assert lines[1].endswith("refused: KL 11.2 > 10; and 3 more, in the report")
    assert not any(line.startswith("Time") for line in lines), "not all stages are known"
    assert "cannot become champion" in lines[-1]


def test_next_commands_work_in_the_shell_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "my project/.venv/bin"
    for folder in (programs, tmp_path / "other"):
        folder.mkdir(parents=True)
        (folder / "rlhf").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv(run_card.SHELL_PATH, raising=False)  # that of `make test`
    assert run_card.command() == "rlhf"
    for path in (tmp_path, tmp_path / "other"):  # no such program, or another one
        monkeypatch.setenv(run_card.SHELL_PATH, str(path))
        assert run_card.command() == shlex.quote(f"{programs}/rlhf")
    monkeypatch.chdir(tmp_path / "my project")
    assert run_card.command() == ".venv/bin/rlhf"


def test_curves_are_where_the_run_was_tracked(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    planted.params(Path(), {"tracking.uri": "http://team:5000"})
    assert any("http://team:5000   (curves)" in line for line in shown(paths, capsys))

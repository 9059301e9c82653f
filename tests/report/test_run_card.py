"""The card at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks import config, console
from rlhf_tasks.config import STAGES
from rlhf_tasks.project import atomic, durations
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
    atomic.write_json(Paths().metrics("ppo"), {"episode": 8192.0})
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
        durations.record(paths.home, stage, 600.0 / len(STAGES))
    atomic.write_json(paths.verdict, {"passed": True, "summary": "all 14 criteria are met"})
    paths.reports.mkdir()
    (paths.reports / "index.html").touch()
    lines = shown(paths, capsys)
    assert len(lines) <= 8
    assert [line.split("  ")[0] for line in lines] == [
        *("Trained", "Win rate", "Verdict", "Time", "Report", "Next", "")
    ]
    assert "8,192 episodes of PPO" in lines[0]
    assert "over the SFT model" in lines[1]
    assert lines[2].endswith("passed: all 14 criteria are met")
    assert lines[3].split()[1] == "10m00s,"
    assert lines[4].endswith(f"{(paths.reports / 'index.html').resolve().as_uri()}")
    assert "rlhf mlflow" in lines[5]
    assert lines[6].endswith("rlhf promote   (make it the champion)")


def test_a_refused_policy_and_unknown_times_are_said(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    atomic.write_json(paths.verdict, {"passed": False, "summary": "KL 11.2 > 10"})
    durations.record(paths.home, "sft", 70.0)
    lines = shown(paths, capsys)
    assert "refused: KL 11.2 > 10" in lines[2]
    assert not any(line.startswith("Time") for line in lines), "not all stages are known"
    assert "cannot become champion" in lines[-1]


def test_curves_are_where_the_run_was_tracked(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    planted.params(Path(), {"tracking.uri": "http://team:5000"})
    assert any("http://team:5000   (curves)" in line for line in shown(paths, capsys))

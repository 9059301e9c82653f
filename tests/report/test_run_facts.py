"""The card at the end of a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rlhf_tasks import config, console, presets
from rlhf_tasks.config import STAGES
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import run_facts
from tests import small
from tests.flows import toy
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
    run_facts.show_card(paths, config.load(paths.params))
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
    assert lines[4].endswith("12m30s for all stages; commit aaaaaaaaaa; preset none")
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
    monkeypatch.delenv(run_facts.SHELL_PATH, raising=False)  # that of `make test`
    assert run_facts.command() == "rlhf"
    for path in (tmp_path, tmp_path / "other"):  # no such program, or another one
        monkeypatch.setenv(run_facts.SHELL_PATH, str(path))
        assert run_facts.command() == shlex.quote(f"{programs}/rlhf")
    monkeypatch.chdir(tmp_path / "my project")
    assert run_facts.command() == ".venv/bin/rlhf"


def test_curves_are_where_the_run_was_tracked(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    planted.params(Path(), {"tracking.uri": "http://team:5000"})
    assert any("http://team:5000   (curves)" in line for line in shown(paths, capsys))


# ---------------------------------- Which run a page is about, by its parameters, its lineage and its commit


LINEAGE = {
    "ppo": {"rlhf.run": "ppo-20260102T030405-aa", "git.rev": "a" * 40, "git.dirty": False},
    "prepare": {"rlhf.run": "prepare-20260101T000000-bb", "git.rev": "b" * 40, "git.dirty": True},
    "judge": {},
}


def test_the_facts_are_those_of_the_parameters_and_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    view = small.view("report", {"seed": 7, "preset": "smoke+grpo"})
    assert run_facts.facts(view, LINEAGE, "mine", tmp_path) == {
        "Date": "2 January 2026, 03:04 UTC",
        "Run": "mine",
        "Preset": "smoke+grpo",
        "Seed": "7",
        "Data": "the built-in task",
        "Base model": "gpt_neox from random weights, 4 layers of width 96",
        "Commit": "aaaaaaaaaa",
    }
    assert run_facts.facts(view, LINEAGE, "", tmp_path)["Run"] == "ppo-20260102T030405-aa"
    own = {"data.source": "files", "data.path": "mine/rows", "judge.judges": [small.HELDOUT]}
    files = small.view("report", own)
    assert run_facts.facts(files, {}, "", tmp_path)["Data"] == "mine/rows", "named only where it is read"
    assert set(run_facts.facts(view, {"judge": {}}, "", tmp_path)) == {"Preset", "Seed", "Data", "Base model"}


def test_the_task_of_a_function_is_in_the_words_of_its_preset() -> None:
    known = run_facts.task(config.Data(source="examples.arithmetic:arithmetic"))
    assert known.startswith("examples.arithmetic:arithmetic, of preset arithmetic: sums and products")
    assert run_facts.task(config.Data(source="mine:rows")) == "mine:rows"


def test_changes_are_those_to_the_params_yaml_of_the_commit(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((toy.ROOT / "params.yaml").read_text("utf-8"), encoding="utf-8")
    toy.git(tmp_path, "init", "-q")
    toy.identify(tmp_path)
    toy.commit(tmp_path)
    commit = toy.git(tmp_path, "rev-parse", "HEAD").strip()
    lineage = {"ppo": {**LINEAGE["ppo"], "git.rev": commit, "git.dirty": True}}
    presets.apply([], tmp_path / "params.yaml", ["seed=2", "ppo.kl_coef=0.5"])
    facts = run_facts.facts(small.view("report"), lineage, "", tmp_path)
    assert facts["Commit"].endswith(" with uncommitted changes")
    assert facts["Changes"] == "ppo.kl_coef: 0.03 → 0.5; seed: 1 → 2"

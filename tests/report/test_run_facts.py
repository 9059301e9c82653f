"""Which run a page is about, by its parameters, its lineage and its commit."""

from __future__ import annotations

from pathlib import Path

from rlhf_tasks import config, presets
from rlhf_tasks.report import run_facts
from tests import small
from tests.flows import toy

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

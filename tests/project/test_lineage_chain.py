"""`rlhf lineage` shows the same chain for a path, an experiment and a commit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import dvc_cli, git, hashing, lineage_chain
from tests.conftest import Command
from tests.flows import toy
from tests.report import workspace

pytestmark = [pytest.mark.e2e]

KEY = "second-20260102T030405-abcdef"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two finished stages; only an experiment has the second one, with lineage."""
    made = toy.make(tmp_path_factory.mktemp("finished") / "project")
    (made / "given/lineage.json").write_text(
        json.dumps({"rlhf.run": KEY, "git.rev": "c0de"}), encoding="utf-8"
    )
    rate = EvaluationResults(
        comparisons=(workspace.comparison("gold", "policy", "sft", workspace.interval(0.75, 0.7, 0.8)),)
    )
    (made / "given/judge.json").write_text(json.dumps(rate.metrics()), encoding="utf-8")
    script = [
        "mkdir -p models/lineage && cp given/lineage.json models/lineage/second.json",
        "cp given/judge.json metrics/judge.json",
        toy.SECOND.strip(),
    ]
    (made / "second.sh").write_text("\n".join(script) + "\n", encoding="utf-8")
    cached = "second.txt, models/lineage/second.json"
    outs = f"    outs: [{cached}, {{metrics/judge.json: {{cache: false}}}}]"
    text = toy.STAGES.replace("    outs: [second.txt]", outs)
    (made / "dvc.yaml").write_text(text, encoding="utf-8")
    toy.commit(made)
    dvc_cli.run(made, "repro", "-q")
    dvc_cli.run(made, "exp", "save", "--force", "--name", "mine", "--include-untracked", "metrics")
    return made


@pytest.fixture
def root(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of that project."""
    made = tmp_path / "project"
    shutil.copytree(finished, made)
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("name", ["second.txt", "mine", "refs/mine"])
def test_every_name_leads_to_the_same_chain(root: Path, name: str) -> None:
    revision = git.find_experiment(root, "mine")
    toy.git(root, "update-ref", "refs/mine", str(revision))
    chain = lineage_chain.find(root, name)
    assert (chain.revision, chain.experiment) == (revision, None if name == "refs/mine" else "mine")
    assert [link.stage for link in chain.links] == ["first", "second"]
    assert chain.links[0].inputs["given"] == hashing.dvc_md5(root / "given")
    assert chain.links[1].outs["second.txt"] == hashing.dvc_md5(root / "second.txt")
    assert chain.links[1].lineage["rlhf.run"] == KEY


def test_the_text_goes_from_data_to_win_rates_and_its_commands_work(
    root: Path, rlhf: Command, tmp_path: Path
) -> None:
    text = rlhf("lineage second.txt").out
    places = [text.index(word) for word in ("data  ", "first  ", "second  ", "win rate  ")]
    assert places == sorted(places)
    assert "gold: policy vs sft  75.0% (70.0%–80.0%)" in text
    assert "data         source synthetic\n" in text
    chain = lineage_chain.find(root, "second.txt")
    get = next(line for line in lineage_chain.commands(chain) if line.startswith("dvc get"))
    target = tmp_path / "back.txt"
    dvc_cli.run(root, *get.split()[1:-1], str(target))
    assert target.read_bytes() == (root / "second.txt").read_bytes()


def test_a_run_that_is_not_committed_is_found_in_the_working_tree(root: Path, rlhf: Command) -> None:
    """As after `make run` in a fresh clone."""
    dvc_cli.run(root, "exp", "remove", "mine")
    text = rlhf("lineage second.txt").out
    assert "the working tree; the commit checked out does not have it" in text
    assert f"run {KEY}" in text
    assert "gold: policy vs sft  75.0%" in text
    (root / "given/other.txt").write_text("of this run\n", encoding="utf-8")
    toy.git(root, "add", "given/other.txt")
    keep = lineage_chain.commands(lineage_chain.find(root, "second.txt"))[0]
    assert keep == "git add dvc.lock metrics/ plots/ && git commit --all"
    subprocess.run(f"{keep} -qm run", shell=True, cwd=root, check=True)
    assert lineage_chain.find(root, "second.txt").revision == git.commit(root)
    assert toy.git(root, "status", "--porcelain", "--untracked-files=no") == ""


def test_a_stage_that_must_run_again_is_noted_and_its_win_rates_are_not_shown(root: Path) -> None:
    (root / "given/rows.txt").write_text("others\n", encoding="utf-8")
    dvc_cli.run(root, "repro", "first")
    chain = lineage_chain.find(root, "first.txt")
    assert (chain.revision, chain.metrics) == (None, {})
    first, second = chain.links
    assert first.outs["first.txt"] == hashing.dvc_md5(root / "first.txt") != second.inputs["first.txt"]
    assert list(chain.notes) == [
        "second has not run again since first.txt changed",
        "metrics/judge.json describes other responses, so its win rates are not shown",
    ]


def test_the_chain_of_a_commit_has_the_stages_and_inputs_of_that_commit(root: Path) -> None:
    before = lineage_chain.find(root, "mine")
    assert sum(key.endswith("/win_rate") for key in before.metrics) == 1
    text = (root / "dvc.yaml").read_text(encoding="utf-8")
    later = text.replace("[first.txt, ", "[first.txt, metrics/first.json, ").replace("second:", "later:")
    assert later.count("later:") == 1
    (root / "dvc.yaml").write_text(later, encoding="utf-8")
    assert lineage_chain.find(root, "mine") == before


def test_win_rates_of_an_altered_file_are_not_shown(root: Path) -> None:
    dvc_cli.run(root, "exp", "remove", "mine")
    (root / "metrics/judge.json").write_text("<<<<<<< HEAD", encoding="utf-8")
    chain = lineage_chain.find(root, "second.txt")
    assert chain.metrics == {}
    assert list(chain.notes) == [
        "metrics/judge.json describes other responses, so its win rates are not shown"
    ]


def test_an_altered_out_is_a_user_error(root: Path) -> None:
    (root / "second.txt").unlink()
    (root / "second.txt").write_text("altered\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"differs from dvc\.lock here.*`dvc commit second`"):
        lineage_chain.find(root, "second.txt")


def test_an_unknown_name_is_a_user_error_that_says_what_is_known(root: Path, rlhf: Command) -> None:
    message = rlhf("lineage no-such", status=2).err
    assert "such as models/policy" in message
    assert "The page of a run in MLflow (tags `dvc.exp` and `git.rev`) or in Prefect names its" in message


def test_in_a_part_of_a_repository_the_commands_have_paths_from_its_top() -> None:
    outs = {"metrics/judge.json": "0", "models/policy": "1"}
    link = lineage_chain.Link("judge", {}, outs, {})
    chain = lineage_chain.Chain("ab" * 20, None, None, {}, [link], {}, [], "part/")
    assert lineage_chain.commands(chain)[1:] == [
        "git show abababababab:part/metrics/judge.json",
        "dvc get . part/models/policy --rev abababababab -o models-policy",
    ]

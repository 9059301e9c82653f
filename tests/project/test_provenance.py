"""`rlhf lineage` tells the chain of a path, an experiment, a commit, a key and a flow run alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks.cli import main
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, git, hashing, provenance
from rlhf_tasks.tracking.store import embedded_uri
from tests.flows import toy

pytestmark = [pytest.mark.e2e]

KEY = "second-20260102T030405-abcdef"
FLOW = "0f0f0f0f-1111-2222-3333-444444444444"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stages run; the second writes who made it, and stands in an experiment only."""
    made = toy.make(tmp_path / "project")
    (made / "given/lineage.json").write_text(
        json.dumps({"rlhf.run": KEY, "git.rev": "c0de"}), encoding="utf-8"
    )
    (made / "given/judge.json").write_text(
        json.dumps({"gold/policy_vs_sft/win_rate": 0.75, "gold/policy_vs_sft/low": 0.7,
                    "gold/policy_vs_sft/high": 0.8}), encoding="utf-8",
    )  # fmt: skip
    script = [
        "mkdir -p models/lineage && cp given/lineage.json models/lineage/second.json",
        "cp given/judge.json metrics/judge.json",
        toy.SECOND.strip(),
    ]
    (made / "second.sh").write_text("\n".join(script) + "\n", encoding="utf-8")
    outs = "    outs: [second.txt, models/lineage/second.json, {metrics/judge.json: {cache: false}}]"
    text = toy.STAGES.replace("    outs: [second.txt]", outs)
    (made / "dvc.yaml").write_text(text, encoding="utf-8")
    toy.commit(made)
    monkeypatch.chdir(made)
    words = [sys.executable, "-m", "dvc", "repro", "-q"]
    subprocess.run(words, cwd=made, check=True, start_new_session=True)
    dvc_cli.run(made, "exp", "save", "--force", "--name", "mine", "--include-untracked", "metrics")
    outbox = made / ".rlhf/outbox"
    outbox.mkdir(parents=True)
    (outbox / f"flow-{FLOW}.jsonl").write_text(
        json.dumps({"kind": "tags", "values": {"dvc.exp": "mine"}}) + "\n", encoding="utf-8"
    )
    return made


@pytest.mark.parametrize("asked", ["second.txt", "mine", KEY, FLOW, f"prefect-{FLOW}"])
def test_every_name_leads_to_the_same_chain(root: Path, asked: str) -> None:
    chain = provenance.find(root, asked)
    assert chain.experiment == "mine"
    assert [link.stage for link in chain.links] == ["first", "second"]
    assert chain.links[0].inputs["given"] == hashing.dvc_md5(root / "given")
    assert chain.links[1].outs["second.txt"] == hashing.dvc_md5(root / "second.txt")
    assert chain.links[1].made["rlhf.run"] == KEY


@pytest.mark.parametrize("name", [{}, {"dvc.exp": "never-saved"}])
def test_a_flow_run_that_saved_nothing_leads_to_its_commit(root: Path, name: dict[str, str]) -> None:
    head = toy.git(root, "rev-parse", "HEAD").strip()
    told = {"kind": "tags", "values": {"git.rev": head, **name}}
    file = root / f".rlhf/outbox/flow-{FLOW}.jsonl"
    file.write_text(json.dumps(told) + "\n", encoding="utf-8")
    chain = provenance.find(root, FLOW)
    assert (chain.revision, chain.experiment) == (head, None)


@pytest.mark.parametrize("by_environment", [True, False])
def test_an_mlflow_run_is_looked_for_where_the_stages_told_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    """In the store that MLFLOW_TRACKING_URI names, else in the project's own; the other has no such run."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if by_environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", embedded_uri(elsewhere))
    else:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = MlflowClient(embedded_uri(elsewhere if by_environment else root / ".rlhf"))
    made = client.create_run(client.create_experiment("rlhf"), tags={"dvc.exp": "mine"})
    assert provenance.find(root, made.info.run_id).experiment == "mine"
    with pytest.raises(UserError, match="no run that this project knows"):
        provenance.find(root, "0" * 32)


def test_an_mlflow_that_does_not_answer_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"MLflow at http://127.0.0.1:9 cannot be asked"):
        provenance.find(root, "0" * 32)


def test_the_text_goes_from_data_to_verdict_and_its_commands_work(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main.main(["lineage", "second.txt"]) == 0
    told = capsys.readouterr().out
    data, first, second, verdict = (
        told.index(word) for word in ("data  ", "first  ", "second  ", "verdict  ")
    )
    assert data < first < second < verdict
    assert "gold/policy vs sft  75.0% (70.0%–80.0%)" in told
    chain = provenance.find(root, "second.txt")
    get = next(line for line in provenance.commands(chain) if line.startswith("dvc get"))
    target = tmp_path / "back.txt"
    dvc_cli.run(root, *get.split()[1:-1], str(target))
    assert target.read_bytes() == (root / "second.txt").read_bytes()


@pytest.mark.parametrize("asked", ["second.txt", KEY])
def test_what_no_commit_has_yet_is_the_working_tree_s_until_it_is_committed(
    root: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `make run` in a fresh clone."""
    dvc_cli.run(root, "exp", "remove", "mine")
    assert main.main(["lineage", asked]) == 0
    told = capsys.readouterr().out
    assert "the working tree; the commit checked out does not have it" in told
    assert f"run {KEY}" in told
    assert "gold/policy vs sft  75.0%" in told
    (root / "given/other.txt").write_text("of this run\n", encoding="utf-8")
    toy.git(root, "add", "given/other.txt")
    keep = provenance.commands(provenance.find(root, asked))[0]
    assert keep == "git add dvc.lock metrics/ plots/ && git commit --all"
    subprocess.run(f"{keep} -qm run", shell=True, cwd=root, check=True)
    assert provenance.find(root, asked).revision == git.commit(root, "HEAD")
    assert toy.git(root, "status", "--porcelain", "--untracked-files=no") == ""


def test_a_stage_that_is_behind_is_told_and_no_verdict_of_other_bytes(root: Path) -> None:
    (root / "given/rows.txt").write_text("others\n", encoding="utf-8")
    dvc_cli.run(root, "repro", "first")
    chain = provenance.find(root, "first.txt")
    assert (chain.revision, chain.metrics) == (None, {})
    first, second = chain.links
    assert first.outs["first.txt"] == hashing.dvc_md5(root / "first.txt") != second.inputs["first.txt"]
    assert list(chain.notes) == [
        "second has not run again since first.txt changed",
        "metrics/judge.json is of something else, and is not told",
    ]


def test_verdicts_that_somebody_wrote_over_are_not_told(root: Path) -> None:
    dvc_cli.run(root, "exp", "remove", "mine")
    (root / "metrics/judge.json").write_text("<<<<<<< HEAD", encoding="utf-8")
    chain = provenance.find(root, "second.txt")
    assert (chain.metrics, list(chain.notes)) == (
        {},
        ["metrics/judge.json is of something else, and is not told"],
    )


def test_bytes_that_no_stage_left_are_told(root: Path) -> None:
    (root / "second.txt").unlink()
    (root / "second.txt").write_text("altered\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"is not what dvc\.lock says.*`dvc commit second`"):
        provenance.find(root, "second.txt")


def test_an_unknown_name_is_told_with_what_is_known(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["lineage", "no-such"]) == 2
    assert "second.txt" in capsys.readouterr().err

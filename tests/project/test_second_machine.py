"""A second machine: clone, pull, repro and generate, where ready checkpoints are referenced."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_tasks.project import dvc_cli, dvc_files
from tests import toy
from tests.conftest import Command
from tests.flows.toy import git

STAGES = ("inputs", "prepare", "base", "sft")


def project(root: Path) -> None:
    """A committed project of the first stages, with ready models that neither git nor DVC holds."""
    git(root, "init", "-q")
    (root / ".gitignore").write_text("/foreign\n/.rlhf\n", encoding="utf-8")
    toy.write_given()
    toy.write_params(sft={"from": "foreign/sft"})
    tree = YAML().load((toy.ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    stages = {name: tree["stages"][name] for name in STAGES}
    for name, stage in stages.items():
        stage["cmd"] = f"{sys.executable} -m rlhf_tasks.cli {name}"
        stage["deps"] = [dep for dep in stage.get("deps", ()) if not dvc_files.is_code(dep)]
    stages["inputs"]["outs"] = [f"inputs/{name}.json" for name in STAGES[1:]]
    YAML().dump({"stages": stages}, root / "dvc.yaml")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_second_machine_runs_nothing_and_samples_from_a_referenced_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    # 1. A machine that makes models/base and models/sft from ready models, and pushes them.
    first, second, store = (tmp_path / name for name in ("first", "second", "store"))
    first.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(first)
    for name, seed in (("base", 1), ("sft", 2)):
        toy.foreign(f"foreign/{name}", "llama", seed=seed)
    project(first)
    dvc_cli.run(first, "init", "-q")
    dvc_cli.run(first, "remote", "add", "-q", "--default", "store", str(store))
    dvc_cli.run(first, "repro", "-q")
    for words in (["add", "."], ["commit", "-qm", "run"]):
        git(first, *words)
    dvc_cli.run(first, "push", "-q")
    weights = (first / "foreign/sft/model.safetensors").read_bytes()
    assert weights not in [file.read_bytes() for file in store.rglob("*") if file.is_file()]

    # 2. Another one, which has the ready models at the same place.
    git(tmp_path, "clone", "-q", str(first), str(second))
    monkeypatch.chdir(second)
    shutil.copytree(first / "foreign", "foreign")
    dvc_cli.run(second, "pull", "-q")
    ran = dvc_cli.run(second, "repro")
    assert [name for name in STAGES if f"Running stage '{name}'" in ran] == ["inputs"]
    rlhf("generate models/sft --max-new-tokens 4 --prompt", "a red cat :")

    # 3. A changed source: the stage that reads it would run again, and no other.
    toy.foreign("foreign/sft", "llama", seed=3)
    rlhf("inputs")
    changed = dvc_cli.run(second, "status", "--json")
    assert '"inputs/sft.json": "modified"' in changed
    assert "inputs/base.json" not in changed

    # 4. Without the source there is one message.
    shutil.rmtree("foreign/sft")
    message = rlhf("generate models/sft --prompt", "a red cat :", status=2).err
    assert "models/sft has no weights of its own; it refers to sft.from of params.yaml" in message
    assert "model.safetensors (sha256 " in message

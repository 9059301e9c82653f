"""Hashes are DVC's own, of the bytes on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, git, hashing, lineage
from rlhf_tasks.project.paths import Paths
from tests.flows import toy


@pytest.mark.e2e
def test_digests_are_those_of_dvc(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    for name in ("z.txt", "b/a.txt", "b!.txt", "ü.txt"):
        (folder / name).write_text(f"content of {name}\n", encoding="utf-8")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/c.txt").write_text("left out by DVC\n", encoding="utf-8")
    (folder / "beside").symlink_to("../beside")
    (tmp_path / "one.txt").write_text("one\n", encoding="utf-8")
    dvc_cli.run(tmp_path, "init", "-q", "--no-scm")
    dvc_cli.run(tmp_path, "add", "-q", "data", "one.txt")
    for path in (folder, tmp_path / "one.txt"):
        assert hashing.dvc_md5(path) in (tmp_path / f"{path.name}.dvc").read_text(encoding="utf-8")


def test_inputs_are_the_data_among_the_deps(project: Path) -> None:
    graph = dvc_files.graph(project)
    assert graph["prepare"].inputs == ("given",)
    assert graph["sft"].inputs == ("data/sft",)
    assert graph["sft"].outs == ("models/sft", "models/lineage/sft.json", "metrics/sft.json")


def test_the_lineage_file_holds_the_run_key_and_input_hashes(project: Path) -> None:
    path = lineage.write(Paths(project), "sft", "sft-k", 12.34)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert 0.05 < written.pop("peak_memory_gb") < 100
    assert written == {
        "rlhf.run": "sft-k",
        "seconds": 12.3,
        "inputs": {"data/sft": hashing.dvc_md5(project / "data/sft")},
        "packages": {},
        "git.rev": None,
        "git.dirty": False,
    }


def test_a_worktree_uses_the_home_of_the_main_checkout(project: Path) -> None:
    toy.git(project, "init", "-q")
    toy.git(project, "add", "params.yaml", "dvc.yaml")
    toy.git(project, "commit", "-q", "-m", "first")
    toy.git(project, "worktree", "add", "-q", str(project / "tree"))
    assert Paths(project).home == project / ".rlhf"
    assert Paths(project / "tree").home == project / ".rlhf"


def test_files_that_a_run_writes_do_not_make_a_tree_dirty(project: Path) -> None:
    toy.git(project, "init", "-q")
    toy.commit(project)
    (project / "metrics").mkdir()
    (project / "metrics/sft.json").write_text("{}", encoding="utf-8")
    assert not git.is_dirty(project)
    (project / "code.py").write_text("", encoding="utf-8")
    assert git.is_dirty(project)


def test_a_folder_without_dvc_yaml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dvc\.yaml does not exist; run from"):
        dvc_files.graph(tmp_path)


@pytest.mark.parametrize(
    ("dvc", "params", "message"),
    [
        ("stages: [", "{}", "dvc.yaml is not readable as YAML"),
        ("[1]", "{}", "dvc.yaml must hold sections"),
        ("plots: []", "{}", "dvc.yaml has no `stages`"),
        ("stages: {}", "data: {", "params.yaml is not readable as YAML"),
        (
            "stages: {a: {cmd: x, deps: ['${data.path}/y']}}",
            "data: {}",
            r"needs data\.path, which params\.yaml does not have",
        ),
    ],
)
def test_a_graph_that_cannot_be_read_is_a_user_error(dvc: str, params: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        dvc_files.graph_in(dvc, params)


def test_the_hash_of_an_out_is_that_of_the_stage_which_wrote_it() -> None:
    lock = """\
stages:
  sft: {outs: [{path: models/sft, md5: new}], deps: [{path: data/sft, md5: d}]}
  ppo: {deps: [{path: models/sft, md5: old}, {path: a.py}], outs: [{path: models/policy, md5: p}]}
"""
    assert dvc_files.locked_in(lock) == {"data/sft": "d", "models/sft": "new", "models/policy": "p"}
    assert dvc_files.read_and_written(lock)["ppo"] == ({"models/sft": "old"}, {"models/policy": "p"})
    assert dvc_files.locked_in("schema: '2.0'") == {}


def test_a_dep_is_filled_from_params_yaml() -> None:
    node = dvc_files.graph_in("stages: {a: {cmd: x, deps: ['${data.path}/y']}}", "data: {path: x}")["a"]
    assert node.deps == ("x/y",)


def test_callers_may_change_what_they_read_and_a_new_text_is_read_again(project: Path) -> None:
    """Texts are parsed once per process."""
    lock = "stages:\n  ppo:\n    outs: [{path: a, md5: '1'}]\n"
    (project / "dvc.lock").write_text(lock, encoding="utf-8")
    for _ in range(2):
        assert dvc_files.locked(project) == dvc_files.locked_by(project, "ppo") == {"a": "1"}
        dvc_files.locked(project)["a"] = dvc_files.locked_by(project, "ppo")["a"] = "2"
        dvc_files.graph(project).clear()
    assert "sft" in dvc_files.graph(project)
    (project / "dvc.lock").write_text(lock.replace("'1'", "'3'"), encoding="utf-8")
    assert dvc_files.locked(project) == {"a": "3"}
    (project / "dvc.lock").unlink()
    assert dvc_files.locked(project) == {}

"""The wrappers for git and DVC, and their errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, git
from tests.flows import toy

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:team/rlhf.git", "example.org/team/rlhf"),
        ("https://example.org/team/rlhf", "example.org/team/rlhf"),
        ("https://user:secret@example.org:8443/team/rlhf.git/", "example.org/team/rlhf"),
        ("ssh://git@example.org:22/team/rlhf.git", "example.org/team/rlhf"),
        ("host:rlhf.git", "host/rlhf"),
        ("file:///srv/git/rlhf.git", "/srv/git/rlhf"),
        ("/srv/git/rlhf.git", "/srv/git/rlhf"),
    ],
)
def test_the_address_is_the_remote_without_protocol_and_login(
    tmp_path: Path, remote: str, address: str
) -> None:
    toy.git(tmp_path, "init", "-q")
    assert git.address(tmp_path) == str(tmp_path)
    toy.git(tmp_path, "remote", "add", "origin", remote)
    assert git.address(tmp_path) == address
    (tmp_path / "part").mkdir()
    assert git.address(tmp_path / "part") == f"{address}/part"


def test_files_of_a_commit_have_their_own_names_not_gits_quoted_ones(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    for name in ("metrics/prüfung.json", "metrics/a b.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}", encoding="utf-8")
        toy.commit(root)
        assert name in git.files(root, "HEAD", "metrics/")
        assert git.show(root, "HEAD", name) == "{}"


def test_a_file_of_a_commit_in_another_encoding_is_one_message(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    (root / "params.yaml").write_bytes("sft: {from: möbel}".encode("latin-1"))
    toy.commit(root)
    with pytest.raises(UserError, match=r"`git show .*is not UTF-8"):
        git.show(root, "HEAD", "params.yaml")


def test_a_folder_without_a_commit_is_an_error(tmp_path: Path) -> None:
    toy.git(tmp_path, "init", "-q")
    with pytest.raises(UserError, match="has no git commit"):
        git.committed(tmp_path, "params.yaml")


def test_a_missing_git_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="install git"):
        git.files(tmp_path, "HEAD", "")
    assert git.commit(tmp_path) is None
    assert git.address(tmp_path) == str(tmp_path)


def test_a_user_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    toy.git(root, "config", "--unset", "user.email")
    for variable in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(UserError, match=r"git config user\.email"):
        git.committed(root, "params.yaml")


def test_the_cache_is_that_of_dvcs_settings(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    for setting in ("", "[cache]\ndir = ../../shared\n", "[cache]\ndir = /somewhere/else\n"):
        (root / ".dvc/config.local").write_text(setting, encoding="utf-8")
        expected = Path(dvc_cli.run(root, "cache", "dir"))
        assert dvc_cli.cache(root) == dvc_cli.cache(root / "given") == expected


def test_no_dvc_repository_or_invalid_settings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in no DVC repository"):
        dvc_cli.cache(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[cache]\nno_such_key = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"DVC's settings .* are not valid: .*no_such_key"):
        dvc_cli.cache(tmp_path)


def test_a_project_in_which_another_run_is_at_work_is_named_with_its_process(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    stage = next(name for name in dvc_files.graph(root) if name != dvc_files.INPUTS)
    out = dvc_files.graph(root)[stage].outs[0]
    holder = {"pid": os.getpid(), "cmd": "dvc repro"}
    (root / ".dvc/tmp").mkdir(exist_ok=True)
    (root / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(root / out): holder}}))
    at_work = pytest.raises(UserError, match=rf"another run is at work in .*\(process {os.getpid()}\): wait")
    with at_work:
        dvc_cli.run(root, "status", "--json")
    for held in ({"read": {str(root / out): [holder]}}, {"write": {str(root / out): holder}}):
        (root / ".dvc/tmp/rwlock").write_text(json.dumps(held))
        with at_work:
            dvc_cli.refuse_beside_run(root)
    (root / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(root / out): holder | {"pid": 2**30}}}))
    dvc_cli.refuse_beside_run(root)  # what a killed process left

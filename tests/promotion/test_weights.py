"""A champion's weights are restored from the place that has them, and only with the same bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, hashing
from rlhf_tasks.promotion import weights
from tests.flows.toy import commit, git
from tests.promotion import planted

POLICY = Path("models/policy")


def restore(project: Path, md5: str, **tags: str) -> Path:
    named = {"path": weights.PATH, "rev": weights.REVISION, "folder": weights.FOLDER}
    return weights.restore(project, project / ".rlhf", md5, {named[k]: v for k, v in tags.items()})


def test_weights_come_from_the_cache_by_hash(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert not weights.is_cached(project, md5)
    planted.cached(POLICY, project / ".dvc/cache")
    assert weights.is_cached(project, md5)
    shutil.rmtree(POLICY)
    folder = restore(project, md5)
    assert (folder / "weights").read_text(encoding="utf-8") == "better"
    assert hashing.dvc_md5(folder) == md5
    assert restore(project, md5) == folder, "the second time it exists"


def test_several_processes_may_restore_the_same_weights_at_once(project: Path) -> None:
    """`rlhf export champion` and `rlhf generate champion` take no lock of each other."""
    for number in range(20):
        (POLICY / f"part-{number}").write_text(str(number), encoding="utf-8")
    md5 = hashing.dvc_md5(POLICY)
    planted.cached(POLICY, project / ".dvc/cache")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: restore(project, md5), range(8)))
    assert {hashing.dvc_md5(folder) for folder in folders} == {md5}


def test_an_altered_cache_is_not_used(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    planted.cached(POLICY, project / ".dvc/cache")
    blob = hashing.dvc_md5(POLICY / "weights")
    planted.blob(project / ".dvc/cache", blob).write_text("worse", encoding="utf-8")
    with pytest.raises(UserError, match="holds other bytes"):
        restore(project, md5)
    planted.blob(project / ".dvc/cache", blob).unlink()
    with pytest.raises(
        UserError, match=rf"the weights {md5} cannot be restored: .* does not hold all of them"
    ):
        restore(project, md5, path=str(POLICY), rev="HEAD")


def test_weights_come_from_a_commit_if_the_cache_is_empty(project: Path) -> None:
    """DVC fetches them from a remote by the commit."""
    for name in ("dvc.yaml", "dvc.lock"):
        Path(name).unlink()
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", str(POLICY)], check=True)
    commit(project)
    md5 = hashing.dvc_md5(POLICY)
    remote = project.parent / f"{project.name}-remote"
    subprocess.run([sys.executable, "-m", "dvc", "remote", "add", "-d", "r", str(remote)], check=True)
    commit(project)
    subprocess.run([sys.executable, "-m", "dvc", "push", "-q"], check=True)
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(POLICY)
    folder = restore(project, md5, path=str(POLICY), rev="HEAD")
    assert hashing.dvc_md5(folder) == md5


def test_weights_come_from_a_commit_of_a_project_in_a_part_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    part = tmp_path / "part"
    (part / POLICY).mkdir(parents=True)
    (part / POLICY / "weights").write_text("better", encoding="utf-8")
    for words in (("init", "-q", "--subdir"), ("add", "-q", str(POLICY))):
        subprocess.run([sys.executable, "-m", "dvc", *words], check=True, cwd=part)
    commit(tmp_path)
    md5 = hashing.dvc_md5(part / POLICY)
    monkeypatch.setattr(weights, "_cache", lambda root: None)
    assert hashing.dvc_md5(restore(part, md5, path=str(POLICY), rev="HEAD")) == md5


def test_weights_come_from_their_first_folder_unless_it_changed(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert restore(project, md5, folder=str(POLICY.resolve())) == POLICY.resolve()
    (POLICY / "weights").write_text("other", encoding="utf-8")
    with pytest.raises(UserError, match="was removed, or has changed"):
        restore(project, md5, folder=str(POLICY.resolve()))


def test_another_run_in_the_way_of_one_place_does_not_hide_the_next(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_words: object) -> str:
        raise UserError("another run is at work")

    monkeypatch.setattr(dvc_cli, "run", busy)
    md5, there = hashing.dvc_md5(POLICY), str(POLICY.resolve())
    assert restore(project, md5, path=str(POLICY), rev="HEAD", folder=there) == POLICY.resolve()
    with pytest.raises(UserError, match=r"does not hold all of them; another run is at work$"):
        restore(project, md5, path=str(POLICY), rev="HEAD")

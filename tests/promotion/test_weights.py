"""A champion's weights, brought back from wherever they are, and only if the bytes are the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing
from rlhf_tasks.promotion import weights
from tests.flows.toy import commit
from tests.promotion import planted

POLICY = Path("models/policy")


def bring(project: Path, md5: str, **tags: str) -> Path:
    named = {"path": weights.PATH, "rev": weights.REVISION, "folder": weights.FOLDER}
    return weights.bring(project, project / ".rlhf", md5, {named[k]: v for k, v in tags.items()})


def test_from_the_cache_by_hash(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert not weights.is_kept(project, md5)
    planted.cached(POLICY, project / ".dvc/cache")
    assert weights.is_kept(project, md5)
    shutil.rmtree(POLICY)
    found = bring(project, md5)
    assert (found / "weights").read_text(encoding="utf-8") == "better"
    assert hashing.dvc_md5(found) == md5
    assert bring(project, md5) == found, "again it is there"


def test_a_cache_that_was_altered_is_not_believed(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    planted.cached(POLICY, project / ".dvc/cache")
    blob = hashing.dvc_md5(POLICY / "weights")
    (project / ".dvc/cache/files/md5" / blob[:2] / blob[2:]).write_text("worse", encoding="utf-8")
    with pytest.raises(UserError, match="has other bytes"):
        bring(project, md5)
    (project / ".dvc/cache/files/md5" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(UserError, match="does not hold all of it"):
        bring(project, md5)


def test_from_the_commit_that_has_it(project: Path) -> None:
    """As where the cache was emptied and a remote has it: DVC is asked by commit."""
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
    found = bring(project, md5, path=str(POLICY), rev="HEAD")
    assert hashing.dvc_md5(found) == md5


def test_from_the_folder_where_it_lay_unless_that_has_changed(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert bring(project, md5, folder=str(POLICY.resolve())) == POLICY.resolve()
    (POLICY / "weights").write_text("other", encoding="utf-8")
    with pytest.raises(UserError, match="is gone, or has changed"):
        bring(project, md5, folder=str(POLICY.resolve()))


def test_what_is_nowhere_is_told_with_all_that_was_tried(project: Path) -> None:
    with pytest.raises(UserError, match=r"the weights a{32}\.dir cannot be had: the DVC cache does not hold"):
        bring(project, "a" * 32 + ".dir", path=str(POLICY), rev="HEAD")

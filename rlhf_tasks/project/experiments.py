"""DVC experiments: the commits under refs/exps that hold the results of runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

MAX_SEARCHED = 50  # experiments of one commit; each starts a git process


def find(root: Path, name: str) -> str | None:
    """The commit of the newest experiment with this name; None if there is none, or no git."""
    if git.revision(root) is None:
        return None
    return next((commit for commit, known in listing(root) if known == name), None)


def listing(root: Path) -> list[tuple[str, str]]:
    """All experiments as (commit, name), newest first."""
    form = "--format=%(objectname) %(refname)"
    refs = git.output(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    return [(line.split(" ")[0], line.rpartition("/")[2]) for line in refs]


def alike(root: Path, revision: str, params: str) -> tuple[str, str] | None:
    """Commit and name of the newest experiment of a commit that has this text of params.yaml."""
    base, form = git.commit(root, revision), "--format=%(parent) %(objectname) %(refname)"
    refs = git.output(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    made = [line.split(" ") for line in refs if base is not None and line.startswith(f"{base} ")]
    for _, experiment, ref in made[:MAX_SEARCHED]:
        with suppress(UserError):
            if git.show(root, experiment, "params.yaml") == params:
                return experiment, ref.rpartition("/")[2]
    return None

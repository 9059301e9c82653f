"""DVC experiments: the commits under refs/exps that keep what a run made."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

MOST_LOOKED_AT = 50  # experiments of one commit, a process of git each


def find(root: Path, name: str) -> str | None:
    """The commit of the experiment of this name, the newest if it was made from several commits."""
    return next((commit for commit, known in listing(root) if known == name), None)


def listing(root: Path) -> list[tuple[str, str]]:
    """All experiments as commit and name, newest first."""
    form = "--format=%(objectname) %(refname)"
    refs = git.output(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    return [(line.split(" ")[0], line.rpartition("/")[2]) for line in refs]


def alike(root: Path, revision: str, params: str) -> tuple[str, str] | None:
    """Commit and name of the newest experiment that was made of a commit with this text of params.yaml."""
    base, form = git.commit(root, revision), "--format=%(parent) %(objectname) %(refname)"
    refs = git.output(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    made = [line.split(" ") for line in refs if base is not None and line.startswith(f"{base} ")]
    for _, found, ref in made[:MOST_LOOKED_AT]:
        with suppress(UserError):
            if git.show(root, found, "params.yaml") == params:
                return found, ref.rpartition("/")[2]
    return None

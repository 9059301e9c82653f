"""The one wrapper for git: commits, the files in them, and what differs from them.

`root` is the project's folder.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_tasks.errors import UserError

WRITTEN_BY_RUNS = (":!metrics", ":!plots", ":!dvc.lock")
"""Git paths that a run itself changes; they do not make a working tree dirty."""


def check_commit(root: Path) -> None:
    """Refuse a project that no run can work on a commit of.

    Raises:
        UserError: if it is in no git repository or has no commit, or git does not know who the user is.
    """
    try:
        output(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except UserError:
        raise UserError(
            f"{root} has no git commit; an isolated run works on one: `git init`, `git add`, `git commit`"
        ) from None
    try:
        output(root, "config", "user.name")
        output(root, "config", "user.email")
    except UserError:
        raise UserError(
            "git does not know who you are, and what comes of a run is a commit (a DVC experiment): "
            "`git config user.name NAME` and `git config user.email ADDRESS`"
        ) from None


def resolve(root: Path, revision: str | None) -> str:
    """The hash of a commit; None: the one checked out.

    Raises:
        UserError: if git does not know it, or the project is in no git repository.
    """
    check_commit(root)
    found = commit(root, revision or "HEAD")
    if found is None:
        raise UserError(f"revision={revision!r} is no commit, branch or tag that git knows in {root}")
    return found


def commit(root: Path, revision: str) -> str | None:
    """The commit that git knows by this name."""
    try:
        return output(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except UserError:
        return None


def committed(root: Path, path: str, revision: str = "HEAD") -> str:
    """The text of a file in a commit.

    Raises:
        UserError: if it is not committed there.
    """
    check_commit(root)
    try:
        return show(root, revision, path)
    except UserError:
        where = "" if revision == "HEAD" else f" in {revision}"
        raise UserError(
            f"{path} is not committed{where}, and an isolated run sees only what is; commit it"
        ) from None


def files(root: Path, revision: str, under: str) -> list[str]:
    """The files of a commit whose path, from the project's folder, is or begins with `under`."""
    return output(root, "ls-tree", "-r", "--name-only", revision, "--", f"./{under}").splitlines()


def show(root: Path, revision: str, path: str) -> str:
    """The text of a file in a commit; UserError if it is not there."""
    return output(root, "show", f"{revision}:./{path}", strip=False)


def changed(root: Path, *untold: str) -> list[str]:
    """The files that differ from the commit, new ones too, but for those of the git paths `untold`."""
    lines = output(root, "status", "--porcelain", "--", ".", *untold, strip=False).splitlines()
    return [line[2:].strip() for line in lines]


def address(root: Path) -> str:
    """What tells a project from others, wherever it is checked out.

    The address of its git remote `origin`, without protocol and login, and the project's folder in there;
    without a remote the folder that it lies in.
    """
    try:
        url = output(root, "remote", "get-url", "origin")
        inside, parts = output(root, "rev-parse", "--show-prefix"), urlsplit(url)
    except (UserError, FileNotFoundError, ValueError):  # the last for an address that is none
        return str(root.resolve())
    if "://" in url:
        place = f"{parts.hostname or ''}{parts.path}"
    elif there := re.fullmatch(r"(?:[^@/]+@)?([^@/:]+):/*(.+)", url):  # as ssh takes it
        place = f"{there[1]}/{there[2]}"
    else:
        place = str((root / url).resolve())
    return f"{place.rstrip('/').removesuffix('.git')}/{inside}".rstrip("/")


def output(root: Path, *words: str, strip: bool = True) -> str:
    """What git prints in a folder.

    Raises:
        UserError: with its own words, if it fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`git {' '.join(words)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip() if strip else done.stdout


def revision(root: Path) -> str | None:
    """The commit checked out; None without git or before a first commit."""
    return quiet_output(root, "rev-parse", "--verify", "--quiet", "HEAD") or None


def is_dirty(root: Path) -> bool:
    """True if tracked or new files differ from the commit, apart from what runs write."""
    return bool(quiet_output(root, "status", "--porcelain", "--", ".", *WRITTEN_BY_RUNS))


def quiet_output(root: Path, *words: str) -> str:
    """What git prints in a folder; empty if git fails or is not installed."""
    try:
        return output(root, *words)
    except (UserError, FileNotFoundError):
        return ""

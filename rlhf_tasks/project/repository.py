"""What git and DVC know of a project: commits and what is in them, experiments, the cache. No torch here.

`root` is the project's folder. All but `git` and `dvc` themselves only ask.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_tasks.config import UserError

GIT_HELD = ("metrics/", "plots/")  # outs that git keeps, not DVC's cache
MOST_LOOKED_AT = 50  # experiments of one commit, a process of git each


def check_commit(root: Path) -> None:
    """Refuse a project that no run can work on a commit of.

    Raises:
        UserError: if it is in no git repository or has no commit, or git does not know who the user is.
    """
    try:
        git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except UserError:
        raise UserError(
            f"{root} has no git commit; an isolated run works on one: `git init`, `git add`, `git commit`"
        ) from None
    try:
        git(root, "config", "user.name")
        git(root, "config", "user.email")
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
        return git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except UserError:
        return None


def committed(root: Path, path: str, revision: str = "HEAD") -> str:
    """The text of a file in a commit.

    Raises:
        UserError: if it is not committed there.
    """
    check_commit(root)
    try:
        return shown(root, revision, path)
    except UserError:
        where = "" if revision == "HEAD" else f" in {revision}"
        raise UserError(
            f"{path} is not committed{where}, and an isolated run sees only what is; commit it"
        ) from None


def paths(root: Path, revision: str, under: str) -> list[str]:
    """The files of a commit whose path, from the project's folder, is or begins with `under`."""
    return git(root, "ls-tree", "-r", "--name-only", revision, "--", f"./{under}").splitlines()


def shown(root: Path, revision: str, path: str) -> str:
    """The text of a file in a commit; UserError if it is not there."""
    return git(root, "show", f"{revision}:./{path}", strip=False)


def changed(root: Path, *untold: str) -> list[str]:
    """The files that differ from the commit, new ones too, but for those of the git paths `untold`."""
    lines = git(root, "status", "--porcelain", "--", ".", *untold, strip=False).splitlines()
    return [line[2:].strip() for line in lines]


def experiment(root: Path, name: str) -> str | None:
    """The commit of the experiment of this name, the newest if it was made from several commits."""
    return next((commit for commit, known in experiments(root) if known == name), None)


def experiments(root: Path) -> list[tuple[str, str]]:
    """All experiments as commit and name, newest first."""
    form = "--format=%(objectname) %(refname)"
    refs = git(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    return [(line.split(" ")[0], line.rpartition("/")[2]) for line in refs]


def alike(root: Path, revision: str, params: str) -> tuple[str, str] | None:
    """Commit and name of the newest experiment that was made of a commit with this text of params.yaml."""
    base, form = commit(root, revision), "--format=%(parent) %(objectname) %(refname)"
    refs = git(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    made = [line.split(" ") for line in refs if base is not None and line.startswith(f"{base} ")]
    for _, found, ref in made[:MOST_LOOKED_AT]:
        with suppress(UserError):
            if shown(root, found, "params.yaml") == params:
                return found, ref.rpartition("/")[2]
    return None


def address(root: Path) -> str:
    """What tells a project from others, wherever it is checked out.

    The address of its git remote `origin`, without protocol and login, and the project's folder in there;
    without a remote the folder that it lies in.
    """
    try:
        url = git(root, "remote", "get-url", "origin")
        inside, parts = git(root, "rev-parse", "--show-prefix"), urlsplit(url)
    except (UserError, FileNotFoundError, ValueError):  # the last for an address that is none
        return str(root.resolve())
    if "://" in url:
        place = f"{parts.hostname or ''}{parts.path}"
    elif there := re.fullmatch(r"(?:[^@/]+@)?([^@/:]+):/*(.+)", url):  # as ssh takes it
        place = f"{there[1]}/{there[2]}"
    else:
        place = str((root / url).resolve())
    return f"{place.rstrip('/').removesuffix('.git')}/{inside}".rstrip("/")


def home(root: Path) -> Path:
    """The main checkout's `.rlhf`; `root` is the main checkout."""
    return root / ".rlhf"


def cache(root: Path) -> Path:
    """The DVC cache of the project: what `dvc cache dir` prints, without a process for it.

    Raises:
        UserError: if the project is in no DVC repository, or its settings cannot be used.
    """
    from dvc.config import Config, ConfigError

    above = [root.resolve(), *root.resolve().parents]
    own = next((folder / ".dvc" for folder in above if (folder / ".dvc").is_dir()), None)
    if own is None:
        raise UserError(f"{root} is in no DVC repository; `dvc init` makes one")
    try:
        return Path(Config(dvc_dir=str(own))["cache"].get("dir") or own / "cache")
    except ConfigError as error:
        raise UserError(f"DVC's settings (.dvc/config, .dvc/config.local) cannot be used: {error}") from None


def dvc(folder: Path, *words: str) -> str:
    """Run DVC in a folder; returns what it prints.

    Raises:
        UserError: with its own words, if it fails.
    """
    command = [sys.executable, "-m", "dvc", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise UserError(f"`dvc {' '.join(words)}` failed in {folder}: {said}")
    return done.stdout.strip()


def git(root: Path, *words: str, strip: bool = True) -> str:
    """What git prints in a folder.

    Raises:
        UserError: with its own words, if it fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`git {' '.join(words)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip() if strip else done.stdout

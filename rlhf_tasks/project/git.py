"""The one wrapper for git: commits, the files in them, what differs from them, and DVC's experiments.

`root` is the project's folder.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path

from rlhf_tasks.errors import UserError

OTHER_OWNER = "safe.directory"  # in git's message, whatever its language
BEGIN = "`git init`, `git add .`, `git commit -m start`"
WRITTEN_BY_RUNS = (":!metrics", ":!plots", ":!dvc.lock")
"""Git paths that a run itself changes; they do not make a working tree dirty."""
MAX_SEARCHED = 50  # experiments of one commit; each starts a git process


def check_commit(root: Path) -> None:
    """Check that an isolated run can work on a commit of the project, and that git knows the user."""
    if not quiet_output(root, "rev-parse", "--verify", "--quiet", "HEAD"):
        raise UserError(f"{root} has no git commit, and an isolated run needs one: {BEGIN}")
    try:
        output(root, "config", "user.name")
        output(root, "config", "user.email")
    except UserError:
        raise UserError(
            "git does not know your name, and a run ends with a commit (a DVC experiment); set "
            "`git config user.name NAME` and `git config user.email ADDRESS`"
        ) from None


def resolve(root: Path, revision: str | None) -> str:
    """The hash of a commit; that of HEAD for None.

    Raises:
        UserError: if git does not know it, or the project is in no git repository.
    """
    check_commit(root)
    result = commit(root, revision or "HEAD")
    if result is None:
        raise UserError(
            f"revision={revision!r} is not a commit, branch or tag of {root}; see `git log` and `git branch`"
        )
    return result


def commit(root: Path, revision: str = "HEAD") -> str | None:
    """The hash of a commit by its name; None for an unknown name, before the first commit, or without git."""
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return quiet_output(root, *words) or None


def committed(root: Path, path: str, revision: str = "HEAD") -> str:
    """The text of a file in a commit; the error of one that is not there says what to do."""
    check_commit(root)
    try:
        return show(root, revision, path)
    except UserError:
        where = "" if revision == "HEAD" else f" in {revision}"
        raise UserError(
            f"{path} is not committed{where}, and an isolated run sees only committed files; commit it"
        ) from None


def files(root: Path, revision: str, under: str) -> list[str]:
    """The files of a commit at the path `under` or below it, relative to the project's folder."""
    return output(root, "ls-tree", "-r", "--name-only", revision, "--", f"./{under}").splitlines()


def show(root: Path, revision: str, path: str) -> str:
    return output(root, "show", f"{revision}:./{path}", strip=False)


def list_changes(root: Path, *excluded: str) -> list[str]:
    """The files that differ from the commit, new ones too, except the git paths `excluded`."""
    lines = output(root, "status", "--porcelain", "--", ".", *excluded, strip=False).splitlines()
    return [line[2:].strip() for line in lines]


def address(root: Path) -> str:
    """A name of the project that is equal for all its clones.

    It is the address of the git remote `origin`, without protocol and login, and the project's folder in the
    repository; without a remote it is the absolute path of the folder.
    """
    url = quiet_output(root, "remote", "get-url", "origin")
    if not url:
        return str(root.resolve())
    if ":" not in url:  # a folder
        url = str((root / url).resolve())
    place = re.sub(r"^(\w+://)?([^/@]+@)?", "", url)
    place = re.sub(r":(\d+/)?/*", "/", place, count=1)  # a port, or the form of ssh, HOST:PATH
    return f"{place.rstrip('/').removesuffix('.git')}/{prefix(root)}".rstrip("/")


def prefix(root: Path) -> str:
    """The project's folder in its repository, such as `part/`; empty where it is the whole repository."""
    return quiet_output(root, "rev-parse", "--show-prefix")


def output(root: Path, *words: str, strip: bool = True) -> str:
    """The output of a git command in a folder; letters of paths stay as they are.

    Raises:
        UserError: with git's own message, if it fails, or if git is not installed.
    """
    command = ["git", "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"`git {' '.join(words)}` cannot start in {root}; install git") from None
    except UnicodeDecodeError as error:
        raise UserError(f"what `git {' '.join(words)}` prints in {root} is not UTF-8 ({error})") from None
    if done.returncode and OTHER_OWNER in done.stderr:
        remedy = done.stderr.strip().splitlines()[-1].strip()
        raise UserError(
            f"the git repository of {root.resolve()} belongs to another user, so that git does not "
            f"work there, and no run could name its commit. Allow it: `{remedy}`"
        )
    if done.returncode:
        raise UserError(f"`git {' '.join(words)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip() if strip else done.stdout


def is_dirty(root: Path) -> bool:
    """True if files differ from the commit, new ones too, except those that runs write, and params.yaml.

    What a run changes of that is told value by value.
    """
    return bool(quiet_output(root, "status", "--porcelain", "--", ".", ":!params.yaml", *WRITTEN_BY_RUNS))


def quiet_output(root: Path, *words: str) -> str:
    """The output of a git command in a folder; empty if git fails or is not installed.

    Raises:
        UserError: if the repository belongs to another user.
    """
    try:
        return output(root, *words)
    except UserError as error:
        if OTHER_OWNER in str(error):
            raise
        return ""


# ----------------------------------------------------------- DVC experiments: the commits under refs/exps


def experiments(root: Path, base: str = "") -> list[tuple[str, str]]:
    """All experiments as (commit, name), newest first; with `base` those of this commit."""
    form = "--format=%(parent) %(objectname) %(refname)"
    refs = output(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    return [(ref.split(" ")[1], ref.rpartition("/")[2]) for ref in refs if ref.startswith(base)]


def find_experiment(root: Path, name: str) -> str | None:
    """The commit of the newest experiment with this name; None if there is none, or no git."""
    known = experiments(root) if commit(root) is not None else []
    return next((commit for commit, other in known if other == name), None)


def experiment_with(root: Path, revision: str, params: str) -> tuple[str, str] | None:
    """Commit and name of the newest experiment of a commit that has this text of params.yaml."""
    base = commit(root, revision)
    for experiment, name in experiments(root, base)[:MAX_SEARCHED] if base is not None else ():
        with suppress(UserError):
            if show(root, experiment, "params.yaml") == params:
                return experiment, name
    return None

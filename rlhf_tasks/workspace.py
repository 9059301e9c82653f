"""Isolated runs: a git worktree of the project that shares its DVC cache. No torch here.

    .rlhf/workspaces/NAME            of the main checkout; removed when the run is over
    .rlhf/workspaces/NAME@HOST.lock  held by the process that works in it: one that vanished is told by it, on
                                     its own machine only, since not every shared disk tells locks to others

A workspace holds one commit, the parameters that the run was given, and the data at `data.path` as it
lies in the main checkout now (it need not be in git). The user's working tree is never written to. What
comes of a run is a DVC experiment, which `dvc exp show` lists and `dvc exp apply` brings back.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from rlhf_tasks import lineage, presets
from rlhf_tasks.config import Config, UserError

FOLDER = "workspaces"
GIT_HELD = ("metrics/", "plots/")
UNBROUGHT = ("__pycache__",)  # folders below the data that are none of it


@dataclass(frozen=True)
class Request:
    """What a run is asked to change of the committed parameters: presets, then single values on top."""

    preset: str | None = None
    seed: int | None = None
    overrides: dict[str, Any] | None = None

    def overlays(self) -> list[dict[str, Any]]:
        return [*self._presets(), *self._single()]

    def _presets(self) -> list[dict[str, Any]]:
        return [presets.read(self.preset)] if self.preset else []

    def _single(self) -> list[dict[str, Any]]:
        given = dict(self.overrides or {}) | ({} if self.seed is None else {"seed": self.seed})
        return [presets.nested(key, value) for key, value in given.items()]

    def settle(self, text: str) -> tuple[str, Config, list[str]]:
        """The text of params.yaml with the changes, as a checked config, and the changes.

        Raises:
            ConfigError: naming every problem of what was asked.
        """
        return presets.combined(text, self._presets(), "params.yaml with the run's changes", self._single())


@dataclass(frozen=True)
class Workspace:
    """A worktree at `top`, in which the project's folder is `folder`."""

    root: Path
    top: Path
    folder: Path
    lock: FileLock

    @property
    def name(self) -> str:
        return self.top.name

    def environment(self) -> dict[str, str]:
        """So that the stages run the code of this commit, not that of the main checkout."""
        if not (self.folder / "rlhf_tasks").is_dir():
            return {}
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *_given("PYTHONPATH")])}

    def save(self, name: str) -> str:
        """Keep the state of the workspace as a DVC experiment of this name; returns its commit."""
        # DVC keeps its exchange with git under refs/exps/exec, which all worktrees share.
        with FileLock(self.root / ".rlhf" / "exp.lock"):
            dvc(self.folder, "exp", "save", "--force", "--name", name, *self._uncached())
        return experiment(self.root, name) or ""

    def differs(self) -> bool:
        """Whether anything in it differs from its commit."""
        return bool(_changed(self.folder))

    def _uncached(self) -> list[str]:
        """Metrics and curves, which git holds: at the first run it does not know them yet."""
        outs = [out for node in lineage.graph(self.folder).values() for out in node.outs]
        held = [out for out in outs if out.startswith(GIT_HELD) and (self.folder / out).exists()]
        return [word for out in held for word in ("--include-untracked", out)]

    def remove(self) -> None:
        """Take it away, whatever is in it; nothing happens if it is gone."""
        remove(self.root, self.name)
        self.lock.release()


def create(root: Path, name: str, params: str, settings: Config, revision: str = "HEAD") -> Workspace:
    """A workspace of a commit, with these parameters and the data of now.

    What vanished processes left is removed first, one of the same name with it.

    Raises:
        UserError: if the project is in no git repository, or has no commit; if its data lies outside by a
            relative path; for inputs that are here and cannot be carried, by name.
    """
    _needs_commit(root)
    check_data(settings.data.path)
    workspace = _claimed(root, name)
    try:
        _furnish(workspace, params, revision)
        _bring(settings.data.path, root, workspace.folder)
        _check_inputs(root, workspace.folder)
    except BaseException:
        workspace.remove()
        raise
    return workspace


@contextmanager
def visited(root: Path, name: str, params: str, revision: str) -> Iterator[Path]:
    """The project's folder at a commit, with these parameters and what the DVC cache has of its outs.

    To look at what a run left: its data is not brought, and the folder is gone when the block ends.
    """
    workspace = _claimed(root, name)
    try:
        _furnish(workspace, params, revision)
        yield workspace.folder
    finally:
        workspace.remove()


def _claimed(root: Path, name: str) -> Workspace:
    """An empty place of this name that is this process's own; what vanished processes left goes first."""
    remove_left(root)
    top = home(root) / FOLDER / name
    inside = root.resolve().relative_to(Path(_git(root, "rev-parse", "--show-toplevel")).resolve())
    workspace = Workspace(root, top, top / inside, _lock(root, name))
    with _worktrees(root):
        if _is_held(root, name):
            raise UserError(f"a process still works in the workspace {name}; wait for its end")
        _remove(root, name)
        workspace.lock.acquire(timeout=0)
    return workspace


def _furnish(workspace: Workspace, params: str, revision: str) -> None:
    """The files of a commit, parameters, DVC's settings, and the outs that the cache has."""
    with _worktrees(workspace.root):
        _git(workspace.root, "worktree", "add", "--quiet", "--detach", str(workspace.top), revision)
    (workspace.folder / "params.yaml").write_text(params, encoding="utf-8")
    _configure(workspace.root, workspace.folder)
    dvc(workspace.folder, "checkout", "--quiet", "--force", "--allow-missing")


def check_data(path: str) -> None:
    """Refuse data that would be brought to a place outside of the workspace, on other people's files.

    Raises:
        UserError: for a relative path that leads out of the project's folder.
    """
    if not Path(path).is_absolute() and ".." in Path(path).parts:
        raise UserError(
            f"data.path={path!r} leads out of the project's folder, which an isolated run cannot follow; "
            "give an absolute path"
        )


def remove(root: Path, name: str) -> None:
    """Take a workspace away by name, and what git knows of it."""
    with _worktrees(root):
        _remove(root, name)


def remove_left(root: Path) -> list[str]:
    """Take away all workspaces whose process, one of this machine, has vanished; their names."""
    own = f"@{platform.node()}.lock"
    with _worktrees(root):
        names = [path.name.removesuffix(own) for path in sorted((home(root) / FOLDER).glob(f"*{own}"))]
        left = [name for name in names if not _is_held(root, name)]
        _remove(root, *left)
    return left


def _remove(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(home(root) / FOLDER / name, ignore_errors=True)
        for lock in (home(root) / FOLDER).glob(f"{name}@*.lock"):
            lock.unlink(missing_ok=True)
    _git(root, "worktree", "prune")  # what was tidied up by hand, too


def _is_held(root: Path, name: str) -> bool:
    try:
        with _lock(root, name).acquire(timeout=0):
            return False
    except Timeout:
        return True


def unseen(root: Path, data: str) -> list[str]:
    """Files of the working tree that differ from the commit: an isolated run does not see these changes.

    Left aside: what runs write themselves, and the data at this path, which is seen as it is now.
    """
    given = [] if Path(data).is_absolute() else [f":!{data}"]
    return _changed(root, *lineage.UNTOLD, *given)


def _changed(root: Path, *untold: str) -> list[str]:
    lines = _git(root, "status", "--porcelain", "--", ".", *untold, strip=False).splitlines()
    return [line[2:].strip() for line in lines]


def resolve(root: Path, revision: str | None) -> str:
    """The hash of a commit; None: the one checked out.

    Raises:
        UserError: if git does not know it, or the project is in no git repository.
    """
    _needs_commit(root)
    found = commit(root, revision or "HEAD")
    if found is None:
        raise UserError(f"revision={revision!r} is no commit, branch or tag that git knows in {root}")
    return found


def committed(root: Path, path: str, revision: str = "HEAD") -> str:
    """The text of a file in a commit.

    Raises:
        UserError: if it is not committed there.
    """
    _needs_commit(root)
    try:
        return shown(root, revision, path)
    except UserError:
        where = "" if revision == "HEAD" else f" in {revision}"
        raise UserError(
            f"{path} is not committed{where}, and an isolated run sees only what is; commit it"
        ) from None


def experiment(root: Path, name: str) -> str | None:
    """The commit of the experiment of this name, the newest if it was made from several commits."""
    return next((commit for commit, known in experiments(root) if known == name), None)


def experiments(root: Path) -> list[tuple[str, str]]:
    """All experiments as commit and name, newest first."""
    form = "--format=%(objectname) %(refname)"
    refs = _git(root, "for-each-ref", "--sort=-committerdate", form, "refs/exps/*/*/*").splitlines()
    return [(line.split(" ")[0], line.rpartition("/")[2]) for line in refs]


def commit(root: Path, revision: str) -> str | None:
    """The commit that git knows by this name."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except UserError:
        return None


def address(root: Path) -> str:
    """What tells a project from others wherever it is checked out: the address of its git remote `origin`,
    without protocol and login, and its folder in there; without a remote its own folder."""
    try:
        url = _git(root, "remote", "get-url", "origin")
        inside = _git(root, "rev-parse", "--show-prefix")
    except (UserError, FileNotFoundError):
        return str(root.resolve())
    if "://" in url:
        parts = urlsplit(url)
        place = f"{parts.hostname or ''}{parts.path}"
    elif there := re.fullmatch(r"(?:[^@/]+@)?([^@/:]+):/*(.+)", url):  # as ssh takes it
        place = f"{there[1]}/{there[2]}"
    else:
        place = str((root / url).resolve())
    return f"{place.rstrip('/').removesuffix('.git')}/{inside}".rstrip("/")


def cache(root: Path) -> Path:
    """The DVC cache of the project."""
    return Path(dvc(root, "cache", "dir"))


def paths(root: Path, revision: str, under: str) -> list[str]:
    """The files of a commit whose path, from the project's folder, is or begins with `under`."""
    return _git(root, "ls-tree", "-r", "--name-only", revision, "--", f"./{under}").splitlines()


def shown(root: Path, revision: str, path: str) -> str:
    """The text of a file in a commit; UserError if it is not there."""
    return _git(root, "show", f"{revision}:./{path}", strip=False)


def home(root: Path) -> Path:
    """The main checkout's `.rlhf`; `root` is the main checkout."""
    return root / ".rlhf"


def _configure(root: Path, folder: Path) -> None:
    """DVC's settings: those of the commit and the user's own, the shared cache, and as absolute paths what
    they tell relative to the project's folder (a remote in `../store`)."""
    from dvc.config import Config as DvcConfig
    from dvc.config import ConfigError as DvcConfigError
    from dvc.config_schema import RelPath

    there, here = root.resolve() / ".dvc", folder.resolve() / ".dvc"
    if not here.is_dir():  # DVC would look for it further up, and find the main checkout's
        raise UserError(".dvc is not committed beside dvc.yaml; `git add .dvc` and commit it")
    if (there / "config.local").exists():  # the remotes' secrets
        shutil.copy(there / "config.local", here)
    try:
        config = DvcConfig(dvc_dir=str(here))
        with config.edit("local") as own:
            for level in ("repo", "local"):
                for name, remote in config.load_one(level)["remote"].items():
                    for key, value in remote.items():
                        if isinstance(value, RelPath):
                            told = os.path.relpath(value, here)
                            own["remote"].setdefault(name, {})[key] = os.path.normpath(there / told)
            own["cache"]["dir"] = str(cache(root))
    except DvcConfigError as error:
        raise UserError(f"DVC's settings (.dvc/config, .dvc/config.local) cannot be used: {error}") from None


def _check_inputs(root: Path, folder: Path) -> None:
    """Raises UserError naming the stages' inputs that the main checkout has and the workspace cannot see."""
    graph = lineage.graph(folder)
    made = [out for node in graph.values() for out in node.outs]
    deps = dict.fromkeys(dep for node in graph.values() for dep in node.deps)
    given = [
        dep
        for dep in deps
        if not Path(dep).is_absolute() and not any(Path(dep).is_relative_to(out) for out in made)
    ]
    lost = [dep for dep in given if os.path.lexists(root / dep) and not (folder / dep).exists()]
    lost += [f"{dep}/{name}" for dep in given for name in _uncarried(folder / dep)]
    if lost:
        raise UserError(
            f"an isolated run cannot see {', '.join(lost)}: it sees what is in git, in the DVC cache and at "
            "data.path; commit it, and make links that lead out of the repository absolute"
        )


def files(folder: Path) -> Iterator[Path]:
    """All below a folder that is brought to a workspace, links followed; folders only that link back up."""
    for at, folders, names in os.walk(folder, followlinks=True):
        up = [Path(at).resolve(), *Path(at).resolve().parents]
        back = [name for name in folders if Path(at, name).is_symlink() and Path(at, name).resolve() in up]
        folders[:] = [name for name in folders if name not in (*back, *UNBROUGHT)]
        yield from (Path(at, name) for name in (*back, *names))


def _uncarried(folder: Path) -> list[str]:
    """What below a folder no copy can hold: links that lead nowhere or back up, pipes, sockets."""
    return [path.relative_to(folder).as_posix() for path in files(folder) if not path.is_file()]


def _bring(path: str, root: Path, folder: Path) -> None:
    """The data as it is now: it may be outside git, or newer than the commit.

    Links are followed: relative ones would lead elsewhere from here.

    Raises:
        UserError: naming what no copy can hold.
    """
    source, target = root / path, folder / path
    if Path(path).is_absolute() or not source.exists():
        return
    if lost := _uncarried(source):
        raise UserError(
            f"data.path={path!r} has {', '.join(lost)}: links that lead nowhere or back up, or no files; "
            "take them out"
        )
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns(*UNBROUGHT)
        shutil.copytree(source, target, copy_function=_link, ignore=ignore)
    else:
        _link(str(source), str(target))


def _link(source: str, target: str) -> None:
    """The same bytes under a second name, without a copy where the disk allows it; stages only read them."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _worktrees(root: Path) -> FileLock:
    """Two runs that begin at once must not list and make worktrees at the same time."""
    home(root).mkdir(exist_ok=True)
    return FileLock(home(root) / "worktrees.lock")


def _lock(root: Path, name: str) -> FileLock:
    """Held by the process that works in the workspace; changed hands only under `_worktrees`."""
    (home(root) / FOLDER).mkdir(parents=True, exist_ok=True)
    return FileLock(home(root) / FOLDER / f"{name}@{platform.node()}.lock", thread_local=False)


def _needs_commit(root: Path) -> None:
    try:
        _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except UserError:
        raise UserError(
            f"{root} has no git commit; an isolated run works on one: `git init`, `git add`, `git commit`"
        ) from None
    try:
        _git(root, "config", "user.name")
        _git(root, "config", "user.email")
    except UserError:
        raise UserError(
            "git does not know who you are, and what comes of a run is a commit (a DVC experiment): "
            "`git config user.name NAME` and `git config user.email ADDRESS`"
        ) from None


def _given(variable: str) -> list[str]:
    return [os.environ[variable]] if os.environ.get(variable) else []


def _git(root: Path, *words: str, strip: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`git {' '.join(words)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip() if strip else done.stdout


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

"""Isolated runs: a git worktree of the project that shares its DVC cache. No torch here.

    .rlhf/workspaces/NAME            of the main checkout; removed when the run is over
    .rlhf/workspaces/NAME@HOST.lock  held by the process that works in it: one that vanished is told by it, on
                                     its own machine only, since not every shared disk tells locks to others

A workspace holds one commit, the parameters that the run was given, and the data at `data.path` as it
lies in the main checkout now (it need not be in git: `inputs`). The user's working tree is never written
to. What comes of a run is a DVC experiment, which `dvc exp show` lists and `dvc exp apply` brings back.

Where the same was asked of the commit before, a workspace begins with what that experiment left: DVC looks
at it all the same, and finds in a second what it would take ten to restore stage by stage.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, experiments, git, workspace_inputs
from rlhf_tasks.project.dvc_files import KEPT_BY_GIT as GIT_HELD
from rlhf_tasks.project.paths import Paths

FOLDER = "workspaces"
LOCK = "dvc.lock"


@dataclass(frozen=True)
class Workspace:
    """A worktree at `top`, in which the project's folder is `folder`."""

    root: Path
    top: Path
    folder: Path
    lock: FileLock
    like: tuple[str, str] | None = None
    """Commit and name of the experiment that it began with."""

    @property
    def name(self) -> str:
        return self.top.name

    def environment(self) -> dict[str, str]:
        """So that the stages run the code of this commit, not that of the main checkout."""
        if not (self.folder / "rlhf_tasks").is_dir():
            return {}
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *_given("PYTHONPATH")])}

    def save(self, name: str, dvc: Callable[..., str]) -> str:
        """Keep the state of the workspace as a DVC experiment of this name; returns its commit.

        `dvc`: runs the words of a command of DVC in this workspace.
        """
        # DVC keeps its exchange with git under refs/exps/exec, which all worktrees share.
        with FileLock(self.root / ".rlhf" / "exp.lock"):
            dvc("exp", "save", "--force", "--name", name, *self._uncached())
        return experiments.find(self.root, name) or ""

    def differs(self) -> bool:
        """Whether anything in it differs from its commit."""
        return bool(git.changed(self.folder))

    def is_like(self) -> bool:
        """Whether it is still what the experiment left that it began with."""
        if self.like is None:
            return False
        return git.show(self.root, self.like[0], LOCK) == (self.folder / LOCK).read_text("utf-8")

    def _uncached(self) -> list[str]:
        """Metrics and curves, which git holds: at the first run it does not know them yet."""
        outs = [out for node in dvc_files.graph(self.folder).values() for out in node.outs]
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
    git.check_commit(root)
    workspace_inputs.check_data(settings.data.path)
    workspace = replace(_claimed(root, name), like=experiments.alike(root, revision, params))
    try:
        _furnish(workspace, params, revision)
        workspace_inputs.bring(settings.data.path, root, workspace.folder)
        workspace_inputs.check_seen(root, workspace.folder)
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
    top = Paths(root).home / FOLDER / name
    inside = root.resolve().relative_to(Path(git.output(root, "rev-parse", "--show-toplevel")).resolve())
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
        git.output(workspace.root, "worktree", "add", "--quiet", "--detach", str(workspace.top), revision)
    (workspace.folder / "params.yaml").write_text(params, encoding="utf-8")
    if workspace.like is not None:
        known = git.files(workspace.root, workspace.like[0], "")
        left = [p for p in known if p.startswith(GIT_HELD) or Path(p).name in (LOCK, ".gitignore")]
        git.output(workspace.folder, "restore", "--source", workspace.like[0], "--worktree", "--", *left)
    _configure(workspace.root, workspace.folder)
    dvc_cli.run(workspace.folder, "checkout", "--quiet", "--force", "--allow-missing")


def remove(root: Path, name: str) -> None:
    """Take a workspace away by name, and what git knows of it."""
    with _worktrees(root):
        _remove(root, name)


def remove_left(root: Path) -> list[str]:
    """Take away all workspaces whose process, one of this machine, has vanished; their names."""
    own = f"@{platform.node()}.lock"
    with _worktrees(root):
        names = [path.name.removesuffix(own) for path in sorted((Paths(root).home / FOLDER).glob(f"*{own}"))]
        left = [name for name in names if not _is_held(root, name)]
        _remove(root, *left)
    return left


def _remove(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(Paths(root).home / FOLDER / name, ignore_errors=True)
        for lock in (Paths(root).home / FOLDER).glob(f"{name}@*.lock"):
            lock.unlink(missing_ok=True)
    git.output(root, "worktree", "prune")  # what was tidied up by hand, too


def _is_held(root: Path, name: str) -> bool:
    try:
        with _lock(root, name).acquire(timeout=0):
            return False
    except Timeout:
        return True


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
            own["cache"]["dir"] = str(dvc_cli.cache(root))
    except DvcConfigError as error:
        raise UserError(f"DVC's settings (.dvc/config, .dvc/config.local) cannot be used: {error}") from None


def _worktrees(root: Path) -> FileLock:
    """Two runs that begin at once must not list and make worktrees at the same time."""
    Paths(root).home.mkdir(exist_ok=True)
    return FileLock(Paths(root).home / "worktrees.lock")


def _lock(root: Path, name: str) -> FileLock:
    """Held by the process that works in the workspace; changed hands only under `_worktrees`."""
    (Paths(root).home / FOLDER).mkdir(parents=True, exist_ok=True)
    return FileLock(Paths(root).home / FOLDER / f"{name}@{platform.node()}.lock", thread_local=False)


def _given(variable: str) -> list[str]:
    return [os.environ[variable]] if os.environ.get(variable) else []

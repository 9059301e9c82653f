"""Workspaces of isolated runs: git worktrees of the project that share its DVC cache. No torch here.

    .rlhf/workspaces/NAME            in the main checkout; removed at the end of the run
    .rlhf/workspaces/NAME@HOST.lock  locked by the process that uses it: a free lock of this machine belongs
                                     to a dead process; shared disks do not always share locks

A workspace holds one commit, the parameters of the run, and the present data at `data.path` and of the sets
of `data.mix`, which need not be in git. A run never writes to the user's working tree. Its result is a DVC
experiment, which `dvc exp show` lists and `dvc exp apply` restores.

If the commit has an experiment with the same parameters, a workspace starts from its files. DVC still checks
them, in a second instead of ten for restoring stage by stage.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_tasks.config import Config, in_force
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, git, hashing, inputs
from rlhf_tasks.project.dvc_files import KEPT_BY_GIT
from rlhf_tasks.project.paths import Paths

LOCK = "dvc.lock"


@dataclass(frozen=True)
class Workspace:
    """A worktree at `top`, in which the project's folder is `folder`."""

    root: Path
    top: Path
    folder: Path
    lock: FileLock
    like: tuple[str, str] | None = None
    """Commit and name of the experiment that it started from."""

    def environment(self) -> dict[str, str]:
        """Variables that make the stages run the code of this commit instead of the main checkout's."""
        path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        has_code = (self.folder / "rlhf_tasks").is_dir()
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *path])} if has_code else {}

    def save(self, name: str, instead: str) -> tuple[str, str]:
        """Save the workspace as a DVC experiment; returns its name and commit.

        The name is `instead` if another result of the same commit has this one.
        """
        outs = [out for node in dvc_files.graph(self.folder).values() for out in node.outs]
        held = [out for out in outs if out.startswith(KEPT_BY_GIT) and (self.folder / out).exists()]
        # Metrics and curves belong to git but are new in a first run.
        options = [word for out in held for word in ("--include-untracked", out)]
        # DVC writes to refs/exps/exec meanwhile, which all worktrees share.
        with FileLock(Paths(self.root).home / "exp.lock"):
            known = git.experiments(self.root, git.commit(self.folder) or "")
            taken = next((commit for commit, other in known if other == name), None)
            if taken and not self._has_lock_of(taken):
                name = instead
            refs = git.output(
                self.root, "for-each-ref", "--format=%(refname) %(objectname)", "refs/exps/exec"
            )
            dvc_cli.run(self.folder, "exp", "save", "--force", "--name", name, *options)
            for line in refs.splitlines():  # DVC removes those of a `dvc exp run` of the user's, too
                git.output(self.root, "update-ref", *line.split())
        return name, git.find_experiment(self.root, name) or ""

    def is_like(self) -> bool:
        """Whether dvc.lock is still that of the experiment that it started from."""
        return self.like is not None and self._has_lock_of(self.like[0])

    def _has_lock_of(self, commit: str) -> bool:
        return git.show(self.root, commit, LOCK) == (self.folder / LOCK).read_text("utf-8")

    def remove(self) -> None:
        """Remove the workspace and all in it; nothing happens if it does not exist."""
        remove(self.root, self.top.name)
        self.lock.release()


def create(root: Path, name: str, params: str, settings: Config, revision: str = "HEAD") -> Workspace:
    """A workspace of a commit, with these parameters and the present data.

    Workspaces of dead processes are removed first, one of the same name too.

    Raises:
        UserError: if the project is in no git repository or has no commit, if a path of data is relative and
            outside of the project, for inputs that cannot be copied, or for a function that is neither in
            the commit nor in a package of pyproject.toml.
    """
    git.check_commit(root)
    check_data(settings)
    workspace = replace(_claim(root, name), like=git.experiment_with(root, revision, params))
    try:
        _populate(workspace, params, revision)
        for key, path in data_paths(settings).items():
            _bring_data(key, path, root, workspace.folder)
        _check_seen(root, workspace.folder, settings)
        inputs.check_committed(workspace.folder, settings)
    except BaseException:
        workspace.remove()
        raise
    return workspace


def _claim(root: Path, name: str) -> Workspace:
    """A locked workspace of this name, still empty; workspaces of dead processes are removed first."""
    remove_left(root)
    top = _all(root) / name
    inside = root.resolve().relative_to(Path(git.output(root, "rev-parse", "--show-toplevel")).resolve())
    workspace = Workspace(root, top, top / inside, _lock(root, name))
    with _worktrees(root):
        if _is_held(root, name):
            raise UserError(f"another process uses the workspace {name}; wait for its end")
        _remove(root, name)
        workspace.lock.acquire(timeout=0)
    return workspace


def _populate(workspace: Workspace, params: str, revision: str) -> None:
    """Write the files of a commit, parameters, DVC's settings, and the outs in the cache."""
    with _worktrees(workspace.root):
        add = ("worktree", "add", "--force", "--quiet", "--detach")  # where the user removed its folder, too
        git.output(workspace.root, *add, str(workspace.top), revision)
    (workspace.folder / "params.yaml").write_text(params, encoding="utf-8")
    if workspace.like is not None:
        known = git.files(workspace.root, workspace.like[0], "")
        left = [p for p in known if p.startswith(KEPT_BY_GIT) or Path(p).name in (LOCK, ".gitignore")]
        git.output(workspace.folder, "restore", "--source", workspace.like[0], "--worktree", "--", *left)
    _configure(workspace.root, workspace.folder)
    dvc_cli.run(workspace.folder, "checkout", "--quiet", "--force", "--allow-missing")
    dvc_files.forget_lost(workspace.folder)  # the commit's dvc.lock may be of another machine's run


def remove(root: Path, name: str) -> None:
    """Remove a workspace by name, also from git's list of worktrees."""
    with _worktrees(root):
        _remove(root, name)


def remove_left(root: Path) -> list[str]:
    """Remove all workspaces of dead processes of this machine; returns their names."""
    suffix = f"@{platform.node()}.lock"
    with _worktrees(root):
        names = [path.name.removesuffix(suffix) for path in sorted(_all(root).glob(f"*{suffix}"))]
        left = [name for name in names if not _is_held(root, name)]
        _remove(root, *left)
    return left


def _remove(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(_all(root) / name, ignore_errors=True)
        # not `prune`: it forgets the worktrees of a disk that is not mounted, or of a container, too
        git.quiet_output(root, "worktree", "remove", "--force", str(_all(root) / name))
        for lock in _all(root).glob(f"{name}@*.lock"):
            lock.unlink(missing_ok=True)


def _is_held(root: Path, name: str) -> bool:
    try:
        with _lock(root, name).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _configure(root: Path, folder: Path) -> None:
    """Write DVC's settings: those of the commit and of the user, and the shared cache.

    Relative paths in them, as of a remote in `../store`, become absolute.
    """
    from dvc.config_schema import RelPath

    there = dvc_cli.place(root)
    here = Path(os.path.normpath(folder.resolve() / os.path.relpath(there, root.resolve())))
    if not here.is_dir():  # DVC would search the parent folders, and find the main checkout's
        raise UserError(f"{there} is not committed; `git add {there}` and commit it")
    if (there / "config.local").exists():  # the remotes' secrets
        shutil.copy(there / "config.local", here)
    config = dvc_cli.config(folder)
    with config.edit("local") as local:
        for level in ("repo", "local"):
            for name, remote in config.load_one(level)["remote"].items():
                for key, value in remote.items():
                    if isinstance(value, RelPath):
                        path = os.path.normpath(there / os.path.relpath(value, here))
                        local["remote"].setdefault(name, {})[key] = path
        local["cache"]["dir"] = str(dvc_cli.cache(root))


def _worktrees(root: Path) -> FileLock:
    """The lock of git's worktrees: two runs must not list and create them at the same time."""
    return FileLock(Paths(root).home / "worktrees.lock")


def _lock(root: Path, name: str) -> FileLock:
    """The lock of the process that uses a workspace; acquired only while `_worktrees` is locked."""
    return FileLock(_all(root) / f"{name}@{platform.node()}.lock", thread_local=False)


def _all(root: Path) -> Path:
    """The folder of all workspaces."""
    return Paths(root).home / "workspaces"


# ------------------------------------------------------------------------------ its data and other inputs


def data_paths(settings: Config) -> dict[str, str]:
    """The files and folders that a workspace has as they are now, by the parameter that names them."""
    sets = {f"data.mix.{number}.path": one.path for number, one in enumerate(settings.data.mix or ())}
    return {"data.path": settings.data.path, **{key: path for key, path in sets.items() if path}}


def check_data(settings: Config) -> None:
    """Check that no data would be copied to a path outside of the workspace."""
    for key, path in data_paths(settings).items():
        if not Path(path).is_absolute() and ".." in Path(path).parts:
            raise UserError(
                f"{key}={path!r} leads out of the project's folder, where an isolated run cannot copy it; "
                "give an absolute path"
            )


def _bring_data(key: str, path: str, root: Path, folder: Path) -> None:
    """Copy the present data, which may be outside git or newer than the commit.

    Links to files are followed, because relative links would have another target in the workspace.
    """
    source, target = root / path, folder / path
    if Path(path).is_absolute() or not source.exists():
        return
    if lost := [path.relative_to(source).as_posix() for path in data_files(source) if not path.is_file()]:
        raise UserError(f"{key}={path!r} has {', '.join(lost)}: broken links or special files; remove them")
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
    for file in data_files(source):
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), copied)  # stages only read it
        except OSError:
            shutil.copy2(file, copied)  # the disk allows no hard links


def _check_seen(root: Path, folder: Path, settings: Config) -> None:
    """Check that the workspace has all inputs of the stages that the main checkout has.

    They are the deps of dvc.yaml, the files and folders that the parameters name, and the files of functions.
    """
    graph = dvc_files.graph(folder)
    outs = [out for node in graph.values() for out in node.outs]
    values = in_force(settings)
    named = [path for _, path in inputs.files_named(values)]
    named += [inputs.module_path(function) for _, function in inputs.functions_named(values)]
    deps = dict.fromkeys([*(dep for node in graph.values() for dep in node.deps), *named])
    sources = [dep for dep in deps if not Path(dep).is_absolute() and not dvc_files.is_in(dep, outs)]
    lost = [dep for dep in sources if os.path.lexists(root / dep) and not (folder / dep).exists()]
    if lost:
        raise UserError(
            f"an isolated run cannot see {', '.join(lost)}: it sees only files in git, in the DVC cache and "
            "of data; commit them, and make links to targets outside of the repository absolute"
        )


def data_files(folder: Path) -> Iterator[Path]:
    """All files below a folder, without those behind links to folders: prepare and DVC do not read them.

    For a file it is the file.
    """
    if folder.is_file():
        yield folder
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in hashing.NOT_DATA]
        yield from (Path(at, name) for name in names)


def unseen(root: Path, settings: Config) -> list[str]:
    """Files of the working tree that differ from the commit, which an isolated run does not see.

    Files that runs write are left out, and the data, which is copied.
    """
    data = [f":!{path}" for path in data_paths(settings).values() if not Path(path).is_absolute()]
    return git.list_changes(root, *git.WRITTEN_BY_RUNS, *data)

"""The inputs of an isolated run: the present data, and the files that the run cannot see. No torch here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf_tasks.config import Config, flatten
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, git, inputs

NO_DATA = ("__pycache__",)  # folders below the data that do not belong to it


def check_data(path: str) -> None:
    """Check that the data would not be copied to a path outside of the workspace.

    Raises:
        UserError: for a relative path that leads out of the project's folder.
    """
    if not Path(path).is_absolute() and ".." in Path(path).parts:
        raise UserError(
            f"data.path={path!r} leads out of the project's folder, where an isolated run cannot copy it; "
            "give an absolute path"
        )


def bring(path: str, root: Path, folder: Path) -> None:
    """Copy the present data, which may be outside git or newer than the commit.

    Links are followed, because relative links would have another target in the workspace.

    Raises:
        UserError: naming files that cannot be copied.
    """
    source, target = root / path, folder / path
    if Path(path).is_absolute() or not source.exists():
        return
    if lost := _not_copyable(source):
        raise UserError(
            f"data.path={path!r} has {', '.join(lost)}: broken links, links to a parent folder, or special "
            "files; remove them"
        )
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns(*NO_DATA)
        shutil.copytree(source, target, copy_function=_link, ignore=ignore)
    else:
        _link(str(source), str(target))


def _link(source: str, target: str) -> None:
    """Create a hard link, or a copy where the disk allows none; stages only read it."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def check_seen(root: Path, folder: Path, settings: Config) -> None:
    """Check that the workspace has all inputs of the stages that the main checkout has.

    They are the deps of dvc.yaml, and the files, folders and functions' modules that the parameters name.

    Raises:
        UserError: naming the missing ones.
    """
    graph = dvc_files.graph(folder)
    made = [out for node in graph.values() for out in node.outs]
    values = flatten(settings.model_dump(mode="json", by_alias=True))
    named = [path for _, path in inputs.files_named(values)]
    named += [inputs.module_path(function) for _, function in inputs.functions_named(values)]
    deps = dict.fromkeys([*(dep for node in graph.values() for dep in node.deps), *named])
    given = [dep for dep in deps if not Path(dep).is_absolute() and not dvc_files.is_in(dep, made)]
    lost = [dep for dep in given if os.path.lexists(root / dep) and not (folder / dep).exists()]
    lost += [f"{dep}/{name}" for dep in given for name in _not_copyable(folder / dep)]
    if lost:
        raise UserError(
            f"an isolated run cannot see {', '.join(lost)}: it sees only files in git, in the DVC cache and "
            "at data.path; commit them, and make links to targets outside of the repository absolute"
        )


def _not_copyable(folder: Path) -> list[str]:
    """Paths below a folder that cannot be copied: broken links, links to a parent folder, special files."""
    return [path.relative_to(folder).as_posix() for path in files(folder) if not path.is_file()]


def files(folder: Path) -> Iterator[Path]:
    """All files below a folder that are copied, links followed, and the links to a parent folder."""
    for at, folders, names in os.walk(folder, followlinks=True):
        up = [Path(at).resolve(), *Path(at).resolve().parents]
        back = [name for name in folders if Path(at, name).is_symlink() and Path(at, name).resolve() in up]
        folders[:] = [name for name in folders if name not in (*back, *NO_DATA)]
        yield from (Path(at, name) for name in (*back, *names))


def unseen(root: Path, data: str) -> list[str]:
    """Files of the working tree that differ from the commit, which an isolated run does not see.

    Files that runs write are left out, and the data at this path, which is copied.
    """
    given = [] if Path(data).is_absolute() else [f":!{data}"]
    return git.changed(root, *git.WRITTEN_BY_RUNS, *given)

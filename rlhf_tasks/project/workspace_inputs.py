"""What an isolated run sees beside its commit: the data of now; and what it cannot see. No torch here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, git

UNBROUGHT = ("__pycache__",)  # folders below the data that are none of it


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


def bring(path: str, root: Path, folder: Path) -> None:
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


def check_seen(root: Path, folder: Path) -> None:
    """Raises UserError naming the stages' inputs that the main checkout has and the workspace cannot see."""
    graph = dvc_files.graph(folder)
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


def _uncarried(folder: Path) -> list[str]:
    """What below a folder no copy can hold: links that lead nowhere or back up, pipes, sockets."""
    return [path.relative_to(folder).as_posix() for path in files(folder) if not path.is_file()]


def files(folder: Path) -> Iterator[Path]:
    """All below a folder that is brought to a workspace, links followed; folders only that link back up."""
    for at, folders, names in os.walk(folder, followlinks=True):
        up = [Path(at).resolve(), *Path(at).resolve().parents]
        back = [name for name in folders if Path(at, name).is_symlink() and Path(at, name).resolve() in up]
        folders[:] = [name for name in folders if name not in (*back, *UNBROUGHT)]
        yield from (Path(at, name) for name in (*back, *names))


def unseen(root: Path, data: str) -> list[str]:
    """Files of the working tree that differ from the commit: an isolated run does not see these changes.

    Left aside: what runs write themselves, and the data at this path, which is seen as it is now.
    """
    given = [] if Path(data).is_absolute() else [f":!{data}"]
    return git.changed(root, *git.WRITTEN_BY_RUNS, *given)

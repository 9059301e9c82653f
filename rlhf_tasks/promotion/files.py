"""The files that judges and probes of `judge` read: those of the working tree, whosever policy is judged.

Prompts, texts, questions, models by their folder, and the modules of functions. What the pipeline itself
makes (models/reward_heldout) is none of them: that belongs to the run that is judged. No torch here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.config import Config, Judging
from rlhf_tasks.evaluation.judges import prompts
from rlhf_tasks.evaluation.probes import ENGLISH
from rlhf_tasks.project import dvc_files, hashing


def taken_from(root: Path, settings: Config, made: Collection[str]) -> Config:
    """The same, its judges' files named so that they are those below `root` from any working folder.

    From now on modules of functions are looked for there before they are in the working folder.
    `made`: outs of the pipeline, which stay those of the working folder.
    """
    judge = settings.judge.model_dump(mode="json")
    for section, key in _named(judge, made):
        section[key] = str(root / section[key])
    first = sys.path.index("") if "" in sys.path else len(sys.path)  # "" is the working folder
    if str(root) not in sys.path[:first]:
        sys.path.insert(first, str(root))
    return settings.model_copy(update={"judge": Judging.model_validate(judge)})


def changed(root: Path, here: Path) -> list[str]:
    """Files that are others below `here` than those by which the pipeline's judge stage in `root` judged.

    What it judged by is told by dvc.lock; of a file that is no dep of the stage, nor in a folder that is one,
    by the file in `root`: where that is `here`, nothing can tell.
    """
    judge = dvc_files.parameters(root)["judge"]
    made = [out for node in dvc_files.graph(root).values() for out in node.outs]
    paths = [section[key] for section, key in _named(judge, made)]
    paths += [path for path in _modules(judge) if (root / path).exists() or (here / path).exists()]
    locked = dvc_files.locked_by(root, "judge")
    held = {path: _dep_of(path, locked) for path in paths}
    then = {path: locked.get(dep, _digest(root / path)) for path, dep in held.items()}
    return [path for path, md5 in then.items() if md5 != _digest(here / held[path])]


def _dep_of(path: str, locked: Collection[str]) -> str:
    """What stands in dvc.lock for it: itself, or the folder that it is in; itself, too, if nothing does."""
    own = Path(path)
    return next((dep for one in (own, *own.parents) if (dep := one.as_posix()) in locked), own.as_posix())


def _named(judge: Mapping[str, Any], made: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where in the section a file is named: the part that has it, and the key."""
    for one in judge["judges"]:
        is_folder = "path" in one and one.get("revision") is None
        if is_folder and not any(Path(one["path"]).is_relative_to(out) for out in made):
            yield one, "path"
        if "prompt" in one and one["prompt"] not in prompts.shipped():
            yield one, "prompt"
    retention = judge["retention"] or {}
    for key in ("general", "questions"):
        if retention.get(key) not in (None, ENGLISH):
            yield retention, key


def _modules(judge: Mapping[str, Any]) -> Iterator[str]:
    """The files in which the functions may be; an installed module is in none of them."""
    for one in judge["judges"]:
        if "function" in one:
            module = one["function"].partition(":")[0].replace(".", "/")
            yield from (f"{module}.py", f"{module}/__init__.py")


def _digest(path: Path) -> str | None:
    return hashing.dvc_md5(path) if path.exists() else None

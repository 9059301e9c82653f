"""The files that the judges and the retention tests of `judge` read. No torch here.

These are prompts, texts, questions, tasks, model folders, and the modules of functions. They are read from
the project's main checkout (`local`), whichever run is judged. Outs of the pipeline (models/reward_heldout)
are the exception: they belong to the run that is judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.config import Config, Judging
from rlhf_tasks.evaluation.judges import prompt_templates
from rlhf_tasks.evaluation.probe_texts import ENGLISH
from rlhf_tasks.project import dvc_files, hashing


def with_local_paths(settings: Config, run: Path, local: Path) -> Config:
    """The config with absolute paths to the judges' files in `local`; outs of the pipeline stay relative."""
    if run == local:
        return settings
    judge = settings.judge.model_dump(mode="json")
    for section, key in _paths(judge, _outs(run)):
        section[key] = str(local.resolve() / section[key])
    return settings.model_copy(update={"judge": Judging.model_validate(judge)})


def changed(run: Path, local: Path) -> list[str]:
    """Files below `local` that differ from those that the judge stage used in `run`.

    dvc.lock has the hashes of what the stage read. A file that is neither a dep of the stage nor in a folder
    that is one is compared with the file in `run`; if `run` is `local`, such a change stays unknown.
    """
    judge = dvc_files.parameters(run)["judge"]
    paths = [section[key] for section, key in _paths(judge, _outs(run))]
    paths += [path for path in _modules(judge) if (run / path).exists() or (local / path).exists()]
    locked = dvc_files.locked_by(run, "judge")
    deps = {path: _dep_of(path, locked) for path in paths}
    used = {path: locked.get(dep, _digest(run / path)) for path, dep in deps.items()}
    return [path for path, md5 in used.items() if md5 != _digest(local / deps[path])]


def _outs(root: Path) -> list[str]:
    return [out for node in dvc_files.graph(root).values() for out in node.outs]


def _dep_of(path: str, locked: Collection[str]) -> str:
    """The path in dvc.lock that covers a file: its own, or that of a folder above; else its own."""
    own = Path(path)
    return next((dep for one in (own, *own.parents) if (dep := one.as_posix()) in locked), own.as_posix())


def _paths(judge: Mapping[str, Any], outs: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place of the section that names a file or folder of the user: its part, and the key in it."""
    for one in judge["judges"]:
        is_folder = "path" in one and one.get("revision") is None
        if is_folder and not any(Path(one["path"]).is_relative_to(out) for out in outs):
            yield one, "path"
        if "prompt" in one and one["prompt"] not in prompt_templates.shipped():
            yield one, "prompt"
    retention = judge["retention"] or {}
    for key in ("general", "questions"):
        if retention.get(key) not in (None, ENGLISH):
            yield retention, key
    tasks = retention.get("tasks") or {}
    if tasks.get("folder") is not None:
        yield tasks, "folder"


def _modules(judge: Mapping[str, Any]) -> Iterator[str]:
    """The files that may define the judges' functions. An installed module is in none of them."""
    for one in judge["judges"]:
        if "function" in one:
            module = one["function"].partition(":")[0].replace(".", "/")
            yield from (f"{module}.py", f"{module}/__init__.py")


def _digest(path: Path) -> str | None:
    return hashing.dvc_md5(path) if path.exists() else None

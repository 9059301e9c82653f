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
from rlhf_tasks.config.judge import ENGLISH
from rlhf_tasks.judging.judges.comparisons import shipped_prompts
from rlhf_tasks.project import dvc_files, hashing, inputs


def with_local_paths(settings: Config, run: Path, local: Path) -> Config:
    """The config with absolute paths to the judges' files in `local`; outs of the pipeline stay relative."""
    if run == local:
        return settings
    judge = settings.judge.model_dump(mode="json")
    for section, key in _paths(judge, _outs(run)):
        section[key] = str(local.resolve() / section[key])
    return settings.model_copy(update={"judge": Judging.model_validate(judge)})


def changed(run: Path, local: Path) -> list[str]:
    """Files below `local` that differ from those that stage judge used in `run`, by its inputs file."""
    files = inputs.used(run, "judge").files
    return [path for path, md5 in files.items() if md5 != _digest(local / path)]


def _outs(root: Path) -> list[str]:
    return [out for node in dvc_files.graph(root).values() for out in node.outs]


def _paths(judge: Mapping[str, Any], outs: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place of the section that names a file or folder of the user: its part, and the key in it."""
    for one in judge["judges"]:
        is_folder = "path" in one and one.get("revision") is None
        if is_folder and not any(Path(one["path"]).is_relative_to(out) for out in outs):
            yield one, "path"
        if "prompt" in one and one["prompt"] not in shipped_prompts():
            yield one, "prompt"
    retention = judge["retention"] or {}
    for key in ("general", "questions"):
        if retention.get(key) not in (None, ENGLISH):
            yield retention, key
    tasks = retention.get("tasks") or {}
    if tasks.get("folder") is not None:
        yield tasks, "folder"


def _digest(path: Path) -> str | None:
    return hashing.dvc_md5(path) if path.exists() else None

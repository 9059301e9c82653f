"""Reads dvc.yaml, dvc.lock and params.yaml: stages, their inputs and outs, recorded hashes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_tasks.config import flatten, parse, read_text
from rlhf_tasks.errors import UserError

INSTALLED = Path(__file__).parents[2]  # the folder of the code that runs
INPUTS = "inputs"
"""The first stage, which writes inputs/STAGE.json, and its folder."""
KEPT_BY_GIT = ("metrics/", "plots/")  # outs in git instead of DVC's cache


@dataclass(frozen=True)
class Node:
    """One stage of dvc.yaml; paths are relative to the project's folder, in the order of declaration."""

    cmd: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The deps that are data and not code; with inputs/STAGE.json."""
        return tuple(path for path in self.deps if not is_code(path))


def is_code(dep: str) -> bool:
    """Whether a dep is code: of this project, or another Python file."""
    return Path(dep).is_relative_to("rlhf_tasks") or dep.endswith(".py")


def is_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of these, or below one of them."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def graph(root: Path) -> dict[str, Node]:
    """The stages of dvc.yaml in their order; texts such as `${data.path}` are filled from params.yaml.

    Raises:
        UserError: without a dvc.yaml, or if it or params.yaml cannot be read.
    """
    params = root / "params.yaml"
    return graph_in(read_text(root / "dvc.yaml"), read_text(params) if params.exists() else "{}")


def graph_in(text: str, params: str) -> dict[str, Node]:
    """The stages in the text of a dvc.yaml, filled from the text of a params.yaml."""
    tree, values = _parse(text, "dvc.yaml"), flatten(_parse(params, "params.yaml"))
    if not isinstance(tree.get("stages"), Mapping):
        raise UserError("dvc.yaml has no `stages`; give one or more")
    return {
        name: Node(
            cmd=str(stage.get("cmd", "")),
            deps=tuple(_fill(path, values) for path in _paths(stage.get("deps") or [])),
            outs=tuple(
                _fill(path, values)
                for kind in ("outs", "metrics", "plots")
                for path in _paths(stage.get(kind) or [])
            ),
        )
        for name, stage in tree["stages"].items()
    }


def descriptions(root: Path) -> dict[str, str]:
    """What each stage does, by its `desc` in dvc.yaml: the project's, or else the shipped one."""
    file = next((file for file in (root / "dvc.yaml", INSTALLED / "dvc.yaml") if file.exists()), None)
    try:  # every command asks; the parser in C is of YAML 1.1, in which texts are the same
        tree = {} if file is None else YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        return {name: str(stage.get("desc", "")) for name, stage in (tree.get("stages") or {}).items()}
    except (YAMLError, ValueError, AttributeError):
        return {}  # who runs a stage is told


@functools.lru_cache(maxsize=32)
def _parse(text: str, origin: str) -> Mapping[str, Any]:
    """`parse`, cached by text because it takes 0.1 s. The tree must not leave this module."""
    return parse(text, origin)


def _paths(entries: list[Any]) -> list[str]:
    return [next(iter(entry)) if isinstance(entry, Mapping) else entry for entry in entries]


def _fill(path: str, values: Mapping[str, Any]) -> str:
    names = re.findall(r"\$\{([\w.]+)\}", path)
    if unknown := [name for name in names if name not in values]:
        raise UserError(f"{path!r} in dvc.yaml needs {', '.join(unknown)}, which params.yaml does not have")
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(values[match[1]]), path)


def locked(root: Path) -> dict[str, str]:
    """`{path: md5}` of all outs and deps in dvc.lock; empty without one."""
    return locked_in(_lock(root))


def locked_by(root: Path, stage: str) -> dict[str, str]:
    """`{path: md5}` of the deps and outs of one stage in dvc.lock; empty if it is not there."""
    read, written = read_and_written(_lock(root)).get(stage, ({}, {}))
    return read | written


def locked_in(text: str) -> dict[str, str]:
    """`{path: md5}` in the text of a dvc.lock: outs as their stage wrote them, inputs as they were read.

    Another stage may have read an older version of an out.
    """
    both = read_and_written(text).values()
    inputs = {path: md5 for read, _ in both for path, md5 in read.items()}
    return inputs | {path: md5 for _, written in both for path, md5 in written.items()}


def read_and_written(text: str) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """For each stage in the text of a dvc.lock, `{path: md5}` of its deps and of its outs."""

    def hashes(entries: list[dict[str, str]]) -> dict[str, str]:
        return {entry["path"]: entry["md5"] for entry in entries if "md5" in entry}

    stages = _parse(text, "dvc.lock").get("stages") or {}
    return {name: (hashes(it.get("deps", [])), hashes(it.get("outs", []))) for name, it in stages.items()}


def forget_lost(root: Path) -> None:
    """Drop the stages from dvc.lock whose outs are not here. Only for these DVC asks its run cache."""
    file, written = root / "dvc.lock", read_and_written(_lock(root))
    lost = [name for name, (_, outs) in written.items() if not all((root / out).exists() for out in outs)]
    if lost:
        yaml = YAML()
        tree = yaml.load(file)
        for name in lost:
            del tree["stages"][name]
        yaml.dump(tree, file)


def _lock(root: Path) -> str:
    file = root / "dvc.lock"
    return read_text(file) if file.exists() else "{}"

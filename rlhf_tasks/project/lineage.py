"""Which inputs, code and run a stage's outs came from. No torch here.

`models/lineage/STAGE.json` is a DVC out of its own. No other out holds run keys or commits, so that a
checkpoint's bytes depend on nothing but its inputs. Hashes are DVC's own (md5, folders as `….dir`), of
the bytes on disk: `dvc.lock` may be older than what a stage really reads.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_tasks.config import Stage
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.project import atomic, dvc_files, git, hashing, inputs
from rlhf_tasks.project.paths import Paths


@functools.lru_cache(maxsize=16)
def input_hashes(paths: Paths, stage: str) -> Mapping[str, str]:
    """`{path: md5}` of the data that the stage reads; empty outside a project (without a dvc.yaml).

    It is the data among its deps, and the files that inputs/STAGE.json records, code of functions too.

    They are read once per `paths`: inputs do not change while a stage runs, and may be many gigabytes.
    """
    node = _node(paths, stage)
    record = inputs.recorded(paths, stage)
    own = paths.relative(paths.inputs(stage))
    read = [path for path in node.inputs if path != own] if node is not None else []
    hashes = {path: hashing.dvc_md5(paths.root / path) for path in read if (paths.root / path).exists()}
    return MappingProxyType(hashes | (dict(record.files) if record is not None else {}))


def identity(paths: Paths, stage: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """All that decides what a stage writes, by name; None outside a project.

    The command, the declared parameters, what they name, and the md5 of every dep, code included: the
    project's own if it holds the code, else the installed package's.
    """
    node = _node(paths, stage)
    if node is None:
        return None
    places = {
        path: next(filter(Path.exists, (paths.root / path, dvc_files.INSTALLED / path)), None)
        for path in filter(dvc_files.is_code, node.deps)
    }
    hashes = {path: hashing.dvc_md5(place) for path, place in places.items() if place is not None}
    named = inputs.recorded(paths, stage) or inputs.collect(paths, stage, parameters)
    return {"cmd": node.cmd, **named.flat(), **parameters, **input_hashes(paths, stage), **hashes}


def _node(paths: Paths, stage: str) -> dvc_files.Node | None:
    """The stage in dvc.yaml; None without one."""
    return dvc_files.graph(paths.root).get(stage) if paths.dvc_yaml.exists() else None


def new_key(stage: str) -> str:
    """A unique name for one run of one stage."""
    return f"{stage}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def write(paths: Paths, stage: Stage, key: str) -> Path:
    """models/lineage/STAGE.json: the run's key (tag `rlhf.run` in MLflow), input hashes, git commit.

    With the packages and the precision in force, where inputs/STAGE.json records them.
    """
    path, record = paths.lineage(stage), inputs.recorded(paths, stage)
    outside: dict[str, Any] = {}
    if record is not None:
        outside["packages"] = record.packages
        outside |= {PRECISION: record.values[PRECISION]} if PRECISION in record.values else {}
    tree = {
        "rlhf.run": key,
        "inputs": dict(input_hashes(paths, stage)),
        **outside,
        "git.rev": git.commit(paths.root),
        "git.dirty": git.is_dirty(paths.root),
    }
    atomic.write_json(path, tree)
    return path

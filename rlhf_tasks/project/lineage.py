"""Which inputs, code and run a stage's outs came from. No torch here.

`models/lineage/STAGE.json` is a DVC out of its own. No other out holds run keys or commits, so that a
checkpoint's bytes depend on nothing but its inputs. Hashes are DVC's own (md5, folders as `….dir`), of
the bytes on disk: `dvc.lock` may be older than what a stage really reads.
"""

from __future__ import annotations

import functools
import resource
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_tasks.config import Stage
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.project import atomic, dvc_files, git, hashing, inputs
from rlhf_tasks.project.inputs import Fingerprint
from rlhf_tasks.project.paths import Paths


def fingerprint(paths: Paths, stage: str, values: Mapping[str, Any] | None = None) -> Fingerprint:
    """All that decides what a stage writes; empty outside a project.

    What inputs/STAGE.json records, or, without the file, what these parameters name; the command, and the md5
    of every dep, code included: the project's own if it holds the code, else the installed package's.
    """
    node = dvc_files.graph(paths.root).get(stage) if paths.dvc_yaml.exists() else None
    if node is None:
        return Fingerprint()
    if (record := inputs.read_record(paths, stage)) is None:
        record = inputs.collect(paths, stage, values) if values else Fingerprint()
    places = {
        path: next(filter(Path.exists, (paths.root / path, dvc_files.INSTALLED / path)), None)
        for path in filter(dvc_files.is_code, node.deps)
    }
    code = {path: hashing.dvc_md5(place) for path, place in places.items() if place is not None}
    deps = {inputs.COMMAND: node.cmd, **_data_hashes(paths, stage), **code}
    return replace(record, values={**record.values, **(values or {})}, deps=deps)


@functools.lru_cache(maxsize=16)
def _data_hashes(paths: Paths, stage: str) -> Mapping[str, str]:
    """`{path: md5}` of the data among the deps of a stage.

    They are read once per `paths`: inputs do not change while a stage runs, and may be many gigabytes.
    """
    places = {path: paths.root / path for path in dvc_files.graph(paths.root)[stage].inputs}
    places.pop(paths.relative(paths.inputs(stage)), None)
    return {path: hashing.dvc_md5(place) for path, place in places.items() if place.exists()}


def new_key(stage: str) -> str:
    """A unique name for one run of one stage."""
    return f"{stage}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def peak_memory() -> float:
    """GB that this process has had at most: of its GPU where it used one, else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated() / 1e9)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def write(paths: Paths, stage: Stage, key: str, seconds: float) -> Path:
    """models/lineage/STAGE.json: the run's key (MLflow's tag `rlhf.run`), its cost, input hashes, git commit.

    With the packages and the precision in force, where inputs/STAGE.json records them.
    """
    path, read = paths.lineage(stage), fingerprint(paths, stage)
    tree = {
        "rlhf.run": key,
        "seconds": round(seconds, 1),
        "peak_memory_gb": round(peak_memory(), 2),
        "inputs": read.data(),
        "packages": read.packages,
        **{name: read.values[name] for name in [PRECISION] if name in read.values},
        "git.rev": git.commit(paths.root),
        "git.dirty": git.is_dirty(paths.root),
    }
    atomic.write_json(path, tree)
    return path

"""Which inputs, code and run a stage's outs came from. No torch here.

`models/lineage/STAGE.json` is a DVC out of its own: run keys and commits stand there and in no other
out, so that a checkpoint's bytes depend on nothing but its inputs. Hashes are DVC's own (md5, folders
as `….dir`), taken from the bytes on disk: `dvc.lock` may be older than what a stage really reads.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.project import atomic, dvc_files, git, hashing

INSTALLED = Path(__file__).parents[2]  # where the code runs from, wherever the data is


def input_hashes(stage: str) -> dict[str, str]:
    """`{path: md5}` of the stage's data inputs; empty outside a project (no dvc.yaml here)."""
    return dict(_input_hashes(stage, Path.cwd()))


@functools.lru_cache(maxsize=16)
def _input_hashes(stage: str, root: Path) -> tuple[tuple[str, str], ...]:
    """Read once per process: a stage's inputs do not change while it runs, and may be many gigabytes."""
    if not (root / "dvc.yaml").exists():
        return ()
    inputs = dvc_files.graph(root)[stage].inputs if stage in dvc_files.graph(root) else ()
    return tuple((path, hashing.dvc_md5(root / path)) for path in inputs if (root / path).exists())


def identity(stage: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """All that decides what a stage writes, by name; None outside a project.

    The command, the declared parameters, and the md5 of every dep, code too: the project's own if it
    holds the code, else the installed package's.
    """
    if not Path("dvc.yaml").exists() or stage not in dvc_files.graph():
        return None
    node = dvc_files.graph()[stage]
    code = [path for path in node.deps if path not in node.inputs]
    found = {path: path if Path(path).exists() else INSTALLED / path for path in code}
    hashes = {path: hashing.dvc_md5(Path(where)) for path, where in found.items() if Path(where).exists()}
    return {"cmd": node.cmd, **parameters, **input_hashes(stage), **hashes}


def out_hashes(stage: str) -> dict[str, str]:
    """`{path: md5}` of what the stage has written."""
    if not Path("dvc.yaml").exists() or stage not in dvc_files.graph():
        return {}
    return {
        path: hashing.dvc_md5(Path(path)) for path in dvc_files.graph()[stage].outs if Path(path).exists()
    }


def new_key(stage: str) -> str:
    """A name for one run of one stage, unlike any other."""
    return f"{stage}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def write(stage: str, key: str) -> Path:
    """models/lineage/STAGE.json: the run's key (tag `rlhf.run` in MLflow), input hashes, git commit."""
    path = Path("models/lineage") / f"{stage}.json"
    tree = {
        "rlhf.run": key,
        "inputs": input_hashes(stage),
        "git.rev": git.revision(),
        "git.dirty": git.is_dirty(),
    }
    atomic.write_json(path, tree)
    return path

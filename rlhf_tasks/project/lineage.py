"""Which inputs, code and run a stage's outs came from. No torch here.

`models/lineage/STAGE.json` is a DVC out of its own: run keys and commits stand there and in no other
out, so that a checkpoint's bytes depend on nothing but its inputs. Hashes are DVC's own (md5, folders
as `….dir`), taken from the bytes on disk: `dvc.lock` may be older than what a stage really reads.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import secrets
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlhf_tasks.config import UserError, flatten, parse
from rlhf_tasks.project import atomic

CODE = (".py", ".html", ".css", ".js")
PROMPTS = "rlhf_tasks/*.txt"  # texts that code reads; elsewhere a text is data
INSTALLED = Path(__file__).parents[2]  # where the code runs from, wherever the data is
UNTOLD = (":!metrics", ":!plots", ":!dvc.lock")  # what a run itself changes makes no tree dirty


@dataclass(frozen=True)
class Node:
    """One stage of dvc.yaml: paths relative to the project's folder, in the order declared."""

    cmd: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The deps that are data, not code."""
        return tuple(path for path in self.deps if not is_code(path))


def is_code(dep: str) -> bool:
    return dep.endswith(CODE) or fnmatch(dep, PROMPTS)


def graph(root: Path = Path()) -> dict[str, Node]:
    """The stages of dvc.yaml in the order written there; `${data.path}` is filled from params.yaml.

    Raises:
        UserError: without a dvc.yaml, and for one, or a params.yaml, that cannot be read.
    """
    params = root / "params.yaml"
    try:
        text = (root / "dvc.yaml").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("dvc.yaml does not exist here; run from the project's folder") from None
    return graph_in(text, params.read_text(encoding="utf-8") if params.exists() else "{}")


def graph_in(text: str, params: str) -> dict[str, Node]:
    """The same of the texts of a dvc.yaml and a params.yaml."""
    tree, values = _parsed(text, "dvc.yaml"), flatten(_parsed(params, "params.yaml"))
    if not isinstance(tree.get("stages"), Mapping):
        raise UserError("dvc.yaml has no `stages`; a pipeline has one or more there")
    return {
        name: Node(
            cmd=str(stage.get("cmd", "")),
            deps=tuple(_filled(path, values) for path in _paths(stage.get("deps", []))),
            outs=tuple(
                _filled(path, values)
                for kind in ("outs", "metrics", "plots")
                for path in _paths(stage.get(kind, []))
            ),
        )
        for name, stage in tree["stages"].items()
    }


@functools.lru_cache(maxsize=32)
def _parsed(text: str, origin: str) -> Mapping[str, Any]:
    """`parse`, which takes a tenth of a second, once a text. Nothing of the tree leaves this module."""
    return parse(text, origin)


def _paths(entries: list[Any]) -> list[str]:
    return [next(iter(entry)) if isinstance(entry, Mapping) else entry for entry in entries]


def _filled(path: str, values: Mapping[str, Any]) -> str:
    names = re.findall(r"\$\{([\w.]+)\}", path)
    if unknown := [name for name in names if name not in values]:
        raise UserError(f"dvc.yaml's {path!r} takes {', '.join(unknown)} of params.yaml, which has none")
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(values[match[1]]), path)


def parameters(root: Path = Path()) -> dict[str, Any]:
    """params.yaml as it is written, unchecked.

    Raises:
        ConfigError: if it cannot be read.
    """
    return copy.deepcopy(dict(_parsed((root / "params.yaml").read_text(encoding="utf-8"), "params.yaml")))


def locked(root: Path = Path()) -> dict[str, str]:
    """`{path: md5}` of all outs and deps as dvc.lock has them; empty without one."""
    return locked_in(_lock(root))


def locked_by(stage: str, root: Path = Path()) -> dict[str, str]:
    """`{path: md5}` of what one stage read and wrote, as dvc.lock has it; empty where it does not."""
    entry = _entries(_lock(root)).get(stage, {})
    return _hashes(entry, "deps") | _hashes(entry, "outs")


def locked_params(stage: str, root: Path = Path()) -> dict[str, Any]:
    """The parameters that one stage ran with, as dvc.lock has them; empty where it does not."""
    entry = _entries(_lock(root)).get(stage, {})
    return copy.deepcopy(dict(entry.get("params", {}).get("params.yaml", {})))


def locked_in(text: str) -> dict[str, str]:
    """`{path: md5}` of the text of a dvc.lock: outs as their stage left them, others as they were read.

    A stage that has not run again since may have read an older one of an out.
    """
    both = read_and_written(text).values()
    found: dict[str, str] = {}
    for hashes in [*(read for read, _ in both), *(written for _, written in both)]:
        found |= hashes
    return found


def read_and_written(text: str) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Per stage in the text of a dvc.lock, `{path: md5}` of what it read, and of what it wrote."""
    entries = _entries(text).items()
    return {stage: (_hashes(entry, "deps"), _hashes(entry, "outs")) for stage, entry in entries}


def _lock(root: Path) -> str:
    file = root / "dvc.lock"
    return file.read_text(encoding="utf-8") if file.exists() else "{}"


def _entries(lock: str) -> Mapping[str, Mapping[str, Any]]:
    return _parsed(lock, "dvc.lock").get("stages") or {}


def _hashes(entry: Mapping[str, Any], kind: str) -> dict[str, str]:
    return {each["path"]: each["md5"] for each in entry.get(kind, []) if "md5" in each}


def digest(path: Path) -> str:
    """DVC's md5 of a file, or of a folder (with `.dir`): of its sorted list of md5 and relative path.

    As DVC does, it follows a link to a file, and leaves one to a folder out.
    """
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    listing = [
        {"md5": digest(file), "relpath": file.relative_to(path).as_posix()}
        for file in path.rglob("*")
        if file.is_file()
    ]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def input_hashes(stage: str) -> dict[str, str]:
    """`{path: md5}` of the stage's data inputs; empty outside a project (no dvc.yaml here)."""
    return dict(_input_hashes(stage, Path.cwd()))


@functools.lru_cache(maxsize=16)
def _input_hashes(stage: str, root: Path) -> tuple[tuple[str, str], ...]:
    """Read once per process: a stage's inputs do not change while it runs, and may be many gigabytes."""
    if not (root / "dvc.yaml").exists():
        return ()
    inputs = graph(root)[stage].inputs if stage in graph(root) else ()
    return tuple((path, digest(root / path)) for path in inputs if (root / path).exists())


def identity(stage: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """All that decides what a stage writes, by name; None outside a project.

    The command, the declared parameters, and the md5 of every dep, code too: the project's own if it
    holds the code, else the installed package's.
    """
    if not Path("dvc.yaml").exists() or stage not in graph():
        return None
    node = graph()[stage]
    code = [path for path in node.deps if path not in node.inputs]
    found = {path: path if Path(path).exists() else INSTALLED / path for path in code}
    hashes = {path: digest(Path(where)) for path, where in found.items() if Path(where).exists()}
    return {"cmd": node.cmd, **parameters, **input_hashes(stage), **hashes}


def out_hashes(stage: str) -> dict[str, str]:
    """`{path: md5}` of what the stage has written."""
    if not Path("dvc.yaml").exists() or stage not in graph():
        return {}
    return {path: digest(Path(path)) for path in graph()[stage].outs if Path(path).exists()}


def new_key(stage: str) -> str:
    """A name for one run of one stage, unlike any other."""
    return f"{stage}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def write(stage: str, key: str) -> Path:
    """models/lineage/STAGE.json: the run's key (tag `rlhf.run` in MLflow), input hashes, git commit."""
    path = Path("models/lineage") / f"{stage}.json"
    tree = {
        "rlhf.run": key,
        "inputs": input_hashes(stage),
        "git.rev": git_revision(),
        "git.dirty": git_dirty(),
    }
    atomic.write_json(path, tree)
    return path


def git_revision() -> str | None:
    """The commit checked out; None without git or before a first commit."""
    return _git("rev-parse", "--verify", "--quiet", "HEAD") or None


def git_dirty() -> bool:
    """True if tracked or new files differ from the commit, what runs write themselves left aside."""
    return bool(_git("status", "--porcelain", "--", ".", *UNTOLD))


def home() -> Path:
    """Absolute `.rlhf` folder of the main checkout, so that nothing in it dies with a git worktree."""
    common = _git("rev-parse", "--path-format=absolute", "--git-common-dir")
    top = _git("rev-parse", "--show-toplevel")
    if not common or not top or Path(common).name != ".git":
        return Path.cwd() / ".rlhf"
    return Path(common).parent / Path.cwd().relative_to(Path(top).resolve()) / ".rlhf"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

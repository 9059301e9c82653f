"""What was trained on what: each stage with what it read, who had made that, and what it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_HASH = 10  # characters
BESIDE = ("metrics/", "plots/", "models/lineage/")  # outs that no stage but the report reads


@dataclass(frozen=True)
class Item:
    """A path with the beginning of its hash ("" where nothing says it) and the stage that made it."""

    path: str
    digest: str
    maker: str | None


@dataclass(frozen=True)
class Link:
    stage: str
    run: str | None
    code: str | None
    """The beginning of the commit's hash."""
    dirty: bool
    """Whether the code differed from the commit."""
    read: Sequence[Item]
    made: Sequence[Item]


def links(lineage: Mapping[str, Mapping[str, Any]], outs: Mapping[str, Sequence[str]]) -> list[Link]:
    """One for each stage whose models/lineage/STAGE.json is there; `outs` are those of dvc.yaml by stage.

    The hash of what a stage made is known from the stages that read it.
    """
    makers = {out: stage for stage, paths in outs.items() for out in paths}
    known: dict[str, str] = {}
    for tree in lineage.values():
        known |= tree.get("inputs", {})
    found = []
    for stage, tree in lineage.items():
        read = [Item(path, _short(md5), makers.get(path)) for path, md5 in tree.get("inputs", {}).items()]
        own = (out for out in outs.get(stage, ()) if not out.startswith(BESIDE))
        made = [Item(out, _short(known.get(out, "")), stage) for out in own]
        code = None if tree.get("git.rev") is None else _short(tree["git.rev"])
        found.append(Link(stage, tree.get("rlhf.run"), code, bool(tree.get("git.dirty")), read, made))
    return found


def _short(digest: str) -> str:
    return digest[:SHOWN_HASH]

"""The lineage of a run: for each stage what it read, which stage had written that, and what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_HASH = 10  # characters
NOT_READ = ("metrics/", "plots/", "models/lineage/")  # outs that no stage but the report reads


@dataclass(frozen=True)
class Item:
    """A path with the beginning of its hash ("" if it is not known) and the stage that wrote it."""

    path: str
    digest: str
    maker: str | None


@dataclass(frozen=True)
class Link:
    """One stage of the lineage."""

    stage: str
    run: str | None
    code: str | None
    """The beginning of the commit's hash."""
    dirty: bool
    """Whether the code differed from the commit."""
    read: Sequence[Item]
    written: Sequence[Item]


def links(lineage: Mapping[str, Mapping[str, Any]], outs: Mapping[str, Sequence[str]]) -> list[Link]:
    """One link for each models/lineage/STAGE.json; `outs` are those of dvc.yaml by stage.

    The hash of an out is known from the stages that read it.
    """
    makers = {out: stage for stage, paths in outs.items() for out in paths}
    known: dict[str, str] = {}
    for tree in lineage.values():
        known |= tree.get("inputs", {})
    chain = []
    for stage, tree in lineage.items():
        read = [Item(path, _short(md5), makers.get(path)) for path, md5 in tree.get("inputs", {}).items()]
        own = (out for out in outs.get(stage, ()) if not out.startswith(NOT_READ))
        written = [Item(out, _short(known.get(out, "")), stage) for out in own]
        code = None if tree.get("git.rev") is None else _short(tree["git.rev"])
        chain.append(Link(stage, tree.get("rlhf.run"), code, bool(tree.get("git.dirty")), read, written))
    return chain


def _short(digest: str) -> str:
    return digest[:SHOWN_HASH]

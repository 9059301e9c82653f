"""Which run a page is about: date, name, preset, seed, data, base model and commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_tasks import config, presets
from rlhf_tasks.config import Model, ReportView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

SHOWN_HASH, SHOWN_CHANGES = 10, 8  # characters; changes of params.yaml
CHANGES = "Changes of params.yaml"
_TIME = re.compile(r"-(\d{8}T\d{6})-")  # in a run key; UTC


class Origin(NamedTuple):
    """What ended last in a run; empty where it is not known."""

    name: str = ""
    time: datetime | None = None
    commit: str = ""
    dirty: bool = False
    """Whether the code or params.yaml differed from the commit."""

    @classmethod
    def of_lineage(cls, lineage: Mapping[str, Mapping[str, Any]], name: str = "") -> Origin:
        """Of models/lineage/STAGE.json by stage. A run without a name has the key of its last stage."""
        keys = {key: tree for tree in lineage.values() if _TIME.search(key := tree.get("rlhf.run", ""))}
        if not keys:
            return cls(name)
        key = max(keys, key=lambda key: _TIME.findall(key)[-1])
        time = datetime.strptime(_TIME.findall(key)[-1], "%Y%m%dT%H%M%S")
        return cls(name or key, time, keys[key].get("git.rev") or "", bool(keys[key].get("git.dirty")))


def facts(view: ReportView, origin: Origin, root: Path) -> dict[str, str]:
    """What a page begins with, by title; what is not known is left out. The git of `root` has the commit."""
    known = {
        "Date": "" if origin.time is None else f"{origin.time.day} {origin.time:%B %Y, %H:%M} UTC",
        "Run": origin.name,
        "Preset": ", ".join(presets.matching(view.declared)) or "none",
        "Seed": str(view.seed),
        "Data": view.data.in_words,
        "Base model": _base(view.model),
        "Commit": origin.commit[:SHOWN_HASH] + " with uncommitted changes" * origin.dirty,
        CHANGES: _changes(view, root, origin.commit) if origin.commit else "",
    }
    return {title: text for title, text in known.items() if text}


def _base(model: Model) -> str:
    if (shape := model.scratch) is None:
        return f"{model.base} {(model.revision or '')[:SHOWN_HASH]}".rstrip()
    return f"{shape.family} from random weights, {shape.num_layers} layers of width {shape.hidden_size}"


def _changes(view: ReportView, root: Path, commit: str) -> str:
    """The values in which the run differs from the commit's params.yaml; "" if that is not readable."""
    try:
        tree = config.parse(git.show(root, commit, "params.yaml"), "params.yaml")
        before = ReportView.of(config.validate(tree, "params.yaml")).declared
    except UserError:
        return ""
    texts = config.differences(before, view.declared)
    more = [f"and {len(texts) - SHOWN_CHANGES} more"] if len(texts) > SHOWN_CHANGES else []
    return "; ".join([*texts[:SHOWN_CHANGES], *more])

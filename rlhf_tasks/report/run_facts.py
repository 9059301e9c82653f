"""Which run a page is about: date, name, preset, seed, data, base model and commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_tasks import config, presets
from rlhf_tasks.config import Data, Model, ReportView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git

SHOWN_HASH = 10  # characters
_TIME = re.compile(r"-(\d{8}T\d{6})-")  # in a run key; UTC
Lineage = Mapping[str, Mapping[str, Any]]  # models/lineage/STAGE.json by stage


def facts(view: ReportView, lineage: Lineage, name: str, root: Path) -> dict[str, str]:
    """What a reader wants to know of the run, by title; what is not known is left out.

    Date, commit and, without a `name`, the name are those of the stage that ran last.
    """
    times = starts(lineage)
    last = max(times, key=lambda stage: times[stage], default="")
    tree = lineage.get(last, {})
    commit = tree.get("git.rev") or ""
    known = {
        "Date": f"{times[last].day} {times[last]:%B %Y, %H:%M} UTC" if last else "",
        "Run": name or tree.get("rlhf.run", ""),
        "Preset": view.preset or "none",
        "Seed": str(view.seed),
        "Data": view.data.in_words,
        "Base model": base_model(view.model),
        "Commit": commit[:SHOWN_HASH] + " with uncommitted changes" * bool(tree.get("git.dirty")),
        "Changes of params.yaml": _changes(view, root, commit) if commit else "",
    }
    return {title: text for title, text in known.items() if text}


def starts(lineage: Lineage) -> dict[str, datetime]:
    """When the run of each stage began, by the stage's run key; without stages that have none."""
    found = {stage: _TIME.search(tree.get("rlhf.run") or "") for stage, tree in lineage.items()}
    return {stage: datetime.strptime(at[1], "%Y%m%dT%H%M%S") for stage, at in found.items() if at}


def task(data: Data) -> str:
    """What the data is; that of a preset's function in the words of the preset."""
    described = (
        f"{data.source}, of preset {name}: {presets.summary(name)}"
        for name in presets.names()
        if presets.read(name).get("data", {}).get("source") == data.source
    )
    return next(described, data.in_words) if ":" in data.source else data.in_words


def base_model(model: Model) -> str:
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
    return "; ".join(config.differences(before, view.declared))

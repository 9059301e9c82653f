"""Where a stage's snapshots are, and what the manifest of a snapshot records."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.config import VIEWS
from rlhf_tasks.project import hashing, inputs, lineage
from rlhf_tasks.project.paths import Paths

MANIFEST = "manifest.json"
SHOWN_DIFFERENCES = 8
HASH = re.compile(r"[0-9a-f]{32}(\.dir)?")


def state_folder(paths: Paths, stage: str, identity: Mapping[str, Any]) -> Path:
    """The folder of a stage's snapshots, by the digest of all that decides what the stage writes."""
    return states(paths) / stage / hashing.json_sha256(identity)[:32]


def states(paths: Paths) -> Path:
    """The folder of all snapshots: $RLHF_STATE_DIR, by default .rlhf/state."""
    given = os.environ.get("RLHF_STATE_DIR")
    return Path(given).absolute() if given else paths.home / "state"


def read_manifest(snapshot: Path) -> dict[str, Any] | None:
    """The manifest of a snapshot; None without a readable one."""
    try:
        manifest: dict[str, Any] = json.loads((snapshot / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """`sft.learning_rate (0.1 → 0.2), data/sft`: values for parameters, names for files."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    hashed = {name for name in names if HASH.fullmatch(str(old.get(name) or new.get(name)))}
    shown = [
        name if name in hashed else f"{name} ({old.get(name)!r} → {new.get(name)!r})"
        for name in names[:SHOWN_DIFFERENCES]
    ]
    return ", ".join([*shown, *([f"{len(names) - len(shown)} more"] if len(names) > len(shown) else [])])


def point(paths: Paths, stage: str) -> str | None:
    """Where a run of the stage resumes, such as `update 12`, by its newest snapshot; None without one."""
    view = next((view for name, view in VIEWS.items() if name == stage), None)
    if view is None or not any(states(paths).glob(f"{stage}/*/*/step-*")):
        return None
    settings = inputs.in_force(paths, view.stage, config.load(paths.params), check=False)
    identity = lineage.identity(paths, stage, view.of(settings).declared)
    snapshots = [] if identity is None else state_folder(paths, stage, identity).glob("*/step-*")
    newest = max(snapshots, key=lambda snapshot: snapshot.stat().st_mtime, default=None)
    manifest = None if newest is None else read_manifest(newest)
    if newest is None or manifest is None:
        return None
    loop = newest.parent.name
    return f"{'update' if stage == 'ppo' else 'step'} {manifest['step']}" + f" of {loop}" * (loop != stage)

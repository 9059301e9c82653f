"""Where a policy comes from: the tags of its version, and the MLflow run that trained it. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import Tracking
from rlhf_tasks.models import contracts
from rlhf_tasks.project import dvc_files, hashing, provenance
from rlhf_tasks.promotion import weights
from rlhf_tasks.promotion.candidate import Candidate
from rlhf_tasks.promotion.registry import Registry
from rlhf_tasks.tracking.sync import sync


def describe(
    candidate: Candidate, home: Path, registry: Registry, tracking: Tracking
) -> tuple[dict[str, str], str | None]:
    """Tags that say how to restore the policy, and the id of its MLflow run if that is known."""
    root, model, md5 = candidate.paths.root, candidate.model, candidate.md5
    tags = {weights.PATH: model}
    if not weights.is_cached(root, md5):
        tags[weights.FOLDER] = str(candidate.folder.resolve())
        console.say(f"{model} is not in the DVC cache: this folder is the only place to restore it from")
    revision, experiment = provenance.revision_with(root, model, md5) or (None, None)
    tags |= {weights.REVISION: revision} if revision else {}
    tags |= {weights.EXPERIMENT: experiment} if experiment else {}
    sampler = contracts.read_identity(candidate.folder).get("sampler")
    tags |= {"rlhf.sampler": sampler} if sampler else {}
    lineage = _lineage(candidate)
    if not lineage:
        return tags, None
    tags |= {"rlhf.run": lineage["rlhf.run"], "git.rev": lineage.get("git.rev") or "none"}
    run = registry.run_of(lineage["rlhf.run"], tracking.experiment)
    if run is None:
        sync(home)  # the run may still be in the outbox
        run = registry.run_of(lineage["rlhf.run"], tracking.experiment)
    return tags, run


def _lineage(candidate: Candidate) -> dict[str, Any]:
    """The lineage file of the stage that wrote the policy; empty if it describes another policy."""
    root, model = candidate.paths.root, candidate.model
    stage = next((name for name, node in dvc_files.graph(root).items() if model in node.outs), "none")
    path, locked = f"models/lineage/{stage}.json", dvc_files.locked_by(root, stage)
    file = root / path
    if locked.get(model) != candidate.md5 or not file.exists() or locked.get(path) != hashing.dvc_md5(file):
        return {}
    lineage: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return lineage

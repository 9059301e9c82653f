"""The policy that `rlhf promote` is given. No torch here, so only the text files of a checkpoint are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths

POLICY = "models/policy"
REWARD_KINDS = ("reward", "reward_heldout")


@dataclass(frozen=True)
class Candidate:
    """A policy that may become champion."""

    paths: Paths
    """The project that it belongs to: the user's, or the worktree of an experiment."""
    model: str
    """Its folder, as a path from the project's folder."""
    label: str
    """Its name in messages."""
    md5: str

    @classmethod
    def of(cls, paths: Paths, model: str, label: str | None = None) -> Candidate:
        return cls(paths, model, label or model, hashing.dvc_md5(paths.root / model))

    @property
    def folder(self) -> Path:
        return self.paths.root / self.model


def check(folder: Path, name: str) -> None:
    """Refuse a folder that is not a policy.

    Raises:
        UserError: if it is not a checkpoint, or is a reward model.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name} is neither a checkpoint (it has no config.json) nor an experiment; give a folder such "
            f"as {POLICY}, or a name that `dvc exp list -A` shows"
        )
    identity = folder / "rlhf.json"
    try:
        kind = json.loads(identity.read_text(encoding="utf-8")).get("kind") if identity.exists() else None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{identity} cannot be read ({error}); restore the folder") from None
    if kind in REWARD_KINDS:
        raise UserError(f"{name} is a reward model; give a policy such as {POLICY}")

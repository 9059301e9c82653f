"""How long each stage took when it last ran in this checkout, for those who wait for it."""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock

from rlhf_tasks.project import atomic


def read(home: Path) -> dict[str, float]:
    """The seconds of each stage that has ended here."""
    file = home / "durations.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def record(home: Path, stage: str, seconds: float) -> None:
    """Remember how long a stage took."""
    with FileLock(home / "durations.lock"):
        atomic.write_json(home / "durations.json", {**read(home), stage: round(seconds, 1)})

"""The small files of other stages that the report reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf_tasks.config import STAGES
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import curves
from rlhf_tasks.tracking.curves import Points

Rows = list[dict[str, Any]]


class Files:
    """Reads the files of a project, and notes the `missing` ones. UserError for one that cannot be read."""

    def __init__(self, paths: Paths) -> None:
        self.missing: list[str] = []
        self._paths = paths

    def json(self, path: Path) -> dict[str, Any] | None:
        kind = "an object of JSON"
        tree: dict[str, Any] | None = self._read(path, kind, lambda: dict(json.loads(path.read_bytes())))
        return tree

    def rows(self, path: Path) -> Rows:
        return self._read(path, "a Parquet table", lambda: pq.read_table(path).to_pylist()) or []

    def points(self, path: Path) -> Points:
        return self._read(path, "a table of numbers", lambda: curves.read_csv(path.read_text("utf-8"))) or []

    def _read(self, path: Path, kind: str, parse: Callable[[], Any]) -> Any:
        if not path.exists():
            self.missing.append(self._paths.relative(path))
            return None
        try:
            return parse()
        except PermissionError:
            raise
        except (OSError, ValueError, TypeError) as error:
            # The file, or its folder, is named after the stage that writes it.
            stage = path.stem if path.stem in STAGES else path.parent.name
            raise UserError(f"{path} is not {kind} ({error}); run `rlhf {stage}` again") from None

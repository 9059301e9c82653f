"""What the tests of the sources of data share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def of_split(rows: Iterable[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["split"] == split]

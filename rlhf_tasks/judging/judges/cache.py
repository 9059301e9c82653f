"""Replies that were paid for, kept in a file of JSON lines that is only appended to.

Each record is written by one call as soon as it arrives: a killed process loses no reply that it has read,
and several processes can share the file. A line that a crash of the machine cut off is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.project import atomic


class Cache:
    """Records by key; the key is `hashing.json_sha256` of everything that decides a reply."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                self._read(line)

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict) and isinstance(record.get("key"), str):
            self._known[record["key"]] = record

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        kept = {"key": key, **record}
        atomic.append_line(self._path, json.dumps(kept))
        self._known[key] = kept

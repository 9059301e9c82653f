"""The state of a training loop, as snapshots hold it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

State = dict[str, Any]
"""Nested: tensors, numbers, strings, lists, None, and `Files`. The part under `shared` is equal on all
processes and is written once."""


@dataclass(frozen=True)
class Files:
    """A part of a state that writes files of its own; all processes call it. Loaded, it is their folder."""

    write: Callable[[Path], Any]

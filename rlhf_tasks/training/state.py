"""The state of a training loop, as snapshots hold it. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

State = dict[str, Any]
"""Nested: tensors, numbers, strings, lists, None, and `Files`. The part under `shared` is equal on all ranks
and is written once."""


@dataclass(frozen=True)
class Files:
    """A part of a state that writes files of its own; all ranks call it. Loaded, it is their folder."""

    write: Callable[[Path], Any]


def write_files(state: State, folder: Path) -> State:
    """The state with each `Files` written to a folder below `folder`, and replaced by the folder's name."""
    numbers = itertools.count()

    def write(part: Any) -> Any:
        if type(part) is dict:
            return {key: write(value) for key, value in part.items()}
        if not isinstance(part, Files):
            return part
        name = f"files-{next(numbers)}"
        (folder / name).mkdir(exist_ok=True)
        part.write(folder / name)
        return (Files.__name__, name)

    return {key: write(value) for key, value in state.items()}


def find_files(part: Any, folder: Path) -> Any:
    """The inverse of `write_files`: each name becomes the path of its folder."""
    if type(part) is dict:
        return {key: find_files(value, folder) for key, value in part.items()}
    return folder / part[1] if isinstance(part, tuple) and part[:1] == (Files.__name__,) else part

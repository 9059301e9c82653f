"""Rows of token ids in a mapped file. No torch."""

from __future__ import annotations

import itertools
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf_tasks.data.rows import BATCH
from rlhf_tasks.project import disk


class Ragged(Sequence[list[int]]):
    """Rows of different lengths, end to end in a temporary file that is mapped into memory.

    A token takes four bytes of the file, and a row eight bytes of memory; a list takes eight or more a token.
    """

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the rows)
        weakref.finalize(self, self._file.close)
        self._ends, self._ids = array("q", [0]), np.empty(0, np.int32)
        self.extend(rows)

    def extend(self, rows: Iterable[Sequence[int]]) -> None:
        rest = iter(rows)
        while some := list(itertools.islice(rest, BATCH)):
            self._ends.extend((np.cumsum([len(row) for row in some]) + self._ends[-1]).tolist())
            with disk.temporary(self._file):
                self._file.write(np.fromiter(itertools.chain.from_iterable(some), np.int32).tobytes())
                self._file.flush()
        if self._ends[-1]:
            self._ids = np.memmap(self._file, np.int32, "r")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[number] for number in range(len(self))[i]]
        i = range(len(self))[i]  # checks it
        return self._ids[self._ends[i] : self._ends[i + 1]].tolist()

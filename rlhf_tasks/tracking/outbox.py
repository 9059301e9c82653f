"""The local record of each run and the state of its delivery to MLflow. No torch or MLflow here.

The folder `.rlhf/outbox` has three entries per run: `KEY.jsonl`, its record, which is only ever appended to;
`KEY/`, copies of its artifacts until they are delivered; and `KEY.state.json`, how much of it MLflow has.
Only a process that holds the folder's lock delivers runs and writes their states.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from rlhf_tasks.project import atomic, disk
from rlhf_tasks.tracking.events import Event, Header

RUN_LINE = b'{"kind": "run"'  # how a `run` line starts


class DamagedRecordError(ValueError):
    """A record has a line that cannot be read."""


@dataclass(frozen=True)
class State:
    """How much of a run MLflow has."""

    delivered: int = 0
    """Bytes of the record that MLflow has for certain."""
    size: int = 0
    """Bytes of the record at the last attempt; what follows holds for a record of this size only."""
    closed: bool = False
    """MLflow has all of the run."""
    last_error: str | None = None
    """Why the last attempt failed; None if it succeeded."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """The traces that MLflow will never accept, by number, with its reasons. They are not sent again."""


@dataclass(frozen=True)
class Record:
    """One run in the outbox."""

    folder: Path
    key: str

    @property
    def file(self) -> Path:
        return self.folder / f"{self.key}.jsonl"

    @property
    def files(self) -> Path:
        """Copies of the artifacts, until they are delivered."""
        return self.folder / self.key

    @property
    def state_file(self) -> Path:
        return self.folder / f"{self.key}.state.json"

    def begin(self, header: Header) -> None:
        """Start the record, or continue it without the last line if a killed process did not complete it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.append(header)

    def append(self, event: Event) -> None:
        """Add a line.

        Raises:
            DiskFullError: if the disk does not take the line; the record then ends with the line before.
        """
        line = json.dumps(event).encode() + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with disk.room(self.folder, lambda: len(line)):
                # One write, so that a reader sees whole lines or the start of one.
                missing = len(line) - os.write(handle, line)
                if missing:  # the disk is full: the next line must not continue this one
                    os.ftruncate(handle, os.fstat(handle).st_size - len(line) + missing)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
        finally:
            os.close(handle)

    def copy(self, path: Path, folder: str | None) -> str:
        """Keep a copy of a file among the artifacts; returns its name there."""
        name = f"{folder}/{path.name}" if folder else path.name
        target = self.files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with disk.room(self.folder, lambda: path.stat().st_size):
            shutil.copyfile(path, target)
        return name

    def read(self, start: int = 0, end: int | None = None) -> tuple[list[Event], int]:
        """The whole lines from byte `start` to byte `end`, and the offset after them.

        Raises:
            DamagedRecordError: if a line is not JSON.
        """
        with self.file.open("rb") as file:
            file.seek(start)
            data = file.read(-1 if end is None else end - start)
        length = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[:length].splitlines()]
        except ValueError:
            raise self._damaged() from None
        return cast("list[Event]", lines), start + length

    def header(self) -> Header | None:
        """The last `run` line; None while the first one is incomplete.

        Raises:
            DamagedRecordError: if the first line is not a header.
        """
        data = self.file.read_bytes()
        data = data[: data.rfind(b"\n") + 1]
        if not data:
            return None
        start = data.rfind(b"\n" + RUN_LINE) + 1
        try:
            header = json.loads(data[start:].partition(b"\n")[0])
        except ValueError:
            raise self._damaged() from None
        is_header = isinstance(header, dict) and Header.__required_keys__ <= header.keys()
        if not is_header or not isinstance(header["parent"], dict):
            raise self._damaged()
        return cast("Header", header)

    def _damaged(self) -> DamagedRecordError:
        return DamagedRecordError(f"{self.file} has a damaged line: fix the line, or remove the file")

    def size(self) -> int:
        """Bytes of the record; 0 if the user has removed it."""
        return self.file.stat().st_size if self.file.exists() else 0

    def state(self) -> State:
        """How much MLflow has of the record as it is now; nothing for certain if the file is damaged."""
        try:
            state = State(**json.loads(self.state_file.read_text(encoding="utf-8")))
            if state.size == self.size():
                return state
        except (FileNotFoundError, ValueError, TypeError):
            return State()
        return State(state.delivered, last_error=state.last_error, rejected=state.rejected)

    def write_state(self, state: State) -> None:
        atomic.write_json(self.state_file, asdict(state))


@dataclass(frozen=True)
class Outbox:
    """The records of a project's runs."""

    folder: Path

    @classmethod
    def of(cls, home: Path) -> Outbox:
        return cls(home / "outbox")

    def record(self, key: str) -> Record:
        return Record(self.folder, key)

    def lock(self, timeout: float = -1) -> FileLock:
        """Held during every delivery, by whoever delivers."""
        return FileLock(self.folder / "sync.lock", timeout=timeout)

    def pending(self) -> list[Record]:
        """The runs that MLflow does not have completely, or that still run; the first one changed first."""
        times = dict[str, float]()
        for file in self.folder.glob("*.jsonl"):
            with suppress(FileNotFoundError):  # removed by the user just now
                times[file.stem] = file.stat().st_mtime
        records = [self.record(key) for key in sorted(times, key=lambda key: times[key])]
        return [record for record in records if not record.state().closed]


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in the form that MLflow's viewer reads: null where a row has no value for a column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[row.get(name) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str, ensure_ascii=False)

"""The local record of a run, a JSONL file, the source of truth for logging. No torch or MLflow here.

The folder `.rlhf/outbox` has three entries per run: `KEY.jsonl`, its record, which is only ever appended to;
`KEY/`, copies of its artifacts until they are delivered; and `KEY.state.json`, whether MLflow has all of it.
The lines of a record, by `kind`; `time` is in milliseconds since 1970, so that MLflow receives the same
points however often they are sent:

    run        key (MLflow's tag `rlhf.run`), stage, uri and experiment of MLflow, process (HOST:PID:START),
               parent (the pipeline's run), parameters, inputs ({path: md5}), tags;
               a process that resumes the run adds another one
    metrics    step, values: one point per curve
    results    values that the run of the pipeline shows too
    event      name, text, step: something that a person should see, such as a guard that tripped
    artifact   file (its copy), folder in MLflow, table: whether it is a sample table
    tags       values
    end        status (FINISHED, FAILED or KILLED), reason (empty if it finished)
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks.project import atomic, disk

Event = Mapping[str, Any]  # a line of a record
PIPELINE = "pipeline"  # the `stage` of a pipeline's own run
REPORT, SAMPLES = "report/index.html", "samples.txt"  # artifacts of a pipeline's run
WIDTH = 100  # characters of a line, of which MLflow's viewer cuts longer ones


class DamagedRecordError(ValueError):
    """A record has a line that cannot be read."""


@dataclass(frozen=True)
class Record:
    """One run in the outbox."""

    home: Path  # the .rlhf folder
    key: str

    @property
    def file(self) -> Path:
        return self.home / "outbox" / f"{self.key}.jsonl"

    @property
    def files(self) -> Path:
        """Copies of the artifacts, until they are delivered."""
        return self.file.with_suffix("")

    @property
    def state_file(self) -> Path:
        return self.file.with_suffix(".state.json")

    def begin(self, header: Event) -> None:
        """Start the record, or continue it without the last line if a killed process did not complete it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.append("run", **header)

    def append(self, kind: str, **fields: Any) -> None:
        """Add a line.

        Raises DiskFullError if the disk does not take the line; the record then ends with the line before.
        """
        line = json.dumps({"kind": kind, "time": now(), **fields}).encode() + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with disk.room(self.file.parent, lambda: len(line)):
                # One write, so that a reader sees whole lines or the start of one.
                missing = len(line) - os.write(handle, line)
                if missing:  # the disk is full: the next line must not continue this one
                    os.ftruncate(handle, os.fstat(handle).st_size - len(line) + missing)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
        finally:
            os.close(handle)

    def keep(self, name: str, content: str | Path, *, table: bool = False) -> None:
        """Add an artifact: a copy of a file, or a text. `name` is its path in MLflow."""
        target = self.files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            atomic.write_text(target, content)
        else:
            with disk.room(self.file.parent, lambda: content.stat().st_size):
                shutil.copyfile(content, target)
        folder = str(Path(name).parent)
        self.append("artifact", file=name, folder=None if folder == "." else folder, table=table)

    def read(self, start: int = 0) -> tuple[list[Event], int]:
        """The whole lines from byte `start`, and the offset after them.

        Raises DamagedRecordError if a line is not a JSON object.
        """
        with self.file.open("rb") as file:
            file.seek(start)
            data = file.read()
        length = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[:length].splitlines()]
            if not all("kind" in line for line in lines):
                raise ValueError
        except (ValueError, TypeError):
            raise DamagedRecordError(
                f"{self.file} has a damaged line: fix the line, or remove the file"
            ) from None
        return lines, start + length

    def header(self) -> Event:
        """The last `run` line; empty while the first one is incomplete.

        Raises DamagedRecordError if the record does not begin with one.
        """
        events, _ = self.read()
        if events and events[0]["kind"] != "run":
            raise DamagedRecordError(f"{self.file} has lost its first line: remove the file")
        return [event for event in events if event["kind"] == "run"][-1] if events else {}

    def state(self) -> Mapping[str, Any]:
        """`closed`: whether MLflow has all of the run; `last_error`: why the last attempt failed, or None."""
        try:
            state = json.loads(self.state_file.read_text(encoding="utf-8"))
            is_closed = bool(state["closed"]) and state["size"] == self.file.stat().st_size
            return {"closed": is_closed, "last_error": state["last_error"]}
        except (FileNotFoundError, ValueError, TypeError, KeyError):  # damaged: it is delivered again
            return {"closed": False, "last_error": None}

    def write_state(
        self, *, closed: bool = False, last_error: str | None = None, size: int | None = None
    ) -> None:
        """Note how the last attempt ended. It holds for a record of this size, by default its present one."""
        if size is None:
            size = self.file.stat().st_size if self.file.exists() else 0
        atomic.write_json(self.state_file, {"closed": closed, "size": size, "last_error": last_error})


class NullRecord(Record):
    """Takes everything and keeps nothing."""

    def append(self, kind: str, **fields: Any) -> None: ...
    def keep(self, name: str, content: str | Path, *, table: bool = False) -> None: ...


def pending(home: Path) -> list[Record]:
    """The runs that MLflow does not have completely, or that still run; the first one changed first."""
    times = dict[str, float]()
    for file in (home / "outbox").glob("*.jsonl"):
        with suppress(FileNotFoundError):  # removed by the user just now
            times[file.stem] = file.stat().st_mtime
    records = [Record(home, key) for key in sorted(times, key=lambda key: times[key])]
    return [record for record in records if not record.state()["closed"]]


def now() -> int:
    """Milliseconds since 1970."""
    return round(time.time() * 1000)


def as_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table to read: a paragraph per row, a line per value, and long lines wrapped."""
    paragraphs = []
    for row in rows:
        values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        lines = [line for name, value in values.items() for line in f"{name}: {value}".splitlines()]
        paragraphs.append("\n".join(textwrap.fill(line, WIDTH, break_long_words=False) for line in lines))
    return "\n\n".join(paragraphs)

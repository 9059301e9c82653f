"""The local record of a run: a JSON line for each thing logged, files beside it. No torch, no MLflow.

A run that goes on after its process was killed gets another part: KEY.jsonl, KEY.2.jsonl, …

Kinds of line: `run` (the first: who, where, parameters, inputs), `metrics`, `event`, `trace`, `artifact`,
`figure` (of curves, to be drawn from a table), `headlines`, `tags`, `end`. Each has `time` in milliseconds
since 1970, so that a second delivery sends the very same points.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_tasks import console
from rlhf_tasks.project import atomic

HEADER = {"key", "time", "process", "parent"}  # what the first line must have to be of any use
LEFT = "left for `rlhf sync`"  # in the second line of a trouble file


@dataclass(frozen=True)
class Spool:
    folder: Path
    name: str

    @classmethod
    def next_part(cls, folder: Path, key: str) -> Spool:
        """The spool of a new run, or of one that goes on."""
        spool = cls(folder, key)
        while spool._exists():
            spool = spool._next()
        return spool

    @property
    def is_last(self) -> bool:
        """False once the run has gone on in another part: its status is no longer this one's to tell."""
        return not self._next()._exists()

    def _next(self) -> Spool:
        key, _, part = self.name.partition(".")
        return Spool(self.folder, f"{key}.{int(part or 1) + 1}")

    def _exists(self) -> bool:
        return self.file.exists() or self.delivered.exists()

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def files(self) -> Path:
        """Copies of the artifacts, until they are delivered."""
        return self.folder / self.name

    @property
    def trouble(self) -> Path:
        """Exists while MLflow does not take what is sent; its first line is the reason."""
        return self.folder / f"{self.name}.trouble"

    @property
    def reason(self) -> str | None:
        """Why MLflow does not take what is sent; None while it does."""
        try:
            return self.trouble.read_text(encoding="utf-8").partition("\n")[0]
        except FileNotFoundError:
            return None

    @property
    def is_left(self) -> bool:
        """Whether a courier has tried a last time in vain to deliver a run that is over."""
        try:
            return LEFT in self.trouble.read_text(encoding="utf-8").splitlines()[1:]
        except FileNotFoundError:
            return False

    def tell_trouble(self, reason: str, *, left: bool) -> None:
        """`left`: this was the last try; the rest is for `rlhf sync`."""
        atomic.write_text(self.trouble, "\n".join([reason, LEFT] if left else [reason]) + "\n")

    @property
    def sent(self) -> Path:
        """Exists while MLflow has the run to its end, and only the figure is missing."""
        return self.folder / f"{self.name}.sent"

    @property
    def is_sent(self) -> bool:
        """Whether MLflow has the run to its end, but perhaps for the figure."""
        return self.sent.exists() or self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether MLflow has the run and its figure."""
        return not self.file.exists()

    @property
    def refused(self) -> Path:
        """Traces that MLflow refused for good, and why: a line of JSON each. Exists until that is told."""
        return self.folder / f"{self.name}.refused"

    @property
    def refused_before(self) -> Path:
        """The same once it is told, while a figure is missing: if it fails, all is sent again, but these."""
        return self.folder / f"{self.name}.refused-before"

    def refuse(self, number: str, reason: str) -> None:
        """Set a trace aside: it is not sent again."""
        atomic.append_line(self.refused, json.dumps({"number": number, "reason": reason}))

    def refusals(self) -> dict[str, str]:
        """Why each trace that was set aside was refused, by its number."""
        return _refusals(self.refused_before) | _refusals(self.refused)

    @property
    def delivered(self) -> Path:
        return self.folder / "delivered" / f"{self.name}.jsonl"

    @property
    def lock(self) -> Path:
        """Held by whoever delivers any part of the run: two at once would each send what MLflow lacks."""
        return self.folder / "locks" / f"{self.name.partition('.')[0]}.lock"

    def append(self, kind: str, **fields: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"kind": kind, "time": round(time.time() * 1000), **fields})
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(
                handle, line.encode() + b"\n"
            )  # one write: a reader sees whole lines or the start of one
        finally:
            os.close(handle)

    def read(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The whole lines from byte `offset` on, and the offset after them."""
        with self.file.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        return [json.loads(line) for line in data[:end].splitlines()], offset + end

    def header(self) -> dict[str, Any] | None:
        """The first line; None while it is not there as a whole, if it is damaged, or the spool is closed."""
        return _header(self._first_line())

    @property
    def is_damaged(self) -> bool:
        """Whether the first line is there as a whole, and does not say whose run this is."""
        line = self._first_line()
        return line != b"" and _header(line) is None

    def _first_line(self) -> bytes:
        """Empty while it is not there as a whole, or once the spool has been moved aside."""
        try:
            with self.file.open("rb") as file:
                line = file.readline()
        except FileNotFoundError:
            return b""
        return line if line.endswith(b"\n") else b""

    def is_followed(self) -> bool:
        """Whether somebody delivers it now."""
        self.lock.parent.mkdir(exist_ok=True)
        try:
            with FileLock(self.lock, timeout=0):
                return False
        except Timeout:
            return True

    def close(self) -> None:
        """All is delivered: the lines move aside, the copies go."""
        self.delivered.parent.mkdir(exist_ok=True)
        self.file.replace(self.delivered)
        shutil.rmtree(self.files, ignore_errors=True)
        self.trouble.unlink(missing_ok=True)
        self.sent.unlink(missing_ok=True)
        self.refused_before.unlink(missing_ok=True)


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_header = isinstance(found, dict) and found.get("kind") == "run" and found.keys() >= HEADER
    return found if is_header and isinstance(found["parent"], dict) else None


def pending(folder: Path) -> list[Spool]:
    """Runs that are not wholly delivered, oldest first."""
    ages = dict[Path, float]()
    for file in folder.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # moved aside meanwhile
            ages[file] = file.stat().st_mtime
    return [Spool(folder, file.stem) for file in sorted(ages, key=lambda file: ages[file])]


def tell_refused(folder: Path) -> None:
    """Say once, of each run that MLflow has to its end, which of its traces it refused for good."""
    for file in sorted(folder.glob("*.refused")):
        spool = Spool(folder, file.stem)
        if not spool.is_sent:
            continue  # there may be more of them
        try:
            file.rename(spool.refused_before)
        except FileNotFoundError:
            continue  # another process tells it
        reasons = list(_refusals(spool.refused_before).values()) or ["no reason is on the disk"]
        if spool.is_closed:
            spool.refused_before.unlink(missing_ok=True)
        console.say(
            f"MLflow refused {len(reasons)} trace(s) of {spool.name} for good ({reasons[0]}); they are not "
            f"sent again, and stay in {spool.delivered}"
        )


def _refusals(file: Path) -> dict[str, str]:
    found = dict[str, str]()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            record = json.loads(line)
            found[record["number"]] = record["reason"]
        except (ValueError, TypeError, KeyError):
            continue  # torn
    return found


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as MLflow's viewer reads it: columns in order of appearance, null where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[row.get(name) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str, ensure_ascii=False)

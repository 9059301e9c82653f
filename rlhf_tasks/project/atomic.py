"""Writes files and folders that appear complete or not at all: fsynced, then renamed."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_tasks.project import disk


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A new folder that replaces `path` at the end of the block.

    After an error it is removed and `path` does not change. Folders that killed processes left are removed
    first.

    Raises:
        DiskFullError: in place of the error of a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.partial-"
    for stale in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    partial.chmod(0o755)
    try:
        with disk.room(path, lambda: disk.size(partial)):
            yield partial
            finish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish(partial: Path, path: Path) -> None:
    """Write a folder to the disk and rename it to `path`, replacing what is there."""
    for file in partial.rglob("*"):
        fsync(file)
    fsync(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write one file, in UTF-8: a reader sees the old or the new text; of two writers the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode("utf-8")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with disk.room(path.parent, lambda: len(content)):
            partial.write_bytes(content)
            fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and write it to the disk; several processes may append to one file.

    The line starts after a newline, even if a crash cut the last line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        content = b"\n" * torn + line.encode() + b"\n"
        with disk.room(path.parent, lambda: len(content)):
            if os.write(handle, content) < len(content):  # a full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(handle)
    finally:
        os.close(handle)


def fsync(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

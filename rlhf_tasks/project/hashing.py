"""Hashes: DVC's md5 of files and folders, and sha256 of files and of JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.project import atomic

NOT_DATA = ("__pycache__",)
"""Folders below a folder that do not belong to it, as in .dvcignore."""
LARGE = 1 << 20
"""The least bytes of a file whose md5 is worth keeping."""
CHUNK = 1 << 24  # bytes read at a time


def dvc_md5(path: Path, known: Path | None = None) -> str:
    """DVC's md5 of a file, or of a folder (with `.dir`): of its sorted list of md5 and relative path.

    Like DVC, it follows links to files and skips links to folders, and it skips NOT_DATA. The JSON file
    `known` keeps the md5 of large files, so that they are read again only after a change.
    """
    if path.is_file():
        return file_digest(path, "md5", known)
    listing = [
        {"md5": file_digest(file, "md5", known), "relpath": file.relative_to(path).as_posix()}
        for file in path.rglob("*")
        if file.is_file() and not any(part in NOT_DATA for part in file.relative_to(path).parts)
    ]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def _digest(file: Path, name: str) -> str:
    digest = hashlib.new(name)
    megabytes = round(file.stat().st_size / 1e6)
    with file.open("rb") as content, console.part(f"hashing {file.name}", megabytes, "MB") as meter:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
            meter.advance(len(chunk) / 1e6)
    return digest.hexdigest()


def file_digest(file: Path, name: str, memory: Path | None = None) -> str:
    """The hash of a file by the algorithm of this name, in hex digits.

    The JSON file `memory` keeps that of a large file by its path, size, time of change and inode.
    """
    status, path = file.stat(), str(file.resolve())
    if memory is None or status.st_size < LARGE:
        return _digest(file, name)
    state, known = [status.st_size, status.st_mtime_ns, status.st_ino], dict[str, list[Any]]()
    with suppress(OSError, ValueError):  # a file that is damaged is as good as none: it only saves time
        known = dict(json.loads(memory.read_text(encoding="utf-8")))
    if known.get(path, [])[:-1] != state:
        known[path] = [*state, _digest(file, name)]
        atomic.write_json(memory, known)
    return str(known[path][-1])


def file_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's files in order, first 16 hex digits."""
    digest = hashlib.sha256()
    for file in sorted(p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()):
        digest.update(file.relative_to(path).as_posix().encode())
        with file.open("rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()[:16]


def files_in(folder: Path) -> list[str]:
    """The relative paths of all files below a folder, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in files)


def sha256_of_files(folder: Path, names: Sequence[str] | None = None) -> dict[str, str]:
    """sha256 of these files of a folder, or of all below it, by relative path; 64 hex digits."""
    found = files_in(folder) if names is None else names
    return {name: _digest(folder / name, "sha256") for name in found}


def json_sha256(content: Any) -> str:
    """sha256 of a value that JSON can hold, regardless of the order of its keys; 64 hex digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

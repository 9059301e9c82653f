"""Hashes: DVC's md5 of files and folders, and sha256 of files and of JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def dvc_md5(path: Path) -> str:
    """DVC's md5 of a file, or of a folder (with `.dir`): of its sorted list of md5 and relative path.

    Like DVC, it follows links to files and skips links to folders.
    """
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    listing = [
        {"md5": dvc_md5(file), "relpath": file.relative_to(path).as_posix()}
        for file in path.rglob("*")
        if file.is_file()
    ]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def file_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's files in order, first 16 hex digits."""
    digest = hashlib.sha256()
    for file in sorted(p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()):
        digest.update(file.relative_to(path).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def sha256_of_files(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path; 64 hex digits."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def json_sha256(content: Any) -> str:
    """sha256 of a value that JSON can hold, regardless of the order of its keys; 64 hex digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

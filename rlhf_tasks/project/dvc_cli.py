"""The one wrapper for DVC: its commands, and where its cache keeps a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rlhf_tasks.errors import UserError


def cache(root: Path) -> Path:
    """The DVC cache of the project: what `dvc cache dir` prints, without a process for it.

    Raises:
        UserError: if the project is in no DVC repository, or its settings cannot be used.
    """
    from dvc.config import Config, ConfigError

    above = [root.resolve(), *root.resolve().parents]
    own = next((folder / ".dvc" for folder in above if (folder / ".dvc").is_dir()), None)
    if own is None:
        raise UserError(f"{root} is in no DVC repository; `dvc init` makes one")
    try:
        return Path(Config(dvc_dir=str(own))["cache"].get("dir") or own / "cache")
    except ConfigError as error:
        raise UserError(f"DVC's settings (.dvc/config, .dvc/config.local) cannot be used: {error}") from None


def run(folder: Path, *words: str) -> str:
    """Run DVC in a folder; returns what it prints.

    Raises:
        UserError: with its own words, if it fails.
    """
    command = [sys.executable, "-m", "dvc", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise UserError(f"`dvc {' '.join(words)}` failed in {folder}: {said}")
    return done.stdout.strip()


def cached_file(cache: Path, md5: str) -> Path:
    """Where the cache keeps the file, or the listing of a folder (`….dir`), with this md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def cached_folder(cache: Path, md5: str) -> dict[str, Path] | None:
    """The cached files of a folder by relative path; None if the cache does not have the folder's listing."""
    try:
        entries = json.loads(cached_file(cache, md5).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {entry["relpath"]: cached_file(cache, entry["md5"]) for entry in entries}

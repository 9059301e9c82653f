"""The one wrapper for DVC: its commands and the layout of its cache."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git


class DvcError(UserError):
    """DVC failed, with its own message."""

    @property
    def reason(self) -> str:
        """DVC's last error, without the lines before it and the hint after it; else its last line."""
        _, marker, text = str(self).rpartition("ERROR: ")
        return text.splitlines()[0 if marker else -1]


def place(root: Path) -> Path:
    """The folder .dvc of the project, which may be that of a folder above it.

    Raises:
        UserError: if there is none.
    """
    above = [root.resolve(), *root.resolve().parents]
    found = next((folder / ".dvc" for folder in above if (folder / ".dvc").is_dir()), None)
    if found is None:
        raise UserError(f"{root.resolve()} is in no DVC repository; run `dvc init`")
    return found


def config(root: Path) -> Any:
    """DVC's settings, without starting a process; UserError if they are not valid."""
    from dvc.config import Config, ConfigError

    try:
        return Config(dvc_dir=str(place(root)))
    except ConfigError as error:
        raise UserError(f"DVC's settings (.dvc/config, .dvc/config.local) are not valid: {error}") from None


def cache(root: Path) -> Path:
    """The DVC cache of the project, as `dvc cache dir` prints it."""
    return Path(config(root)["cache"].get("dir") or place(root) / "cache")


def check(root: Path) -> None:
    """Check that DVC finds its repository, and git's where it expects one: an archive has none."""
    needs_git = shutil.which("git") is not None  # DVC has its own
    has_git = not needs_git or git.quiet_output(root, "rev-parse", "--git-dir")
    if not has_git and not config(root)["core"].get("no_scm"):
        raise UserError(
            f"{root.resolve()} is in no git repository, which DVC needs (an archive has none): {git.BEGIN}; "
            "or `dvc config core.no_scm true`, and no run can name its commit"
        )


def check_remote(root: Path) -> None:
    """Check that `dvc push` has a default remote, or that outs in dvc.yaml name one of their own."""
    settings = config(root)
    default = settings["core"].get("remote")
    has_own = "remote:" in (root / "dvc.yaml").read_text(encoding="utf-8")
    if default not in settings["remote"] and not (default is None and has_own):
        raise UserError(
            f"there is no default DVC remote to push to (core.remote: {default}); "
            "`dvc remote add --default NAME URL`, commit .dvc/config, and start the run again"
        )


def run(folder: Path, *words: str) -> str:
    """Run DVC in a folder; returns its output.

    Raises:
        DvcError: with DVC's own message, if it fails.
        UserError: if another run is at work there.
    """
    command = [sys.executable, "-P", "-m", "dvc", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        _refuse_beside(re.findall(r"is busy.*?\(PID (\d+)\)", message, re.DOTALL), folder)
        raise DvcError(f"`dvc {' '.join(words)}` failed in {folder}: {message}")
    return done.stdout.strip()


def refuse_beside_run(root: Path) -> None:
    """Check that no stage runs: DVC would record what it reads as it is when it ends.

    Raises:
        UserError: if one does.
    """
    file = place(root) / "tmp/rwlock"  # by path: the process that writes it, or those that read it
    locks = json.loads(file.read_text(encoding="utf-8") or "{}") if file.exists() else {}
    written = [one["pid"] for one in locks.get("write", {}).values() if one]
    read = [one["pid"] for several in locks.get("read", {}).values() for one in several]
    _refuse_beside((str(pid) for pid in written + read if psutil.pid_exists(pid)), root)


def _refuse_beside(owners: Iterable[str], folder: Path) -> None:
    if who := ", ".join(sorted({*owners})):
        raise UserError(f"another run is at work in {folder.resolve()} (process {who}): wait, or stop it")


def read_outs(root: Path, revision: str, *paths: str) -> list[bytes]:
    """Files below outs as a commit has them, from the cache or else the remote.

    Raises:
        UserError: if one is in neither.
    """
    from dvc.api import DVCFileSystem
    from dvc.repo.data import DataIndexDirError

    files, prefix = DVCFileSystem(str(root), rev=revision, subrepos=True), git.prefix(root)
    try:  # of a commit, paths begin at the repository's top
        return [files.read_bytes(f"{prefix}{path}") for path in paths]
    except (OSError, DataIndexDirError) as error:
        raise UserError(f"{error}: DVC's cache has it no more; `dvc fetch` may bring it") from None


def cached_file(cache: Path, md5: str) -> Path:
    """The path in the cache of the file, or of the listing of a folder (`….dir`), with this md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def cached_json(root: Path, md5: str | None) -> dict[str, Any]:
    """The content of a JSON file in the project's cache; empty if the cache does not have it."""
    try:
        return {} if md5 is None else dict(json.loads(cached_file(cache(root), md5).read_text("utf-8")))
    except OSError:
        return {}

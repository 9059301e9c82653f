"""The weights of a registered policy, brought back from where DVC or a folder holds them. No torch here.

.rlhf/policies/MD5    links into the DVC cache, or a copy
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, hashing
from rlhf_tasks.project.atomic import whole

PATH, EXPERIMENT, REVISION, FOLDER = "dvc.path", "dvc.exp", "dvc.rev", "rlhf.folder"
"""Tags of a version that say where its weights are."""


def bring(root: Path, home: Path, md5: str, tags: Mapping[str, str]) -> Path:
    """A folder with exactly these bytes: from the DVC cache, a commit or experiment, or where it once lay.

    Raises:
        UserError: if none of them has it.
    """
    target = home / "policies" / md5
    if target.exists() and _is(target, md5):
        return target
    problems = []
    cache = _cache(root)
    if cache is None or not _links(cache, md5, target):
        problems.append("the DVC cache does not hold all of it")
    else:
        if _is(target, md5):
            return target
        problems.append("what the DVC cache holds under its hash has other bytes (altered, or not whole)")
    path = tags.get(PATH)
    target.parent.mkdir(parents=True, exist_ok=True)
    for revision in filter(None, (tags.get(REVISION), tags.get(EXPERIMENT))) if path else ():
        shutil.rmtree(target, ignore_errors=True)
        try:
            dvc_cli.run(root, "get", ".", str(path), "--rev", revision, "--out", str(target))
        except UserError as error:
            problems.append(str(error).splitlines()[-1])
            continue
        if _is(target, md5):
            return target
        problems.append(f"{path} of {revision} has other bytes")
    folder = Path(tags[FOLDER]) if FOLDER in tags else None
    if folder is not None and _is(folder, md5):
        return folder
    if folder is not None:
        problems.append(f"{folder} is gone, or has changed")
    shutil.rmtree(target, ignore_errors=True)
    raise UserError(f"the weights {md5} cannot be had: {'; '.join(problems)}")


def is_kept(root: Path, md5: str) -> bool:
    """Whether the DVC cache has it."""
    cache = _cache(root)
    return cache is not None and dvc_cli.cached_file(cache, md5).exists()


def _is(folder: Path, md5: str) -> bool:
    """By its bytes: DVC does not look whether its cache was altered."""
    try:
        return folder.is_dir() and hashing.dvc_md5(folder) == md5
    except OSError:
        return False  # a link whose blob is gone


def _cache(root: Path) -> Path | None:
    try:
        return dvc_cli.cache(root)
    except UserError:
        return None  # no DVC project


def _links(cache: Path, md5: str, target: Path) -> bool:
    """Make the folder that DVC's list names, of links into the cache; False where the cache lacks a part.

    Links, since a second copy may be many gigabytes.
    """
    try:
        entries = json.loads(dvc_cli.cached_file(cache, md5).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not all(dvc_cli.cached_file(cache, entry["md5"]).exists() for entry in entries):
        return False
    with whole(target) as folder:
        for entry in entries:
            file = folder / entry["relpath"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(dvc_cli.cached_file(cache, entry["md5"]))
    return True

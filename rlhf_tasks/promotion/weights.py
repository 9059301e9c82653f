"""The weights of a registered policy, restored from the place that still has them. No torch here.

.rlhf/policies/MD5    links into the DVC cache, or a copy
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, git, hashing
from rlhf_tasks.project.atomic import whole

PATH, EXPERIMENT, REVISION, FOLDER = "dvc.path", "dvc.exp", "dvc.rev", "rlhf.folder"
"""Tags of a version that say where its weights are."""


def restore(root: Path, home: Path, md5: str, tags: Mapping[str, str]) -> Path:
    """A folder with exactly these bytes, from the DVC cache, a commit, or its first folder.

    Raises:
        UserError: if none of these places has them, or the version has no md5.
    """
    if not md5:
        raise UserError(
            "the champion has no tag dvc.md5: `rlhf promote` did not register it, so its weights are not "
            "known; move the alias `champion`, or remove it"
        )
    target, problems = home / "policies" / md5, list[str]()
    with FileLock(target.with_suffix(".lock")):
        if _has_bytes(target, md5):
            return target
        if not _link(dvc_cli.cache(root), md5, target):
            problems.append("the DVC cache does not hold all of them")
        elif _has_bytes(target, md5):
            return target
        else:
            problems.append("the DVC cache holds other bytes under this hash (altered, or incomplete)")
        if PATH in tags and REVISION in tags:
            shutil.rmtree(target, ignore_errors=True)
            try:  # DVC asks its remotes too; of a commit it takes paths from the repository's top
                path = f"{git.prefix(root)}{tags[PATH]}"
                dvc_cli.run(root, "get", ".", path, "--rev", tags[REVISION], "--out", str(target))
            except UserError as error:  # DVC failed, or another run is at work here
                problems.append(error.reason if isinstance(error, dvc_cli.DvcError) else str(error))
            else:
                if _has_bytes(target, md5):
                    return target
                problems.append(f"{tags[PATH]} of {tags[REVISION]} has other bytes")
        shutil.rmtree(target, ignore_errors=True)
    if FOLDER in tags:
        folder = Path(tags[FOLDER])
        if _has_bytes(folder, md5):
            return folder
        problems.append(f"{folder} was removed, or has changed")
    raise UserError(f"the weights {md5} cannot be restored: {'; '.join(problems)}")


def is_cached(root: Path, md5: str) -> bool:
    return dvc_cli.cached_file(dvc_cli.cache(root), md5).exists()


def _has_bytes(folder: Path, md5: str) -> bool:
    """Whether the folder has this md5. DVC itself does not notice an altered cache."""
    try:
        return folder.is_dir() and hashing.dvc_md5(folder) == md5
    except OSError:
        return False  # a link whose file is missing


def _link(cache: Path, md5: str, target: Path) -> bool:
    """Fill the folder with links into the cache; False if the cache lacks a file.

    Links are used because a second copy may take many gigabytes.
    """
    listing = dvc_cli.cached_file(cache, md5)
    entries = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else []
    files = {entry["relpath"]: dvc_cli.cached_file(cache, entry["md5"]) for entry in entries}
    if not files or not all(file.exists() for file in files.values()):
        return False
    with whole(target) as folder:
        for path, file in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(file)
    return True

"""What `dvc repro` would do with stages: `python -m flows.stage_plan STAGE…`, in the project's folder.

Prints a line per stage, up to the first that has changed: `unchanged`, `restore` if the run cache holds the
outs of its present inputs, or `run`. DVC's command line cannot say this: `dvc repro --dry` takes the inputs'
hashes from dvc.lock, not from the files. It imports nothing of this project.
"""

from __future__ import annotations

import logging
import sys
from typing import Any


def main(stages: list[str]) -> None:
    """Print the plan of these stages, in the order of dvc.yaml. An error of DVC is left to `dvc repro`."""
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)  # its information goes to stdout too
    with Repo(_wait_for_lock=True) as repo:
        changed = {name.partition("@")[0] for name in repo.status(targets=stages)}  # STAGE@KEY of `foreach`
        for stage in stages:
            if stage in changed:
                print("restore" if is_restorable(repo, stage) else "run")
                break
            print("unchanged")


def is_restorable(repo: Any, stage: str) -> bool:
    """Whether the run cache holds the outs of a changed stage, so that it would not run."""
    from dvc.exceptions import DvcException

    try:
        loaded = repo.stage.load_one(name=stage)
        if loaded.changed_stage() or not loaded.deps_cached():
            loaded.save_deps()  # in memory only; the outs of dvc.lock belong to other inputs
            for out in loaded.outs:
                out.clear()
        repo.stage_cache.restore(loaded, dry=True)
    except DvcException:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])

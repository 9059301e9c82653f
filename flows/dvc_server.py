"""DVC as a program that runs one command after another. It imports nothing of this project.

    python -P flows/dvc_server.py MARK

Each line of stdin is a command, a JSON list of two: variables of the environment (null: not set), and a list
of DVC's words. What DVC and its stages print goes to stdout, followed by a line `MARK STATUS` with the exit
status. The words `["restorable", STAGE]` are one more command: its status is 0 if the run cache holds the
outs of the stage. The program ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys

INTERRUPTED = 130
HINTS = ("dvc.repo.scm_context",)  # loggers of advice for people at a terminal


def main(mark: str) -> None:
    """Run commands until the input ends."""
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a stage that reads must not read the commands
    from dvc.cli import main as dvc

    for name in HINTS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for line in commands:
        variables, words = json.loads(line)
        set_variables(variables)
        status = restorable(words[1]) if words[0] == "restorable" else int(dvc(words))
        sys.stdout.flush()
        # In one write that begins with a line break: processes that a stage started may print meanwhile.
        os.write(1, f"\n{mark} {status}\n".encode())


def set_variables(variables: dict[str, str | None]) -> None:
    """Change the environment of the stages that start from now on."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def restorable(stage: str) -> int:
    """0 if `dvc repro` would restore a changed stage from the run cache, 1 if it would run it.

    `dvc repro --dry` does not know: it takes the inputs' hashes from dvc.lock, not from the files.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            loaded = repo.stage.load_one(name=stage)
            if loaded.changed_stage() or not loaded.deps_cached():
                loaded.save_deps()  # in memory only; the outs of dvc.lock belong to other inputs
                for out in loaded.outs:
                    out.clear()
            repo.stage_cache.restore(loaded, dry=True)
    except DvcException:
        return 1
    return 0


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        status = INTERRUPTED
    os._exit(status)  # the flow waits for this process: it must not spend time on unloading DVC's modules

"""The failure file: why a stage ended, for the launcher or the flow that started it. No torch here.

It begins with the `stage` that runs, for a process that is killed cannot say so. The first process that fails
writes its reason there: `kind` (user or fault), `message` and `process`. What then fails in the others is a
consequence.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from rlhf_tasks.errors import LESS_MEMORY, UserError
from rlhf_tasks.project import atomic, disk
from rlhf_tasks.tracking import context

FAILURE = "RLHF_FAILURE_FILE"
OUT_OF_MEMORY = "a system that runs out of memory does so: its log (`dmesg`) tells"


def mistake(error: BaseException) -> str | None:
    """The message for a mistake that the user can fix; None for a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and disk.is_full(error):
        return disk.explain(error)
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        parents = Path(error.filename).absolute().parents if isinstance(error.filename, str) else ()
        folder = next((folder for folder in parents if folder.exists()), "a file system")
        return f"{folder} is read-only ({error}); mount it for writing, and run the same command again"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"{error}; set TMPDIR to a folder on a disk that has room"
    if isinstance(error, PermissionError):
        return f"{error}; give this user the right to read and write there"
    if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
        return f"the GPU is out of memory ({str(error).splitlines()[0]}); {LESS_MEMORY}"
    return None


def running(stage: str, *, stopped: str = "") -> None:
    """Write which stage runs, or "", for the program that started it; or by which signal it was `stopped`."""
    if not context.is_worker() and read_failure() is None:
        write({"stage": stage, "stopped": stopped}, replace=True)


def report(error: BaseException) -> None:
    """Write why this stage fails, for the program that started it; only the first report is kept."""
    kind, message = "user", mistake(error)
    if message is None:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        kind, message = "fault", f"{rank}{type(error).__name__}: {error}"
    write({"kind": kind, "message": message, "process": str(os.getpid())})


def report_killed(message: str) -> None:
    """Write that a worker was killed; the fault of another one is its consequence, and is replaced."""
    before = read_failure()
    if before is None or before["kind"] == "fault":
        write({"kind": "fault", "message": message, "process": str(os.getpid())}, replace=True)


def write(failure: Mapping[str, str], *, replace: bool = False) -> None:
    """Write a report, unless another process has reported a failure and this one does not `replace` it."""
    if FAILURE not in os.environ:
        return
    where = Path(os.environ[FAILURE])
    with FileLock(f"{where}.lock"):
        if replace or read_failure() is None:
            atomic.write_json(where, failure)


def read(where: Path) -> dict[str, str]:
    """The failure file; empty if no stage has begun or failed."""
    return dict(json.loads(where.read_text(encoding="utf-8"))) if where.is_file() else {}


def read_failure(where: Path | None = None) -> dict[str, str] | None:
    """The failure file, by default that of this process; None if nothing has failed."""
    report = read(where or Path(os.environ.get(FAILURE, "")))
    return report if "kind" in report else None


def has_failed_elsewhere() -> bool:
    """True in a worker if another one failed first: what fails or ends here then is a consequence."""
    failure = read_failure() if context.is_worker() else None
    return failure is not None and failure["process"] != str(os.getpid())

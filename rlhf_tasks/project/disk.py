"""A full disk, as one message: which folder is on it, how much was needed, and how much was free."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.filesize import decimal

from rlhf_tasks.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
SPACE = "No space left on device"  # in errors of Rust libraries, which have no number
NOTHING_FREE = 2**20  # bytes: with less free than this, a failed write has filled the disk
ADVICE = (
    "Make room, and run the same command again. `dvc gc -w` removes cached outputs that this working tree "
    "does not use, also those of other commits and experiments"
)
TEMPORARY = "Make room there, or set TMPDIR to a folder on a larger disk, and run the same command again"


class DiskFullError(UserError):
    """A disk has no room for what a stage writes."""


@contextmanager
def room(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Within the block, which only writes below `folder`, the error of a full disk becomes one message.

    Torch and safetensors raise errors without the reason, so that the free space decides.

    Raises:
        DiskFullError: if a write fails and the disk had less free than `needed`, or has nothing free now.
    """
    before = free(folder)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        most = needed()
        if is_full(error) or before < most or free(folder) < NOTHING_FREE:
            raise DiskFullError(message(folder, most, before)) from error
        raise


@contextmanager
def temporary(file: IO[Any]) -> Iterator[None]:
    """A `room` for a temporary file, which is closed when its disk is full: the report may need that room."""
    try:
        with room(Path(tempfile.gettempdir()), lambda: 0):
            yield
    except DiskFullError:
        with suppress(OSError):  # it writes the rest first
            file.close()
        raise


def is_full(error: BaseException) -> bool:
    """Whether an error says itself that a disk is full."""
    return (isinstance(error, OSError) and error.errno in FULL) or SPACE in str(error)


def explain(error: OSError) -> str:
    """The message for an error of a full disk that was not raised in a `room`."""
    if not isinstance(error.filename, str):
        return f"a disk is full ({error}). {ADVICE}"
    folder = Path(error.filename).absolute().parent
    return message(folder, 0, free(folder))


def free(folder: Path) -> int:
    """The bytes that this user can still write to the disk of a folder."""
    return shutil.disk_usage(_existing(folder)).free


def size(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def message(folder: Path, needed: int, free: int) -> str:
    """What a user reads; `needed` and `free` are bytes before the write, and 0 needed are not known."""
    wanted = f"at least {decimal(needed)} ({needed:,} bytes) needed, " if needed else ""
    advice = TEMPORARY if folder == Path(tempfile.gettempdir()) else ADVICE
    return f"the disk of {folder} is full: {wanted}{decimal(free)} free. {advice}"


def reserve(needs: Mapping[Path, int]) -> None:
    """Refuse to begin what writes so many bytes below these folders, some of which may be on one disk."""
    on_disk = Counter[int]()
    for folder, needed in needs.items():
        device = _existing(folder).stat().st_dev
        on_disk[device] += needed
        if on_disk[device] > free(folder):
            raise DiskFullError(message(folder, on_disk[device], free(folder)))


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())

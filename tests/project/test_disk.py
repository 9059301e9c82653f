"""A full disk is one message, whoever notices it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.project import atomic, disk

GB = 10**9


@pytest.mark.parametrize(
    ("error", "needed", "left", "message"),
    [
        (
            OSError(errno.ENOSPC, "No"),
            12_345_678,
            [2 * GB],
            r"12\.3 MB \(12,345,678 bytes\) needed, 2\.0 GB free\. M",
        ),
        # as torch's `unexpected pos` and safetensors' own error: the free space before and after says it
        (RuntimeError("iostream error"), 5 * GB, [4 * GB, 3 * GB], "at least"),
        (RuntimeError("another program filled it"), 5 * GB, [6 * GB, 1000], "at least"),
        (RuntimeError("shape"), 5 * GB, [6 * GB, 2 * GB], None),
    ],
)
def test_the_error_of_a_full_disk_names_the_folder_and_the_bytes_and_others_stay(
    error: Exception, needed: int, left: list[int], message: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    looks = list(left)
    monkeypatch.setattr(disk, "free", lambda folder: looks.pop(0))
    kind = RuntimeError if message is None else disk.DiskFullError
    text = "shape" if message is None else f"^the disk of {tmp_path} is full: .*{message}"
    with pytest.raises(kind, match=text), disk.room(tmp_path, lambda: needed):
        raise error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_does_not_fit_leaves_the_old_one(tmp_path: Path, number: int) -> None:
    with atomic.whole(tmp_path / "out") as folder:
        (folder / "old").touch()

    message = r"out is full: at least 1\.5 kB \(1,500 bytes\) needed"

    def fill_the_disk() -> None:
        with atomic.whole(tmp_path / "out") as folder:
            (folder / "new").write_bytes(b"x" * 1500)
            raise OSError(number, "full")

    with pytest.raises(disk.DiskFullError, match=message):
        fill_the_disk()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]

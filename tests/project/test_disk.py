"""A full disk is one message, whoever notices it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlhf_tasks.project import atomic, disk

GB = 10**9


def free(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Plant the free bytes of the disk, at one look after the other."""
    left = list(numbers)
    monkeypatch.setattr(disk, "free", lambda folder: left.pop(0))


def test_the_error_of_a_full_disk_names_the_folder_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 2 * GB)
    with (
        pytest.raises(disk.DiskFullError) as error,
        disk.room(tmp_path, lambda: 12_345_678),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    expected = (
        f"the disk of {tmp_path} is full: at least 12.3 MB (12,345,678 bytes) needed, 2.0 GB free. Make room"
    )
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("before", "after"), [(4 * GB, 3 * GB), (6 * GB, 1000)], ids=["too little", "another program filled it"]
)
def test_an_error_that_does_not_say_so_is_recognised_by_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """As torch's `unexpected pos` and safetensors' own error."""
    free(monkeypatch, before, after)
    with pytest.raises(disk.DiskFullError), disk.room(tmp_path, lambda: 5 * GB):
        raise RuntimeError("basic_ios::clear: iostream error")


def test_an_error_on_a_disk_with_room_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 6 * GB, 2 * GB)
    with pytest.raises(RuntimeError, match="shape"), disk.room(tmp_path, lambda: 5 * GB):
        raise RuntimeError("shape")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_does_not_fit_leaves_the_old_one(tmp_path: Path, number: int) -> None:
    with atomic.whole(tmp_path / "out") as folder:
        (folder / "old").touch()

    def fills_the_disk() -> None:
        with atomic.whole(tmp_path / "out") as folder:
            (folder / "new").write_bytes(b"x" * 1500)
            raise OSError(number, "full")

    with pytest.raises(disk.DiskFullError, match=r"out is full: at least 1\.5 kB \(1,500 bytes\) needed"):
        fills_the_disk()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]

"""Nothing half-written is ever taken for a finished output."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.project import atomic, disk


def test_a_folder_appears_complete_with_its_parents_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "models/sft"
    for name in ("old", "new"):
        with atomic.whole(target) as folder:
            (folder / name).touch()
            assert not (target / name).exists()
        assert [path.name for path in target.iterdir()] == [name]
    assert [path.name for path in target.parent.iterdir()] == ["sft"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_folder_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    with atomic.whole(tmp_path / "out") as folder:
        (folder / "old").touch()

    def breaks_off() -> None:
        with atomic.whole(tmp_path / "out") as folder:
            (folder / "new").touch()
            raise error

    with pytest.raises(error):
        breaks_off()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["out", "old"]


def test_folders_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-dead").mkdir()
    (tmp_path / ".output.partial-other").mkdir()  # of another path
    with atomic.whole(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".output.partial-other", "out"]


def test_two_writers_of_one_file_use_different_partial_files(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    texts = [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(atomic.write_text, [path] * 80, texts * 20))
    assert path.read_text(encoding="utf-8") in texts
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]


# ------------------------------------------------------------ A full disk is one message, whoever notices it


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


def test_a_line_of_which_the_disk_takes_a_part_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:3]))
    with pytest.raises(disk.DiskFullError):
        atomic.append_line(tmp_path / "replies.jsonl", '{"paid": true}')


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

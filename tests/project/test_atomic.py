"""Nothing half-written is ever taken for a finished output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_tasks.project import atomic


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

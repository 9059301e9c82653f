"""On a read-only file system a stage ends with one message; when it is writable again, the stage resumes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.test_full_disk import start
from tests.training.test_resume import workspace, written

pytestmark = pytest.mark.e2e
SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, place: str) -> Iterator[Path]:
    """The folder of a project, of which `place` is a file system of its own, in memory."""
    project = tmp_path / "project"
    (project / place).mkdir(parents=True)
    mount(project / place, "-t", "tmpfs", "-o", "size=50m", "tmpfs")
    yield project
    subprocess.run(["umount", "--lazy", project / place], check=True)


def mount(folder: Path, *words: str) -> None:
    done = subprocess.run(["mount", *words, folder], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user cannot mount a file system: {done.stderr.strip()}")


@pytest.mark.parametrize(
    "place", [".", pytest.param("models", marks=SLOW), pytest.param(".rlhf", marks=SLOW)]
)
def test_a_stage_in_a_read_only_folder_ends_with_one_message_and_keeps_the_old_result(
    place: str, trained: Path, tmp_path: Path, folder: Path
) -> None:
    """All of the project, the folder of its result, or that of its snapshots and records."""
    expected = workspace(trained, tmp_path / "expected")
    assert start("sft", expected).returncode == 0
    old = written("sft", workspace(trained, folder, **{"tracking.enabled": True}))
    mount(folder / place, "-o", "remount,ro")
    done = start("sft", folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("rlhf: ")]
    assert message.startswith(f"rlhf: {(folder / place).resolve()} is read-only (")
    assert written("sft", folder) == old
    mount(folder / place, "-o", "remount,rw")
    workspace(trained, folder)
    assert start("sft", folder).returncode == 0
    assert written("sft", folder) == written("sft", expected)

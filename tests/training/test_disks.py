"""On a file system that is too small or read-only, a stage ends with one message; later it goes on.

These tests need a user who may mount file systems in memory.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.data import rows
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.project import disk
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking.record import Record
from rlhf_tasks.training import checkpoint, failures
from tests import small
from tests.data.conftest import store
from tests.training.stages import loop
from tests.training.test_resume import workspace, written

STAGES = ("base", "sft", "reward", "ppo")


def mount(folder: Path, *words: str) -> None:
    done = subprocess.run(["mount", *words, folder], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user cannot mount a file system: {done.stderr.strip()}")


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte in memory."""
    folder = tmp_path / "little"
    folder.mkdir()
    mount(folder, "-t", "tmpfs", "-o", "size=1000k", "tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def snapshot(steps: int, floats: int) -> None:
    with loop() as snapshots:
        for step in range(1, steps + 1):
            snapshots.save(step, {"step": step, "shared": {"weights": torch.zeros(step * floats)}})


def test_a_snapshot_that_does_not_fit_leaves_those_before_it(
    project: Path, little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch raises a RuntimeError without the reason."""
    monkeypatch.setenv("RLHF_STATE_DIR", str(little))
    with pytest.raises(disk.DiskFullError) as error:
        snapshot(steps=9, floats=50_000)
    assert "at least 600.0 kB (600,000 bytes) needed" in str(error.value)
    assert checkpoint.point(Paths(), "sft") == "step 2 of loop"
    assert disk.size(next(little.rglob("*.partial"))) == 0, "it gives its room back"


def test_a_process_on_a_full_disk_leaves_the_files_that_another_one_is_writing(
    project: Path, little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It empties them: without its folder, the other one would fail for another reason."""
    monkeypatch.setenv("RLHF_STATE_DIR", str(little))
    dist, save = small.distributed(), torch.save

    def beside_another(part: Any, path: Path) -> None:
        path.with_name("rank-1.pt").write_bytes(b"half")
        save(part, path)

    monkeypatch.setattr(torch, "save", beside_another)
    with loop(dist=dist) as snapshots:
        monkeypatch.setattr(dist, "world_size", 2)
        monkeypatch.setattr(dist, "barrier", lambda: None)
        monkeypatch.setattr(dist, "max", lambda value: value)
        with pytest.raises(disk.DiskFullError):
            snapshots.save(1, {"step": 1, "shared": {"weights": torch.zeros(400_000)}})
    assert [path.name for path in little.rglob("*.partial/rank-1.pt")] == ["rank-1.pt"]
    assert disk.free(little) > 900_000, "it gives its room back"


def test_a_stage_says_from_where_it_resumes(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = tmp_path / "failure.json"
    monkeypatch.setenv(failures.FAILURE, str(failure))
    snapshot(steps=2, floats=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run(stage: str, *rest: object) -> int:
        monkeypatch.setattr(torch, "save", full)
        snapshot(steps=3, floats=1)
        return 0

    monkeypatch.setattr(runner, "_run", run)
    with pytest.raises(
        disk.DiskFullError, match=r"snapshot is intact, and the stage resumes from it: step 2 of loop$"
    ):
        runner.run("sft", Paths())
    report = failures.read_failure(failure)
    assert report is not None
    assert report["kind"] == "user"


def test_a_record_that_does_not_fit_is_the_same_message(little: Path) -> None:
    record = Record(little, "sft-1")
    record.begin({})
    (little / "rest").write_bytes(b"x" * disk.free(little))
    with pytest.raises(disk.DiskFullError, match=f"the disk of {little}/outbox is full"):
        record.append("event", name="a", text="b" * 10_000, step=1)
    assert record.file.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("what", ["rows to write", "rows to read", "tokens"])
def test_a_full_disk_of_temporary_files_is_named_with_tmpdir(
    what: str, project: Path, little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC's cache is elsewhere; the report, a temporary file too, has room again."""
    texts = pa.array([f"{i} {'word ' * 100}" for i in range(9000)])
    pq.write_table(pa.table({"prompt": texts, "completion": texts}), "rows.parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(little))
    monkeypatch.setenv(failures.FAILURE, str(little / "failure.json"))
    one = {"prompt": "word " * 100, "completion": "", "source": "a:1"}
    write: dict[str, Callable[[], object]] = {
        "rows to write": lambda: store({"sft": {"train": [one] * 9000}}),
        "rows to read": lambda: rows.read(Path("rows.parquet"), "sft", "train"),
        "tokens": lambda: Ragged([range(100_000)] * 9),
    }
    with pytest.raises(disk.DiskFullError) as error:
        write[what]()
    failures.report(error.value)
    assert f"the disk of {little} is full: " in str(error.value)
    assert "set TMPDIR to a folder on a larger disk" in str(error.value)
    assert "dvc" not in str(error.value)
    assert failures.read_failure() is not None


@pytest.mark.e2e
def test_a_stage_whose_tmpdir_is_on_a_small_disk_ends_with_one_message(
    trained: Path, tmp_path: Path, little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(little))
    folder = workspace(trained, tmp_path / "project", **{"data.source": "synthetic"})
    message = refusal(start("prepare", folder))
    assert message.startswith(f"rlhf: the disk of {little} is full: ")
    assert "set TMPDIR" in message


# ------------------------------------------------------------------------------- whole programs


def start(stage: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words, own = [sys.executable, "-m", "rlhf_tasks.cli", stage], {"OMP_NUM_THREADS": "1"}
    environment = os.environ | own | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one message of a stage that its user can help."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("rlhf: ")]
    return message


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("stage", "processes"), [(stage, 1) for stage in STAGES] + [("sft", 2)], ids=[*STAGES, "two-processes"]
)
def test_a_stage_on_a_full_disk_ends_with_one_message_and_resumes_to_the_same_bytes(
    stage: str, processes: int, trained: Path, tmp_path: Path, little: Path
) -> None:
    changes = {"launch.num_processes": processes}
    expected = workspace(trained, tmp_path / "expected", **changes)
    assert start(stage, expected).returncode == 0
    mount(little, "-o", "remount,size=20000k", "tmpfs")
    folder = workspace(trained, little / "project", **changes)
    used = 20_000 - disk.free(little) // 1024
    refused = 0
    for room in range(60, 6000, 150):
        mount(little, "-o", f"remount,size={used + room}k", "tmpfs")
        done = start(stage, folder)
        if done.returncode == 0:
            break
        assert "is full: " in refusal(done)
        refused += 1
    assert refused > 1
    assert written(stage, folder) == written(stage, expected)


@pytest.fixture
def folder(tmp_path: Path, place: str) -> Iterator[Path]:
    """The folder of a project, of which `place` is a file system of its own, in memory."""
    project = tmp_path / "project"
    (project / place).mkdir(parents=True)
    mount(project / place, "-t", "tmpfs", "-o", "size=50m", "tmpfs")
    yield project
    subprocess.run(["umount", "--lazy", project / place], check=True)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "place", [".", *(pytest.param(name, marks=pytest.mark.slow) for name in ("models", ".rlhf"))]
)
def test_a_stage_in_a_read_only_folder_ends_with_one_message_and_keeps_the_old_result(
    place: str, trained: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the project, the folder of its result, or that of its snapshots and records."""
    old = written("sft", workspace(trained, folder, **{"tracking.enabled": True}))
    mount(folder / place, "-o", "remount,ro")
    message = refusal(start("sft", folder))
    assert message.startswith(f"rlhf: {(folder / place).resolve()} is read-only (")
    assert written("sft", folder) == old
    mount(folder / place, "-o", "remount,rw")
    workspace(trained, folder)
    monkeypatch.chdir(folder)
    assert runner.run("sft", Paths()) == 0
    assert written("sft", folder) != old

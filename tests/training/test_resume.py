"""Killed at any moment, the same command ends with the same bytes and the same curves."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from filelock import FileLock
from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.config import VIEWS, SftView, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import tensors
from rlhf_tasks.project import durations, hashing, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training import auto, checkpoint
from rlhf_tasks.training.checkpoint import State
from tests import small, toy
from tests.ppo.toy import without_critic
from tests.training import layouts
from tests.training.stages import loop

SMALL: Mapping[str, Any] = {
    "model.scratch": {"hidden_size": 16, "num_layers": 2, "num_heads": 2},
    "base": {"num_epochs": 2.5, "batch_size": 8},
    "sft": {"num_epochs": 6.0, "batch_size": 8, "patience": 3, "learning_rate": 0.02},
    "reward": {"num_epochs": 2.0, "batch_size": 4},
    "ppo": {"total_episodes": 160, "rollout_batch_size": 16, "num_mini_batches": 2, "response_length": 8},
    "ppo.num_selections": 3,
    "ppo.num_selection_prompts": 8,
    "ppo.num_sample_generations": 3,
    "ppo.adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "ppo.ptx": {"coef": 0.1, "text": None},
    "ppo.score_scaling": {"subtract_mean": True, "clip": 2.0},
    "ppo.reference_sync": {"every": 2, "alpha": 0.5},
    "tracking.enabled": False,
    "resume.every_seconds": 1e-6,
}
WARM_UP: Mapping[str, Any] = {
    "ppo.advantages.critic.warmup": {"max_updates": 2, "settled": 0.9},
    "ppo.kl_penalty": {"beta": 1.0, "target": 1e-3},
}
SHARED: Mapping[str, Any] = {
    "ppo.advantages.critic.kind": "shared",
    "ppo.gradient_checkpointing": True,
    "ppo.lora": {"r": 2, "alpha": 4.0},
    "ppo.reference_sync": None,
}
DPO: Mapping[str, Any] = {
    "dpo": {"train": True, "loss": "kto", "num_epochs": 2.0, "batch_size": 4, "evals_per_epoch": 2},
    "dpo.num_selection_prompts": 8,
    "dpo.micro_batch_tokens": 64,
}
OUTS: Mapping[str, tuple[Path, ...]] = {
    "base": (Paths().base,),
    "sft": (Paths().sft,),
    "reward": (Paths().reward, Paths().reward_heldout),
    "dpo": (Paths().dpo,),
    "ppo": (Paths().policy, Paths().ppo_samples),
}


pytestmark = pytest.mark.usefixtures("snapshots_at_any_cost")


class Killed(BaseException):
    pass


def workspace(trained: Path, folder: Path, **changes: Any) -> Path:
    """A project of the shipped dvc.yaml with small data and models."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    shutil.copy(toy.ROOT / "dvc.yaml", folder)
    small.write_params(folder, {**SMALL, **changes})
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = workspace(trained, tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


def written(stage: str, folder: Path = Path()) -> dict[str, bytes]:
    """Every byte of the stage's checkpoints."""
    files = [file for out in OUTS[stage] for file in sorted((folder / out).iterdir())]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def run(stage: Stage, tracker: NullTracker | None = None) -> tuple[dict[str, float], list[dict[str, float]]]:
    """One stage in this process: its metrics and curves."""
    tracker = tracker or NullTracker(stage)
    return toy.run(stage, config.load(), tracker), tracker.history()


class Killing(NullTracker):
    """Ends the process after the snapshot of `step` of the held-out model: when the next step is logged."""

    def __init__(self, step: int) -> None:
        super().__init__("reward")
        self._step = step

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        if step > self._step and any(key.startswith("heldout/") for key in values):
            raise Killed
        super().metrics(values, step=step)


def test_reward_models_killed_in_the_second_one_are_resumed_to_the_same_bytes_and_curves(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_supervised.py` resumes the loop itself, at every kind of step."""
    monkeypatch.setenv("RLHF_STATE_DIR", "uninterrupted")
    expected, bytes_expected = run("reward"), written("reward")
    for out in OUTS["reward"]:
        shutil.rmtree(out)
    monkeypatch.setenv("RLHF_STATE_DIR", "killed")
    with pytest.raises(Killed):
        run("reward", Killing(step=2))
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert run("reward") == expected
    assert "reward_heldout: resumed from the snapshot after step 2\n" in capsys.readouterr().out
    assert written("reward") == bytes_expected


def test_a_stage_that_had_stopped_early_is_not_trained_further(here: Path, trained: Path) -> None:
    """It was killed after its patience ran out, before its weights were written."""
    fast = {"sft.learning_rate": 0.2, "sft.schedule": "constant", "sft.patience": 1}
    workspace(trained, here, **fast)
    expected = run("sft")
    assert expected[0]["steps_trained"] < 6 * 5, "this case stops early"
    shutil.rmtree(Paths().sft)
    assert run("sft") == expected


# ----------------------------------------------------------------------------------- snapshots


@pytest.fixture
def view(project: Path) -> SftView:
    """The view of stage sft, with a snapshot after every step."""
    settings = auto.resolve(config.load(), Path())
    quick = settings.resume.model_copy(update={"every_seconds": 1e-6, "keep": 2})
    return SftView.of(settings.model_copy(update={"resume": quick}))


def keep(view: SftView, *steps: int) -> None:
    with loop(view) as snapshots:
        for step in steps:
            snapshots.save(step, {"step": step, "shared": {"weights": torch.full((3,), float(step))}})


def loaded(view: SftView) -> State | None:
    with loop(view) as snapshots:
        return snapshots.load()


def step_of(view: SftView) -> int | None:
    """The step of the snapshot that would be resumed."""
    found = loaded(view)
    return None if found is None else found["step"]


def snapshots_of(project: Path) -> list[Path]:
    return sorted((project / ".rlhf/state/sft").glob("*/loop/*"))


def test_a_run_is_resumed_from_the_newest_of_the_last_k_snapshots(project: Path, view: SftView) -> None:
    assert loaded(view) is None
    keep(view, 1, 2, 10)
    found = loaded(view)
    assert found is not None
    assert found["step"] == 10
    assert found["shared"]["weights"].tolist() == [10.0] * 3
    assert [path.name for path in snapshots_of(project)] == ["step-000000002", "step-000000010"]


def test_the_point_of_resuming_is_that_of_the_newest_snapshot_of_the_same_parameters(
    project: Path, view: SftView
) -> None:
    assert checkpoint.point(Paths(), "sft") is None
    keep(view, 3, 7)
    assert checkpoint.point(Paths(), "sft") == "step 7 of loop"
    assert checkpoint.point(Paths(), "ppo") is checkpoint.point(Paths(), "report") is None
    first = snapshots_of(project)[0]
    os.utime(first, (time.time() + 9, time.time() + 9))
    assert checkpoint.point(Paths(), "sft") == "step 3 of loop", "the one that was saved last"
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text(encoding="utf-8"))
    params["sft"]["learning_rate"] = 6e-3
    with Path("params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(params, file)
    assert checkpoint.point(Paths(), "sft") is None


def change(file: Path, edit: Callable[[bytes], bytes]) -> None:
    file.write_bytes(edit(file.read_bytes()))


@pytest.mark.parametrize(
    "tear",
    [
        lambda snapshot: change(snapshot / "shared.pt", lambda content: content[:-10]),
        lambda snapshot: (snapshot / "rank-0.pt").unlink(),
        lambda snapshot: (snapshot / "manifest.json").write_text('{"step"', encoding="utf-8"),
    ],
)
def test_a_damaged_snapshot_is_reported_and_the_one_before_is_used(
    project: Path, view: SftView, tear: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    keep(view, 1, 2)
    tear(snapshots_of(project)[-1])
    assert step_of(view) == 1
    assert "step-000000002 is damaged" in capsys.readouterr().out
    tear(snapshots_of(project)[-1])
    assert loaded(view) is None


def test_a_half_written_snapshot_is_not_used(project: Path, view: SftView) -> None:
    keep(view, 1)
    half = snapshots_of(project)[0].with_name(".step-000000002.partial")
    half.mkdir()
    assert step_of(view) == 1
    keep(view, 3)
    assert not half.exists()


@pytest.fixture
def clock(view: SftView, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed: a copy in memory takes three, and snapshots are due each minute."""
    now, copy = [0.0], tensors.copy_to_cpu

    def slow(part: Any, copies: Any = None) -> Any:
        now[0] += 3.0 * (copies is None)
        return copy(part, copies)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tensors, "copy_to_cpu", slow)
    monkeypatch.setattr(checkpoint, "COPY_SHARE", 0.1)
    monkeypatch.setattr(checkpoint, "WAIT_SHARE", 0.02)
    object.__setattr__(view.resume, "every_seconds", 60.0)
    return now


def test_snapshots_are_as_often_as_set_where_the_disk_can_do_it_and_the_stage_says_what_a_kill_can_lose(
    view: SftView, clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one takes 62 seconds to write, during a step as long."""
    is_writing, go, sums = threading.Event(), threading.Event(), hashing.sha256_of_files

    def slow(*given: Any) -> dict[str, str]:
        is_writing.set()
        assert go.wait(60)
        return sums(*given)

    with loop(view) as snapshots:
        snapshots.reserve(0, 0)
        assert [snapshots.due() for clock[0] in (20.0, 59.0, 60.0)] == [False, False, True]
        snapshots.save(1, {})
        snapshots.wait()
        assert [snapshots.due() for clock[0] in (80.0, 119.0, 120.0)] == [False, False, True]
        monkeypatch.setattr(hashing, "sha256_of_files", slow)
        snapshots.save(2, {})
        assert is_writing.wait(60)
        clock[0] = 185.0
        assert not snapshots.due(), "it is not written yet"
        go.set()
        snapshots.wait()
        assert snapshots.due()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loop: a kill loses")]
    assert [line.partition(" a kill loses at most ")[2] for line in said] == [
        "1m00s of work, and the step and the snapshot in progress",
        "about 1m42s of work: a snapshot every 1m00s, steps of 39s, 3s to save one",
        "about 3m12s of work: a snapshot every 1m05s, steps of 1m02s, 1m05s to save one",
    ]


def test_where_training_waits_for_the_disk_it_does_so_for_a_fiftieth_of_the_time(
    view: SftView, clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the two files takes three seconds."""
    save = torch.save

    def slow(part: Any, file: Any) -> None:
        clock[0] += 3.0
        save(part, file)

    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(auto, "free_memory", lambda: 0)
    with loop(view) as snapshots:
        clock[0] = 60.0
        assert snapshots.due()
        snapshots.save(1, {})
        assert [snapshots.due() for clock[0] in (60.0 + 299.0, 60.0 + 300.0)] == [False, True]
    assert "about 6m06s of work: a snapshot every 5m00s, steps of 1m00s, 6s to" in capsys.readouterr().out


def test_a_snapshot_holds_its_step_though_training_goes_on_while_it_is_written(
    project: Path, view: SftView, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, sums = threading.Event(), hashing.sha256_of_files

    def slow(*given: Any) -> dict[str, str]:
        assert go.wait(60)
        return sums(*given)

    monkeypatch.setattr(hashing, "sha256_of_files", slow)
    weights = torch.zeros(3)
    with loop(view) as snapshots:
        snapshots.save(1, {"step": 1, "shared": {"weights": weights}})
        weights += 1
        assert [path.name for path in snapshots_of(project)] == [".step-000000001.partial"]
        go.set()
    found = loaded(view)
    assert found is not None
    assert found["shared"]["weights"].tolist() == [0.0] * 3


def test_without_room_in_memory_training_waits_for_the_disk(
    project: Path, view: SftView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "free_memory", lambda: 0)
    with loop(view) as snapshots:
        snapshots.save(1, {"step": 1})
        assert [path.name for path in snapshots_of(project)] == ["step-000000001"]


# ---------------------------------------------------------------------------------- mismatches


def test_snapshots_of_another_number_of_processes_are_an_error(project: Path, view: SftView) -> None:
    keep(view, 1)
    manifest = snapshots_of(project)[0] / "manifest.json"
    tree = json.loads(manifest.read_text(encoding="utf-8"))
    tree["made_by"]["launch.num_processes"] = 4
    manifest.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"differs in launch\.num_processes \(4 → 1\); undo this change, or remove"
    ):
        loaded(view)


def test_snapshots_of_other_parameters_and_inputs_are_an_error(project: Path, view: SftView) -> None:
    """The test renames the folder, because another digest means another folder."""
    keep(view, 1)
    [snapshot] = snapshots_of(project)
    was = view.sft.learning_rate
    (project / "data/sft/train.txt").write_text("other rows\n", encoding="utf-8")
    settings = auto.resolve(config.load(), Path())
    other = settings.model_copy(update={"sft": view.sft.model_copy(update={"learning_rate": 0.5})})
    changed = SftView.of(other)
    assert loaded(changed) is None
    identity = lineage.fingerprint(Paths(), "sft", changed.declared).flat()
    snapshot.parents[1].rename(checkpoint.state_folder(Paths(), "sft", identity))
    with pytest.raises(UserError, match=rf"sft\.learning_rate \({was} → 0\.5\), data/sft;"):
        loaded(changed)


def test_a_change_starts_from_the_beginning_and_prints_the_differences(
    project: Path, view: SftView, capsys: pytest.CaptureFixture[str]
) -> None:
    with checkpoint.claim(Paths(), view, main=True):
        keep(view, 1)
    (project / "code.py").write_text("changed = True\n", encoding="utf-8")
    with checkpoint.claim(Paths(), view, main=True):
        assert loaded(view) is None
    shown = capsys.readouterr().out
    assert "sft starts from the beginning. The snapshots of an unfinished run differ in code.py" in shown


# ------------------------------------------------------------------------------ claims and locks


def test_a_run_keeps_its_key_and_snapshots_until_dvc_has_stored_its_outs(view: SftView) -> None:
    """Another stage starts only after that; DVC that is killed earlier runs the same stage again."""
    with checkpoint.claim(Paths(), view, main=True) as first:
        pass
    with checkpoint.claim(Paths(), view, main=True) as second:
        keep(view, 1)
    for _ in range(2):
        with checkpoint.claim(Paths(), view, main=True) as third:
            assert loaded(view) is not None
            third.finish()
    with checkpoint.claim(Paths(), VIEWS["report"].of(config.load()), main=True):
        assert loaded(view) is None
    with checkpoint.claim(Paths(), view, main=True) as fourth:
        pass
    assert first.key != second.key, "the first saved no snapshot"
    assert second.key == third.key != fourth.key


def test_a_resumed_run_has_taken_the_time_of_its_parts_each_up_to_its_last_snapshot(view: SftView) -> None:
    """Of two loops, side by side or one after the other, it is the time of the stage."""

    def part(begins: float, **loops: float) -> float:
        """Claim the stage, and save snapshots of these loops at these times; returns the seconds before."""
        with checkpoint.claim(Paths(), view, main=True) as claim:
            assert claim.folder is not None
            os.utime(claim.folder / "earlier_seconds", (begins, begins))
            for name, time_saved in loops.items():
                with checkpoint.open_snapshots(small.distributed(), Paths(), view, name) as snapshots:
                    snapshots.save(1, {"step": 1})
                [snapshot] = (claim.folder / name).glob("step-*")
                os.utime(snapshot, (time_saved, time_saved))
        return claim.earlier_seconds

    assert part(1000.0) == 0.0
    assert part(2000.0, reward=2060.0, reward_heldout=2100.0) == 0.0, "the first saved no snapshot"
    assert part(5000.0, third=5030.0) == 100.0
    assert part(9000.0) == 130.0
    assert part(9500.0) == 130.0, "the fourth saved no snapshot"


def test_the_time_of_a_stage_is_that_of_all_its_parts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part began 1000 seconds before its last snapshot; it is resumed from that."""
    monkeypatch.setenv("RLHF_STATE_DIR", "state")
    assert runner.run("sft", Paths()) == 0
    first = durations.read(Paths().home)["sft"]
    [begun] = here.glob("state/sft/*/earlier_seconds")
    newest = max(file.stat().st_mtime for file in begun.parent.glob("sft/step-*"))
    os.utime(begun, (newest - 1000.0, newest - 1000.0))
    assert runner.run("sft", Paths()) == 0
    assert 1000.0 <= durations.read(Paths().home)["sft"] < 1000.0 + 60.0 + first


@pytest.mark.parametrize(
    ("is_held", "made_in", "is_kept"),
    [
        (False, ".", False),
        (False, "..", True),
        (False, "gone", False),
        (True, ".", True),
    ],
)
def test_finished_snapshots_are_removed_by_their_own_worktree_and_never_beside_a_run(
    is_held: bool, made_in: str, is_kept: bool, view: SftView, project: Path
) -> None:
    """Of a worktree that is gone, any stage removes them; DVC of another one may not have stored its outs."""
    with checkpoint.claim(Paths(), view, main=True) as claim:
        keep(view, 1)
        claim.finish()
    assert claim.folder is not None
    (claim.folder / "finished").write_text(str((project / made_in).resolve()))
    lock = FileLock(claim.folder.with_suffix(".lock")) if is_held else nullcontext()
    with lock, checkpoint.claim(Paths(), VIEWS["report"].of(config.load()), main=True):
        assert claim.folder.exists() == is_kept


def test_a_second_process_with_the_same_training_waits_for_the_first(
    view: SftView, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    claimed = threading.Event()

    def train_elsewhere() -> None:
        with checkpoint.claim(Paths(), view, main=True):
            claimed.set()
            time.sleep(0.3)
            order.append("other")

    thread = threading.Thread(target=train_elsewhere)
    thread.start()
    assert claimed.wait(10)
    with checkpoint.claim(Paths(), view, main=True):
        order.append("this")
    thread.join()
    assert order == ["other", "this"]
    assert "another process trains with the same parameters, code and inputs" in capsys.readouterr().out


# ------------------------------------------------------------------------------ whole programs


def start(stage: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RLHF_STATE_DIR": str(folder / "state")}
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_tasks.cli", stage],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def finish(stage: str, folder: Path) -> dict[str, Any]:
    """Run to the end: `results`."""
    assert start(stage, folder).wait(300) == 0
    return results(stage, folder)


def results(stage: str, folder: Path) -> dict[str, Any]:
    """Checkpoints, metrics and curves without times of a stage that has ended."""
    assert list((folder / "state").glob("*/*/finished")), "the next stage may remove the snapshots"
    metrics = json.loads((folder / f"metrics/{stage}.json").read_text(encoding="utf-8"))
    with (folder / f"plots/{stage}.csv").open(encoding="utf-8", newline="") as file:
        rows = [metrics, *csv.DictReader(file)]
    untimed = [{k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in rows]
    return written(stage, folder) | {"metrics and curves": untimed}


def newest(folder: Path) -> str:
    return max((path.name for path in (folder / "state").glob("*/*/*/step-*")), default="")


def await_snapshot(folder: Path, process: subprocess.Popen[bytes], before: str = "") -> None:
    """Wait for a newer snapshot than `before`."""
    deadline = time.monotonic() + 120
    while newest(folder) == before:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(60) == 143


@pytest.mark.e2e
def test_sft_killed_by_sigkill_ends_with_the_same_bytes(
    here: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_STATE_DIR", "state")
    with small.threads(1):
        assert runner.run("sft", Paths()) == 0
    folder = workspace(trained, tmp_path / "killed")
    process = start("sft", folder)
    await_snapshot(folder, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "metrics/sft.json").exists()
    assert finish("sft", folder) == results("sft", here)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        *(("sft", {"launch.parallelism": layout}) for layout in ("ddp", "zero2", "zero3", "fsdp2")),
        *(("reward", {"launch.parallelism": layout}) for layout in ("zero3", "fsdp2")),
        *(("dpo", {**DPO, "launch.parallelism": layout}) for layout in ("ddp", "zero3", "fsdp2")),
        ("ppo", WARM_UP),
        *(("ppo", {**WARM_UP, "launch.parallelism": layout}) for layout in ("zero2", "zero3", "fsdp2")),
        *(
            ("ppo", {**WARM_UP, "launch.parallelism": layout, "launch.offload": True})
            for layout in ("zero3", "fsdp2")
        ),
        ("ppo", SHARED),
        ("ppo", {f"ppo.{key}": value for key, value in without_critic("rloo").items()}),
    ],
)
def test_two_processes_are_resumed_to_the_same_bytes(
    stage: Stage, changes: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    """In PPO one worker is killed, which ends the other; else their launcher. Later all receive SIGTERM."""

    def made(name: str) -> Path:
        folder = workspace(trained, tmp_path / name, **{"launch.num_processes": 2, **changes})
        shutil.copytree(toy.ROOT / "infra/deepspeed", folder / "infra/deepspeed")
        layouts.partition_small_weights(folder)
        return folder

    expected, folder = finish(stage, made("uninterrupted")), made("killed")
    process = start(stage, folder)
    await_snapshot(folder, process)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [one for one in children if "LOCAL_RANK" in one.environ()]
    assert len(workers) == 2
    if stage == "ppo":
        workers[1].kill()
    else:
        for worker in children if changes["launch.parallelism"].startswith("zero") else []:
            worker.kill()  # else they notice that their launcher is gone, and end
        process.kill()
    assert process.wait(60) != 0
    [lock] = (folder / f"state/{stage}").glob("*.lock")
    with FileLock(lock, timeout=60):
        before = newest(folder)
    process = start(stage, folder)
    await_snapshot(folder, process, before)
    terminate(process)
    assert finish(stage, folder) == expected

"""A long run: `python -m benchmarks.soak`. Memory and open files stay flat, and the disk is bounded.

`rlhf ppo` takes 2,000 updates of a model of a few thousand weights, with tracking, snapshots, evaluations and
guards, as a user would run it. Beside it, this program samples the resident memory and the open files of the
stage, and the bytes that it writes. The first quarter of the run fills caches. The mean of the last quarter
may exceed that of the second one by 2%, for memory and for open files. Snapshots and record hold the curves,
so that they grow by DISK at most with each update. Exit status 1 if one of them grows by more.
Writes the second part of docs/results/faults.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ruamel.yaml import YAML

from benchmarks import faults
from tests import small

ROOT = Path(__file__).parents[1]
ROLLOUT = 8
ALLOWED = 0.02
DISK: Mapping[str, float] = {"snapshots": 2_000.0, "record": 25_000.0}
"""The bytes that may be added in an update: a row of the curves, with an index in MLflow's store. Snapshots
that are not removed add more."""
NAMES: Mapping[str, tuple[str, float]] = {
    "memory": ("memory of the stage, MB", 1e6), "files": ("open files", 1),
    "snapshots": ("snapshots, KB", 1e3), "record": ("record and MLflow's store, KB", 1e3),
}  # fmt: skip
"""The name of a row of the table, and its unit."""
EVERY_SECONDS = 0.5
TERMINATED = 143
CHANGES: Mapping[str, Any] = {
    "data.max_prompt_tokens": 80, "ppo.rollout_batch_size": ROLLOUT, "ppo.num_mini_batches": 1,
    "ppo.num_ppo_epochs": 1, "ppo.response_length": 4, "ppo.num_sample_generations": 20,
    "ppo.num_selections": 20, "ppo.num_selection_prompts": 8, "ppo.guards.action": "warn",
    "ppo.learning_rate": 1e-5, "resume.every_seconds": 5.0,
}  # fmt: skip


class Sample(NamedTuple):
    """What the stage holds at one moment."""

    memory: int
    files: int
    snapshots: int
    """Bytes of the snapshots; those that are being written or removed are left out."""
    record: int
    """Bytes of everything else that it writes."""
    step: int
    """The update of the newest snapshot."""


class Change(NamedTuple):
    """A mean of the second quarter of the samples, and of the last one."""

    before: float
    after: float

    @property
    def growth(self) -> float:
        return self.after / self.before - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, done or not")
    options, start = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        samples = run(Path(folder), options.updates, 60 * options.minutes)
    if len(samples) < 4:
        sys.exit(
            f"{len(samples)} samples are too few to compare quarters of them; raise --updates or --minutes"
        )
    seconds = time.monotonic() - start
    updates = options.updates if seconds < 60 * options.minutes else max(one.step for one in samples)
    text = section(changes(samples), updates, seconds)
    faults.write_long_run(text)
    print(text)
    failed = problems(changes(samples))
    print("\n".join(failed) or "all within their bounds")
    return int(bool(failed))


def run(folder: Path, updates: int, seconds: float) -> Sequence[Sample]:
    """Samples of a run of stage ppo from its first snapshot, in equal intervals; it ends after `seconds`."""
    small.workspace(folder)
    tree = small.params({**CHANGES, "ppo.total_episodes": ROLLOUT * updates})
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(tree, file)
    shutil.copy(ROOT / "dvc.yaml", folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    words = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    samples = []
    with (folder / "log").open("wb") as log:
        stage = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + seconds
        while stage.poll() is None and time.monotonic() < end:
            time.sleep(EVERY_SECONDS)
            samples.append(sample(psutil.Process(stage.pid), folder))
    except psutil.NoSuchProcess:
        pass
    finally:
        if stage.poll() is None:
            stage.terminate()
    if stage.wait() not in (0, TERMINATED):
        sys.exit(f"rlhf ppo failed:\n{(folder / 'log').read_text(encoding='utf-8')[-2000:]}")
    return [one for one in samples if one.memory and one.snapshots]


def sample(stage: psutil.Process, folder: Path) -> Sample:
    sizes = {file: size(file) for file in files(folder)}
    state = folder / ".rlhf/state"
    in_state = {file: count for file, count in sizes.items() if file.is_relative_to(state)}
    snapshots = sum(count for file, count in in_state.items() if file.parent.name.startswith("step-"))
    record = sum(sizes.values()) - sum(in_state.values())
    steps = [file.parent.name for file in in_state if file.parent.name.startswith("step-")]
    step = int(max(steps, default="step-0").removeprefix("step-"))
    return Sample(stage.memory_info().rss, stage.num_fds(), snapshots, record, step)


def files(folder: Path) -> Iterator[Path]:
    """All files below; unlike `Path.rglob`, it leaves out folders that are removed meanwhile."""
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names)


def size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def changes(samples: Sequence[Sample]) -> Mapping[str, Change]:
    quarter = len(samples) // 4
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: Change(*(statistics.fmean(getattr(one, name) for one in part) for part in parts))
        for name in Sample._fields
    }


def rates(found: Mapping[str, Change]) -> Mapping[str, float]:
    """The bytes that an update adds to the disk."""
    steps = max(1.0, found["step"].after - found["step"].before)
    return {name: (found[name].after - found[name].before) / steps for name in DISK}


def problems(found: Mapping[str, Change]) -> Sequence[str]:
    """What grew by more than is allowed."""
    flat = [
        f"{name} grew by {found[name].growth:.1%}, and {ALLOWED:.0%} is allowed"
        for name in ("memory", "files")
        if found[name].growth > ALLOWED
    ]
    return flat + [
        f"{name} grew by {rate:.0f} bytes an update, and {DISK[name]:.0f} are allowed"
        for name, rate in rates(found).items()
        if rate > DISK[name]
    ]


SECTION = """
`python -m benchmarks.soak` takes updates of a model of a few thousand weights with `rlhf ppo`, with
tracking, snapshots every {every:g} seconds, {looks} evaluations and guards. It compares the second quarter
of the run with the last one, and fails if something grows by more than is allowed. It took {updates:,}
updates in {seconds:.0f} seconds, on {cores} cores of this processor: {processor}.

{table}

The disk grows with the curves: snapshots and record hold a row of them for each update.
"""


def section(found: Mapping[str, Change], updates: int, seconds: float) -> str:
    """The part of the page."""
    return SECTION.format(
        every=CHANGES["resume.every_seconds"], looks=CHANGES["ppo.num_selections"], updates=updates,
        seconds=seconds, cores=os.cpu_count(), processor=processor(), table=table(found),
    )  # fmt: skip


def processor() -> str:
    """The processor's name, from Linux where it is to be had."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(found: Mapping[str, Change]) -> str:
    """A row for each thing that may grow."""
    lines = ["| | second quarter | last quarter | growth | allowed |", "|---" * 5 + "|"]
    for name, (title, unit) in NAMES.items():
        change, rate = found[name], rates(found).get(name)
        grown, allowed = f"{change.growth:+.1%}", f"{ALLOWED:.0%}"
        if rate is not None:
            grown, allowed = (f"{x / 1e3:.1f} KB an update" for x in (rate, DISK[name]))
        lines.append(
            f"| {title} | {change.before / unit:,.2f} | {change.after / unit:,.2f} | {grown} | {allowed} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

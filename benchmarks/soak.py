"""A long run: `python -m benchmarks.soak`. Memory and open files stay flat, and the disk is bounded.

`rlhf ppo` takes 2,000 updates of a model of a few thousand weights, with tracking, snapshots, evaluations and
guards, as a user would run it. Beside it, this program samples the resident memory and the open files of the
stage, and the bytes that it writes, as long as updates are taken: at its end a stage draws its curves, for
which it loads matplotlib. The first quarter of the updates fills caches. The mean of the last quarter may
exceed that of the second one by 2%, for memory and for open files. Snapshots and record hold the curves,
so that they may grow by the bytes of DISK with each update. Exit status 1 if one of them grows by more.
Prints the table of docs/results/faults.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ruamel.yaml import YAML

from tests import small

ROOT = Path(__file__).parents[1]
ROLLOUT = 8
ALLOWED = 0.02
DISK: Mapping[str, float] = {"snapshots": 2_000.0, "record": 25_000.0}
"""The bytes that may be added in an update: a row of the curves, with an index in MLflow's store. Snapshots
that are not removed add more."""
NAMES: Mapping[str, tuple[str, float]] = {
    "memory": ("memory of the stage, MB", 1e6),
    "files": ("open files", 1),
    "snapshots": ("snapshots, KB", 1e3),
    "record": ("record and MLflow's store, KB", 1e3),
}
"""The name of a row of the table, and its unit."""
EVERY_SECONDS = 0.5
POINT = re.compile(rb'"kind": "metrics", "time": \d+, "step": (\d+)')  # a line of the record
TAIL = 100_000  # bytes of the record, which have several points
CHANGES: Mapping[str, Any] = {
    "data.max_prompt_tokens": 80,
    "ppo.rollout_batch_size": ROLLOUT,
    "ppo.num_mini_batches": 1,
    "ppo.num_ppo_epochs": 1,
    "ppo.response_length": 4,
    "ppo.num_sample_generations": 20,
    "ppo.num_selections": 20,
    "ppo.num_selection_prompts": 8,
    "ppo.guards.action": "warn",
    "ppo.learning_rate": 1e-5,
    "resume.every_seconds": 5.0,
}


class Sample(NamedTuple):
    """What the stage holds at one moment."""

    memory: int
    files: int
    snapshots: int
    """Bytes of the snapshots; those that are being written or removed are left out."""
    record: int
    """Bytes of everything else that it writes."""
    step: int
    """The newest update of the record."""


def run(folder: Path, updates: int) -> Sequence[Sample]:
    """Samples of a run of stage ppo from its first snapshot to its last update, in equal intervals."""
    small.workspace(folder)
    tree = small.params({**CHANGES, "ppo.total_episodes": ROLLOUT * updates})
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(tree, file)
    shutil.copy(ROOT / "dvc.yaml", folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    words, samples = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"], []
    with (folder / "log").open("wb") as log:
        stage = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        while stage.poll() is None:
            time.sleep(EVERY_SECONDS)
            samples.append(sample(psutil.Process(stage.pid), folder))
    except psutil.NoSuchProcess:  # it has ended
        pass
    finally:
        stage.terminate()
    if stage.wait():
        sys.exit(f"rlhf ppo failed:\n{(folder / 'log').read_text(encoding='utf-8')[-2000:]}")
    return [one for one in samples if one.memory and one.snapshots and one.step < updates]


def sample(stage: psutil.Process, folder: Path) -> Sample:
    snapshots = record = step = 0
    # Unlike `Path.rglob`, os.walk leaves out folders that are removed meanwhile.
    for file in [Path(where, name) for where, _, names in os.walk(folder) for name in names]:
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            continue
        if file.parent.name.startswith("step-"):
            snapshots += size
        elif file.match("outbox/ppo-*.jsonl"):
            record += size
            with file.open("rb") as lines:
                lines.seek(max(0, size - TAIL))
                step = max([int(one) // ROLLOUT for one in POINT.findall(lines.read())], default=0)
        elif not file.is_relative_to(folder / ".rlhf/state"):
            record += size
    return Sample(stage.memory_info().rss, stage.num_fds(), snapshots, record, step)


def report(samples: Sequence[Sample]) -> list[str]:
    """Print the table; returns the names of what grew by more than is allowed."""
    quarter, failed = len(samples) // 4, []
    before, after = (
        {name: statistics.fmean(getattr(one, name) for one in part) for name in Sample._fields}
        for part in (samples[quarter : 2 * quarter], samples[-quarter:])
    )
    print("| | second quarter | last quarter | growth | allowed |", "|---" * 5 + "|", sep="\n")
    for name, (title, unit) in NAMES.items():
        growth, most, form = after[name] / before[name] - 1, ALLOWED, "{:+.1%}"
        if name in DISK:
            growth = (after[name] - before[name]) / max(1.0, after["step"] - before["step"])
            most, form = DISK[name], "{:,.0f} bytes an update"
        failed += [name] if growth > most else []
        numbers = f"{before[name] / unit:,.2f} | {after[name] / unit:,.2f}"
        print(f"| {title} | {numbers} | {form.format(growth)} | {form.format(most)} |")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=2000)
    options, start = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        samples = run(Path(folder), options.updates)
    if len(samples) < 4:
        sys.exit(f"{len(samples)} samples are too few to compare quarters of them; raise --updates")
    failed = report(samples)
    print(f"{options.updates:,} updates in {time.monotonic() - start:.0f} seconds")
    print(f"{', '.join(failed)} grew by more than is allowed" if failed else "all within their bounds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Measures what Prefect, DVC and MLflow add to the time of a stage: `python -m benchmarks.glue`.

The benchmark clones the committed state and applies a preset. It runs every stage alone (`rlhf STAGE`),
without tracking, and then the pipeline in the service, once per seed. A stage's glue is the time of its task,
from Pending to Completed, minus its time alone. Then each run is repeated twice:
at the commit of its experiment, where nothing is to be done, and at the commit below, where DVC restores
every out from its cache. It prints a table of medians over the seeds. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_tasks.project import dvc_files, git
from tests.flows import toy
from tests.flows.toy import Service


def clone(folder: Path, preset: str) -> Path:
    """Clone the committed state, apply a preset and commit it."""
    subprocess.run(["git", "clone", "--quiet", str(toy.ROOT), str(folder)], check=True)
    toy.identify(folder)
    rlhf(folder, "preset", preset)
    toy.commit(folder)
    return folder


def rlhf(folder: Path, *words: str) -> float:
    """Run a command with the clone's code; returns the seconds it takes."""
    environment = toy.environment() | {"PYTHONPATH": str(folder)}
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "rlhf_tasks.cli", *words],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - start


def alone(folder: Path, seed: int) -> dict[str, float]:
    """`{stage: seconds}` of the stages, one after the other, without a service."""
    rlhf(folder, "preset", f"seed={seed}", "tracking.enabled=false")
    return {stage: rlhf(folder, stage) for stage in dvc_files.graph(folder)}


def seconds(states: Sequence[dict[str, Any]], since: str) -> float:
    """The time from a run's first state of this type to its end."""
    times = sorted((datetime.fromisoformat(s["timestamp"]), s["type"]) for s in states)
    start = next(when for when, kind in times if kind == since)
    return (times[-1][0] - start).total_seconds()


def flow(service: Service, **parameters: Any) -> tuple[float, dict[str, float]]:
    """Run the deployment; returns the seconds of the run, and of each of its tasks."""
    run = service.start(**parameters)
    assert service.end(run)["type"] == "COMPLETED", service.logs(run)
    time.sleep(toy.RECORDED_SECONDS)
    whole = seconds(service.call("GET", f"/flow_run_states/?flow_run_id={run}"), "RUNNING")
    tasks = service.call("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return whole, {
        task["name"]: seconds(service.call("GET", f"/task_run_states/?task_run_id={task['id']}"), "PENDING")
        for task in tasks
    }


def table(stages: Sequence[dict[str, float]], tasks: Sequence[dict[str, float]]) -> list[str]:
    """A row per stage: the medians of its times, and of the differences, in seconds."""
    lines = ["| stage | alone | in the flow | glue |", "|---|---|---|---|"]
    for stage in stages[0]:
        own, task = (statistics.median(run[stage] for run in runs) for runs in (stages, tasks))
        glue = statistics.median(run[stage] - base[stage] for run, base in zip(tasks, stages, strict=True))
        lines.append(f"| {stage} | {own:.1f} | {task:.1f} | {glue:+.1f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--preset", default="smoke", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    seeds = range(101, 101 + options.runs)
    with tempfile.TemporaryDirectory() as work:
        root = clone(Path(work) / "project", options.preset)
        folders = [clone(Path(work) / f"alone-{seed}", options.preset) for seed in seeds]
        stages = [alone(folder, seed) for folder, seed in zip(folders, seeds, strict=True)]
        start = time.monotonic()
        with toy.service(root) as service:
            up = time.monotonic() - start
            ran = [flow(service, seed=seed, name=f"glue-{seed}") for seed in seeds]
            commits = [git.find_experiment(root, f"glue-{seed}") for seed in seeds]
            unchanged = [flow(service, revision=commit)[0] for commit in commits]
            restored = [flow(service, seed=seed)[0] for seed in seeds]
    print(f"{options.preset}, {options.runs} seed(s), {os.cpu_count()} cores, medians in seconds", end="\n\n")
    print(*table(stages, [tasks for _, tasks in ran]), sep="\n")
    whole = statistics.median(whole - sum(tasks.values()) for whole, tasks in ran)
    print(f"\nflow without its tasks (workspace, experiment, artifacts): {whole:.1f}")
    print(f"run in which nothing changed, from Running to Completed: {statistics.median(unchanged):.1f}")
    print(
        f"run that DVC restores from its cache, from Running to Completed: {statistics.median(restored):.1f}"
    )
    print(f"make up: {up:.1f}")


if __name__ == "__main__":
    main()

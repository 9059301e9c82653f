"""What Prefect, DVC and MLflow cost over the stages' own time: `python -m tests.benchmarks.glue [--runs 3]`.

In a clone of the committed state with a preset, every stage is run bare (`rlhf STAGE`, nothing tracked), and
then by the service: `make up` on free ports, and a run of the deployment `rlhf-pipeline/pipeline` per seed. A
stage's glue is its task's time, from Pending to Completed, less its bare time. Then each run is asked for
again, from Running to Completed twice: of its experiment's commit, in which nothing is to be done, and of the
commit below, for which DVC has all outs in its run cache. Prints a table of medians over the seeds. The
machine is to have nothing else to do; the clone is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_tasks.project import dvc_files, experiments
from tests.flows import toy
from tests.flows.toy import Service


def clone(folder: Path, preset: str) -> Path:
    """The committed state under another preset, committed."""
    subprocess.run(["git", "clone", "--quiet", str(toy.ROOT), str(folder)], check=True)
    toy.identify(folder)
    rlhf(folder, "preset", preset)
    toy.commit(folder)
    return folder


def rlhf(folder: Path, *words: str) -> float:
    """Seconds that a command takes, with the code of the clone."""
    environment = toy.environment() | {"PYTHONPATH": str(folder)}
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "rlhf_tasks.cli", *words],
        cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.monotonic() - began


def bare(folder: Path, seed: int) -> dict[str, float]:
    """`{stage: seconds}` of the stages alone, one after the other."""
    file = folder / "params.yaml"
    text = file.read_text(encoding="utf-8")
    changed = re.sub(r"^seed: \d+", f"seed: {seed}", text, count=1, flags=re.MULTILINE)
    file.write_text(changed.replace("  enabled: true", "  enabled: false"), encoding="utf-8")
    try:
        return {stage: rlhf(folder, stage) for stage in dvc_files.graph(folder)}
    finally:
        file.write_text(text, encoding="utf-8")


def seconds(states: Sequence[dict[str, Any]], since: str) -> float:
    """From the first state of this type to the end, by a run's states."""
    times = sorted((datetime.fromisoformat(s["timestamp"]), s["type"]) for s in states)
    began = next(when for when, kind in times if kind == since)
    return (times[-1][0] - began).total_seconds()


def flow(service: Service, **parameters: Any) -> tuple[float, dict[str, float]]:
    """Seconds of a run of the deployment, and of each of its tasks."""
    run = service.start(**parameters)
    assert service.end(run)["type"] == "COMPLETED", service.logs(run)
    time.sleep(toy.RECORDED_SECONDS)
    whole = seconds(service.call("GET", f"/flow_run_states/?flow_run_id={run}"), "RUNNING")
    tasks = service.call("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return whole, {
        task["name"]: seconds(service.call("GET", f"/task_run_states/?task_run_id={task['id']}"), "PENDING")
        for task in tasks
    }


def table(alone: Sequence[dict[str, float]], ran: Sequence[dict[str, float]]) -> list[str]:
    """A line per stage: bare, as a task, and what lies between, medians in seconds."""
    lines = ["| stage | bare | in the flow | glue |", "|---|---|---|---|"]
    for stage in alone[0]:
        own = statistics.median(run[stage] for run in alone)
        task = statistics.median(run[stage] for run in ran)
        glue = statistics.median(f[stage] - a[stage] for f, a in zip(ran, alone, strict=True))
        lines.append(f"| {stage} | {own:.1f} | {task:.1f} | {glue:.1f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="seeds (default: %(default)s)")
    parser.add_argument("--preset", default="smoke", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    seeds = range(101, 101 + options.runs)
    with tempfile.TemporaryDirectory() as work:
        root = clone(Path(work) / "project", options.preset)
        alone = [bare(clone(Path(work) / f"bare-{seed}", options.preset), seed) for seed in seeds]
        began = time.monotonic()
        with toy.service(root) as service:
            up = time.monotonic() - began
            ran = [flow(service, seed=seed, name=f"glue-{seed}") for seed in seeds]
            commits = [experiments.find(root, f"glue-{seed}") for seed in seeds]
            unchanged = [flow(service, revision=commit)[0] for commit in commits]
            restored = [flow(service, seed=seed)[0] for seed in seeds]
    print(f"{options.preset}, {options.runs} seed(s), {os.cpu_count()} cores, medians in seconds", end="\n\n")
    print(*table(alone, [tasks for _, tasks in ran]), sep="\n")
    whole = statistics.median(whole - sum(tasks.values()) for whole, tasks in ran)
    print(f"\nflow beside its tasks (workspace, experiment, artifacts): {whole:.1f}")
    print(f"run in which nothing has changed, from Running to Completed: {statistics.median(unchanged):.1f}")
    print(f"run that DVC's run cache has, from Running to Completed: {statistics.median(restored):.1f}")
    print(f"make up: {up:.1f}")


if __name__ == "__main__":
    main()

"""`rlhf bench`: what PPO of params.yaml costs on this machine, before a run is paid for."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks import config, console
from rlhf_tasks.benchmark.shapes import SHAPES
from rlhf_tasks.cli.arguments import Commands, add_command, positive_int

if TYPE_CHECKING:
    from rlhf_tasks.benchmark.measurement import Measurement


def add(commands: Commands) -> None:
    bench = add_command(
        commands, "bench", run, "measure PPO on this machine, and estimate the time of its stage",
        "Take a few updates of PPO as params.yaml has it, and print speed, memory and an estimate for the "
        "whole stage ppo. It uses models/sft, models/reward and data/prompts where they exist, and random "
        "ones elsewhere. It changes nothing in the project.",
    )  # fmt: skip
    bench.add_argument(
        "shape", nargs="?", choices=SHAPES, metavar="SHAPE",
        help=f"a named shape instead of params.yaml: {', '.join(SHAPES)} (D needs a GPU)",
    )  # fmt: skip
    bench.add_argument(
        "--updates", type=positive_int, default=3, metavar="N",
        help="number of updates to measure, after one to warm up (default: 3)",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    settings = config.load()
    console.set_quiet(options.json)
    result = measured(settings, Path(), options.shape, options.updates)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    expected = result.pop("estimate")
    rows = [[name.replace("_", " "), "not measured" if v is None else v] for name, v in result.items()]
    console.table(f"PPO of {options.shape or 'params.yaml'}", ["", "measured"], rows)
    if expected is not None:
        total = console.duration(expected["total_seconds"])
        console.say(f"stage ppo will take about {total} for {expected['updates']} updates on this machine")
    return 0


def measured(settings: config.Config, root: Path, shape: str | None, num_updates: int) -> dict[str, Any]:
    """What `--json` prints: a measurement, with `estimate` for the stage (null for a named shape)."""
    from rlhf_tasks.benchmark import measurement, workloads
    from rlhf_tasks.training.distributed import Distributed

    launch = settings.launch
    if shape is not None:
        workloads.check_device(SHAPES[shape])
        launch = launch.model_copy(update={"precision": SHAPES[shape].precision})
    dist = Distributed(launch, settings.seed)
    with tempfile.TemporaryDirectory() as scratch:
        if shape is not None:
            work = workloads.of_shape(dist, settings.ppo, SHAPES[shape], num_updates + 1)
        else:
            work = workloads.of_params(dist, settings, root, Path(scratch), num_updates + 1)
        found: Measurement = measurement.measure(work)
    expected = None if shape is not None else measurement.estimate(found, settings.ppo)
    return {**found.asdict(), "estimate": expected}

"""How PPO's speed depends on four sizes, as a figure: `python -m tests.benchmarks.growth`.

Each line changes one size of shape A and keeps the others. Both axes are logarithmic, so a cost that is
proportional to a size is a straight line that falls by one decade per decade. Writes docs/pictures/growth.png
and prints a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

from rlhf_tasks.benchmark import measurement, workloads
from rlhf_tasks.benchmark.shapes import SHAPES, Shape
from tests import small

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

AXES: Mapping[str, Sequence[int]] = {
    "batch": (16, 32, 64, 128),
    "response": (16, 32, 64, 128),
    "vocab": (1024, 4096, 16384, 65536),
    "hidden": (64, 128, 256, 512),
}
LABELS = {
    "batch": "episodes per update", "response": "longest response, tokens", "vocab": "vocabulary, tokens",
    "hidden": "width of the hidden states",
}  # fmt: skip
OUT = Path(__file__).parents[2] / "docs/pictures/growth.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=2, help="time so many updates per point")
    args = parser.parse_args()
    found = measure(SHAPES["A"], AXES, args.updates)
    print("| size | value | episodes/s | peak GB so far |\n|---|---|---|---|")
    for axis, points in found.items():
        for value, point in points.items():
            print(f"| {axis} | {value:,} | {point.episodes_per_second:.2f} | {point.peak_memory_gb:.2f} |")
    draw(found, OUT)


def measure(
    base: Shape, axes: Mapping[str, Sequence[int]], updates: int
) -> dict[str, dict[int, measurement.Measurement]]:
    """A measurement for every value of every axis, with `base` in the other sizes."""
    return {
        axis: {value: _point(changed(base, axis, value), updates) for value in values}
        for axis, values in axes.items()
    }


def changed(base: Shape, axis: str, value: int) -> Shape:
    sizes: dict[str, Any] = {axis: value}
    return replace(base, **sizes)


def _point(shape: Shape, updates: int) -> measurement.Measurement:
    work = workloads.of_shape(small.runtime(), small.ppo(), shape, updates + 1)
    return measurement.measure(work)


def draw(found: Mapping[str, Mapping[int, measurement.Measurement]], out: Path) -> None:
    figure, panels = plt.subplots(1, len(found), figsize=(3 * len(found), 3), sharey=True, squeeze=False)
    for panel, (axis, points) in zip(panels[0], found.items(), strict=True):
        panel.loglog(list(points), [one.episodes_per_second for one in points.values()], marker="o")
        panel.set_xlabel(LABELS[axis])
        panel.set_xticks(list(points), [f"{value:,}" for value in points], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("episodes per second")
    panels[0][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0][0].yaxis.set_major_formatter("{x:g}")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()

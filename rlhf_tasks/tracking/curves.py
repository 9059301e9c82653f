"""A stage's curves as a CSV table and as one fixed figure. No torch; matplotlib only when drawing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_tasks.config import Stage

CURVES: tuple[Stage, ...] = ("base", "sft", "reward", "ppo", "judge")  # the stages with a plots/STAGE.csv
PPO_PANELS = (
    "objective/kl",
    "objective/rlhf_reward",
    "objective/scores",
    "objective/entropy",
    "policy/clipfrac_avg",
    "policy/approxkl_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/ratio",
    "val/clipfrac_avg",
    "val/num_eos_tokens",
    "lr",
)
MAX_PANELS = 12


def axis(stage: Stage | None) -> str:
    """What the x axis counts."""
    return "episode" if stage in ("ppo", "judge") else "step"


def csv_text(rows: Sequence[Mapping[str, float]], axis: str) -> str:
    """A column a metric, `axis` first; a cell is empty where a step has no such value."""
    names = [axis, *(n for n in dict.fromkeys(name for row in rows for name in row) if n != axis)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_csv(text: str) -> list[dict[str, float]]:
    """The rows that `csv_text` wrote, all values as floats."""
    return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(io.StringIO(text))]


def panels(rows: Sequence[Mapping[str, float]], axis: str) -> list[str]:
    """The metrics to draw: PPO's fixed ones, else all, times left aside."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != axis))
    fixed = [name for name in PPO_PANELS if name in names]
    drawn = fixed if axis == "episode" and fixed else [n for n in names if not n.startswith("time/")]
    return drawn[:MAX_PANELS]


def draw(rows: Sequence[Mapping[str, float]], axis: str, title: str, path: Path) -> None:
    """A PNG, a panel per metric; the same rows give the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = panels(rows, axis)
    width = min(4, max(len(names), 1))
    height = math.ceil(max(len(names), 1) / width)
    figure = Figure(figsize=(3.2 * width, 2.4 * height + 0.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for index, name in enumerate(names):
        panel = figure.add_subplot(height, width, index + 1)
        points = [(row[axis], row[name]) for row in rows if name in row]
        panel.plot(*zip(*points, strict=True), linewidth=1.2, marker="." if len(points) < 20 else "")
        panel.set_title(name, fontsize=9)
        panel.set_xlabel(axis, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, metadata={"Software": None})

"""Experiments side by side: final metrics, and curves with a band over seeds. No torch here.

All is read from git: metrics and curves stand in the commit of an experiment, so that nothing is checked
out. The curve of a setting is the mean over its seeds, the band one standard deviation to each side, as
openrlbenchmark draws them (arXiv 2402.03046).
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks import config, workspace

CURVES = "plots/ppo.csv"


@dataclass(frozen=True)
class Result:
    """One run of a comparison."""

    setting: str
    seed: int
    experiment: str
    metrics: Mapping[str, float]
    """`{"ppo/objective/kl": 1.2, …}`"""
    curves: Sequence[Mapping[str, float]]
    """A dict per point, its x axis first."""


def read(root: Path, setting: str, seed: int, name: str) -> Result:
    """The experiment `name`.

    Raises:
        UserError: if there is none.
    """
    revision = workspace.experiment(root, name)
    if revision is None:
        raise config.UserError(f"there is no experiment {name!r}; `dvc exp list` shows what there is")
    metrics: dict[str, float] = {}
    for path in workspace.paths(root, revision, "metrics/"):
        tree = config.flatten(json.loads(workspace.shown(root, revision, path)))
        metrics |= {f"{Path(path).stem}/{key}": value for key, value in tree.items()}
    curves = _rows(workspace.shown(root, revision, CURVES)) if workspace.paths(root, revision, CURVES) else []
    return Result(setting, seed, name, metrics, curves)


def _rows(text: str) -> list[dict[str, float]]:
    return [
        {name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(io.StringIO(text))
    ]


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per setting: how many seeds, and each metric's mean and standard deviation over them."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        own = [result for result in results if result.setting == setting]
        row: dict[str, Any] = {"setting": setting, "seeds": len(own)}
        for name in names:
            values = [result.metrics[name] for result in own if name in result.metrics]
            row[name] = f"{statistics.fmean(values):.4g} ± {_deviation(values):.2g}" if values else "–"
        rows.append(row)
    return rows


def band(results: Sequence[Result], name: str) -> tuple[list[float], list[float], list[float]]:
    """x, mean and standard deviation of one curve, at the points that all the runs have."""
    curves = [{row[next(iter(row))]: row[name] for row in result.curves if name in row} for result in results]
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    return common, [statistics.fmean(v) for v in values], [_deviation(v) for v in values]


def _deviation(values: Sequence[float]) -> float:
    """Of a sample (n − 1); 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(results: Sequence[Result], names: Sequence[str], title: str, path: Path) -> None:
    """A PNG: a panel per curve, a line and a band per setting; the same results give the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = min(3, max(len(names), 1))
    height = math.ceil(max(len(names), 1) / width)
    figure = Figure(figsize=(4.2 * width, 3.0 * height + 0.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    settings = list(dict.fromkeys(result.setting for result in results))
    panel: Any = None
    for index, name in enumerate(names):
        panel = figure.add_subplot(height, width, index + 1)
        for number, setting in enumerate(settings):
            xs, means, deviations = band([r for r in results if r.setting == setting], name)
            colour = f"C{number % 10}"
            panel.plot(xs, means, color=colour, linewidth=1.4, label=setting)
            low = [m - d for m, d in zip(means, deviations, strict=True)]
            high = [m + d for m, d in zip(means, deviations, strict=True)]
            panel.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("episode", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    if panel is not None:
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=2)
    figure.suptitle(title)
    figure.savefig(path, metadata={"Software": None})

"""`rlhf compare RUN…`: runs side by side as one page, in the form of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import charts, comparison, measures, page
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.comparison import Result
from rlhf_tasks.report.identity import CHANGES
from rlhf_tasks.report.inputs import Curve
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.catalogue import Metric, Panel

MAX_SETTINGS = 6  # lines that a figure can tell apart
SHOWN = 40  # characters of a setting beside its letter
WIN_RATES_FIRST: tuple[Stage, ...] = ("judge", *(stage for stage in STAGES if stage != "judge"))
FIGURES: tuple[Stage, ...] = ("judge", "ppo", "reward", "sft", "base")


def run(paths: Paths, names: Sequence[str], out: Path) -> None:
    """Write the comparison of these runs to `out`, and print its headline metrics.

    Raises:
        UserError: for a run that does not exist, or more settings than a figure can show.
    """
    drawn = _drawn()
    runs: dict[str, Result] = {}
    for name in names:
        result = comparison.find(paths, name, drawn)
        if runs.setdefault(result.identity, result).experiment != name:
            console.say(f"{name} is the same run as {runs[result.identity].experiment}: it counts once")
    results = comparison.with_settings(list(runs.values()))
    atomic.write_text(paths.root / out, page.document("comparison.html", context(results)))
    groups = _groups(results)
    rows = [[name, *(_cell(own, name) for own in groups.values())] for name in _headlines(results)]
    console.table(f"{len(results)} run(s), {len(groups)} setting(s)", ["metric", *groups], rows)
    console.say(f"wrote {out}")


def context(results: Sequence[Result]) -> dict[str, Any]:
    """The template's variables."""
    groups = _groups(results)
    headlines = _headlines(results)
    others = sorted({name for result in results for name in result.metrics} - set(headlines))
    return {
        "num_runs": len(results),
        "groups": list(groups),
        "titles": list(dict.fromkeys(title for facts in map(_facts, results) for title in facts)),
        "runs": [(order, _facts(result)) for order, own in enumerate(groups.values()) for result in own],
        "parameters": _parameters(groups),
        "headlines": [(name, [_cell(own, name) for own in groups.values()]) for name in headlines],
        "others": [(name, [_cell(own, name) for own in groups.values()]) for name in others],
        "figures_drawn": list(_figures(groups)),
    }


def _facts(result: Result) -> dict[str, str]:
    """Which run it is. The parameters that differ have a table of their own."""
    least = {"Run": result.experiment, "Seed": str(result.seed)}
    return {title: text for title, text in (result.facts or least).items() if title != CHANGES}


def _groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs by a letter and the beginning of their setting."""
    by_setting: dict[str, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, []).append(result)
    if len(by_setting) > MAX_SETTINGS:
        raise UserError(
            f"these runs have {len(by_setting)} different settings, and a figure shows {MAX_SETTINGS} at "
            "most; give fewer runs"
        )
    labels = (chr(ord("A") + order) for order in range(len(by_setting)))
    return {
        f"{letter}: {setting[:SHOWN]}{'…' if len(setting) > SHOWN else ''}" if setting else letter: own
        for letter, (setting, own) in zip(labels, by_setting.items(), strict=True)
    }


def _parameters(groups: Mapping[str, Sequence[Result]]) -> list[tuple[str, list[str]]]:
    """The parameters in which the settings differ, with their values."""
    firsts = [own[0].parameters for own in groups.values()]
    return [
        (key, [parameters.get(key, comparison.UNKNOWN) for parameters in firsts])
        for key in comparison.differing(firsts)
    ]


def _headlines(results: Sequence[Result]) -> list[str]:
    """The catalogue's headline metrics that a run has."""
    known = dict.fromkeys(name for result in results for name in result.metrics)
    return [
        f"{stage}/{name}"
        for stage in WIN_RATES_FIRST
        for name in catalogue.select_headlines(stage, _of_stage(known, stage))
    ]


def _of_stage(names: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """The metrics of one stage, without its name in front."""
    prefix = f"{stage}/"
    return {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}


def _cell(results: Sequence[Result], name: str) -> str:
    """A single run's value, with its interval if it has one; of several runs mean ± standard deviation."""
    if len(results) != 1 or name not in results[0].metrics:
        return comparison.cell(results, name)
    metrics, stem = results[0].metrics, name.removesuffix("/win_rate")
    if stem != name and {f"{stem}/low", f"{stem}/high"} <= metrics.keys():
        return measures.interval_text(
            Interval(metrics[name], metrics[f"{stem}/low"], metrics[f"{stem}/high"])
        )
    return measures.with_interval(metrics, name)


# --------------------------------------------------------------------------------------- figures


def _drawn() -> list[str]:
    """The ends of the names of all curves that figures draw."""
    metrics = [metric for stage in FIGURES for panel in catalogue.panels(stage) for metric in panel.metrics]
    return list(dict.fromkeys(_name_end(metric) for metric in metrics))


def _name_end(metric: Metric) -> str:
    """The name; of a family of metrics what follows its last placeholder."""
    return metric.name.rpartition(metric.placeholders[-1])[2] if metric.placeholders else metric.name


def _figures(groups: Mapping[str, Sequence[Result]]) -> Iterator[Figure]:
    for stage in FIGURES:
        rows = (row for own in groups.values() for result in own for row in result.curves.get(stage, ()))
        known = dict.fromkeys(name for row in rows for name in row)
        for panel in catalogue.panels(stage):
            for name in panel.select(known):
                yield from _figure(groups, stage, panel, name)


def _figure(
    groups: Mapping[str, Sequence[Result]], stage: Stage, panel: Panel, name: str
) -> Iterator[Figure]:
    """A line and a band per setting; nothing where the runs of no setting share a point.

    A setting without the curve keeps its place, so that a setting has the same colour in all figures.
    """
    curves = [_curve(label[0], own, stage, name) for label, own in groups.items()]
    if not any(curve.x for curve in curves):
        return
    rows = (row for own in groups.values() for r in own for row in r.curves.get(stage, ()) if name in row)
    axis = next(iter(next(rows)))
    svg = charts.line_chart(panel.title, axis, curves, band=panel.band, guide=panel.guide)
    yield Figure(
        panel.title,
        f"{catalogue.in_words(stage, name)}, `{stage}/{name}`",
        svg,
        [curve.name for curve in curves],
    )


def _curve(label: str, results: Sequence[Result], stage: Stage, name: str) -> Curve:
    xs, means, deviations = comparison.band(results, name, stage)
    if len(results) == 1:
        return Curve(label, tuple(xs), tuple(means))
    low, high = (tuple(m + side * d for m, d in zip(means, deviations, strict=True)) for side in (-1, 1))
    return Curve(label, tuple(xs), tuple(means), low=low, high=high)

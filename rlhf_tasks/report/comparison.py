"""Runs side by side: final metrics, and curves with a band over seeds. No torch here.

An experiment is read from git: its commit has metrics and curves, so that nothing is checked out. Other runs
are read from MLflow, or from the folder of a pipeline. The curve of a setting is the mean over its runs; the
band is one standard deviation to each side, as openrlbenchmark draws them (arXiv 2402.03046).
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.config import ReportView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report.identity import Origin, facts

HOW_NOT_WHAT = {"launch", "resume", "tracking", "service"}  # sections that change no result
UNCOMPARED = HOW_NOT_WHAT | {"promotion"}  # the gate changes the verdict, but no weight and no win rate
MAX_SHOWN = 60  # characters of a setting
UNKNOWN = "?"


@dataclass(frozen=True)
class Result:
    """One run of a comparison."""

    setting: str
    seed: int
    experiment: str
    metrics: Mapping[str, float]
    """`{"ppo/objective/kl": 1.2, …}`"""
    curves: Mapping[str, Sequence[Mapping[str, float]]]
    """By stage a dict per point, its x axis first."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Text by dotted key: the parameters that decide the result, without the seed."""
    identity: str = ""
    """A commit, a folder or MLflow's id: one run may be given by several names."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What is known of the run, by title: see `identity.facts`."""


# --------------------------------------------------------------------------------------- reading


def read(root: Path, setting: str, seed: int, name: str) -> Result:
    """Read the experiment `name`.

    Raises:
        UserError: if it does not exist.
    """
    revision = git.find_experiment(root, name)
    if revision is None:
        raise UserError(f"there is no experiment {name!r}; `dvc exp list` shows those that exist")
    return replace(_of_commit(root, revision, name), setting=setting, seed=seed)


def find(paths: Paths, name: str, drawn: Sequence[str]) -> Result:
    """Read a run by name: a folder that a pipeline worked in, an experiment, or a run of MLflow.

    An MLflow run whose experiment exists here is read from git, which has its cached stages too. The result
    has no setting yet: `with_settings` gives it one.

    Args:
        paths: The project whose experiments and runs are searched.
        name: The run.
        drawn: Ends of the names of the curves that are needed from MLflow.

    Raises:
        UserError: if no run has this name, or MLflow does not answer.
    """
    folder = paths.root / name
    if (folder / "metrics").is_dir():
        return _of_folder(folder, name)
    commit = git.find_experiment(paths.root, name)
    if commit is not None:
        return _of_commit(paths.root, commit, name)
    from rlhf_tasks.tracking import context, runs

    uri = context.uri(config.load(paths.params).tracking)
    record = runs.find(uri, paths.home, name, drawn)
    if record is None or not record.metrics:
        reason = "is not a run that MLflow or git has here" if record is None else "has no finished stage"
        raise UserError(
            f"{name} {reason}; give an MLflow run's id or name, a key (`rlhf.run` or `rlhf.pipeline` among "
            "its tags), an experiment (`dvc exp list`), or a folder that holds metrics/"
        )
    commit = git.find_experiment(paths.root, record.experiment) if record.experiment else None
    if commit is not None:
        return _of_commit(paths.root, commit, name)
    metrics = {f"{stage}/{key}": value for stage, own in record.metrics.items() for key, value in own.items()}
    return _result(name, metrics, record.curves, record.parameters, record.run)


def _of_commit(root: Path, revision: str, name: str) -> Result:
    paths = [path for kind in ("metrics/", "plots/") for path in git.files(root, revision, kind)]
    paths += git.files(root, revision, "params.yaml")
    time = datetime.fromisoformat(git.output(root, "log", "-1", "--format=%cI", revision)).astimezone(UTC)
    origin = Origin(name, time, git.commit(root, f"{revision}^") or "")
    return _of_files(root, origin, paths, lambda path: git.show(root, revision, path), revision)


def _of_folder(folder: Path, name: str) -> Result:
    files = [*folder.glob("metrics/*.json"), *folder.glob("plots/*.csv"), *folder.glob("params.yaml")]
    paths = sorted(path.relative_to(folder).as_posix() for path in files)
    if not any(path.startswith("metrics/") for path in paths):
        raise UserError(f"{name}/metrics is empty: no stage has run there; leave this run out")
    lineage = {path.stem: json.loads(path.read_bytes()) for path in folder.glob("models/lineage/*.json")}
    origin = Origin.of_lineage(lineage)._replace(name=name)
    identity = str(folder.resolve())
    return _of_files(folder, origin, paths, lambda path: (folder / path).read_text("utf-8"), identity)


def _of_files(
    root: Path, origin: Origin, paths: Sequence[str], text: Callable[[str], str], identity: str
) -> Result:
    metrics: dict[str, float] = {}
    curves: dict[str, Sequence[Mapping[str, float]]] = {}
    parameters: dict[str, Any] = {}
    known: dict[str, str] = {}
    for path in paths:
        stage = Path(path).stem
        try:
            if path == "params.yaml":
                tree = config.parse(text(path), path)
                parameters, known = config.values(tree, path), _facts(tree, origin, root)
            elif path.endswith(".csv"):
                curves[stage] = _rows(text(path))
            else:
                tree = config.flatten(json.loads(text(path)))
                metrics |= {f"{stage}/{key}": float(value) for key, value in tree.items()}
        except (ValueError, TypeError, AttributeError, UserError) as error:
            raise UserError(
                f"{path} of {origin.name} cannot be read ({error}); restore it, or leave this run out"
            ) from None
    return replace(_result(origin.name, metrics, curves, parameters, identity), facts=known)


def _facts(tree: Mapping[str, Any], origin: Origin, root: Path) -> dict[str, str]:
    """Empty for parameters that this version of the code refuses."""
    try:
        return facts(ReportView.of(config.validate(tree, "params.yaml")), origin, root)
    except UserError:
        return {}


def _result(
    name: str,
    metrics: Mapping[str, float],
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    parameters: Mapping[str, Any],
    identity: str,
) -> Result:
    texts = {key: _text(value) for key, value in parameters.items()}
    kept = {k: v for k, v in texts.items() if k != "seed" and k.split(".")[0] not in UNCOMPARED}
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return Result("", int(texts.get("seed", 0)), name, finite, curves, kept, identity)


def _text(value: Any) -> str:
    """The same text for the same value, whether it comes from YAML (`12`) or as text from MLflow (`12.0`)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return value if isinstance(value, str) else json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def with_settings(results: Sequence[Result]) -> list[Result]:
    """The results with their settings: the parameters in which they differ.

    MLflow has only the parameters of the stages that ran, so a run without one of those parameters is a
    setting of its own. Runs that differ only in their verdict, under another gate, count once: they were
    trained once.
    """
    results = list({_training(result): result for result in results}.values())
    keys = differing([result.parameters for result in results])
    return [
        replace(result, setting=", ".join(f"{k}={result.parameters.get(k, UNKNOWN)}" for k in keys) or "all")
        for result in results
    ]


def _training(result: Result) -> tuple[Any, ...]:
    """What only runs of the same training share: seed, parameters, and all metrics to the last digit."""
    measured = {key: value for key, value in result.metrics.items() if not key.startswith("verdict/")}
    return result.seed, *sorted(result.parameters.items()), *sorted(measured.items())


def differing(parameters: Sequence[Mapping[str, str]]) -> list[str]:
    """The sorted keys that have several values, among the runs that have the key."""
    keys = {key for known in parameters for key in known}
    return sorted(key for key in keys if len({known[key] for known in parameters if key in known}) > 1)


def _rows(text: str) -> list[dict[str, float]]:
    """The points without their values that are not finite: a mean cannot include those."""
    return [
        {name: float(cell) for name, cell in row.items() if cell and math.isfinite(float(cell))}
        for row in csv.DictReader(io.StringIO(text))
    ]


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per setting: the number of seeds, and each metric's mean and standard deviation over them."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        own = [result for result in results if result.setting == setting]
        row: dict[str, Any] = {"setting": setting, "seeds": len(own)}
        for name in names:
            row[name] = cell(own, name)
        rows.append(row)
    return rows


def cell(results: Sequence[Result], name: str) -> str:
    """Mean ± standard deviation of a metric over the runs of a setting; their number if some lack it."""
    values = [result.metrics[name] for result in results if name in result.metrics]
    some = f" ({len(values)} of {len(results)})" if len(values) < len(results) else ""
    return f"{statistics.fmean(values):.4g} ± {_deviation(values):.2g}{some}" if values else "–"


def band(
    results: Sequence[Result], name: str, stage: str = "ppo"
) -> tuple[list[float], list[float], list[float]]:
    """x, mean and standard deviation of one curve of a stage, at the points that all the runs have."""
    curves = [
        {row[next(iter(row))]: row[name] for row in result.curves.get(stage, ()) if name in row}
        for result in results
    ]
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    return common, [statistics.fmean(v) for v in values], [_deviation(v) for v in values]


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation (n − 1); 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(results: Sequence[Result], names: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG with a panel per curve and a line per setting; equal results give equal bytes."""
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

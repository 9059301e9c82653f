"""Runs side by side: final metrics, and curves with a band over seeds. No torch here.

An experiment is read from git: metrics and curves stand in its commit, so that nothing is checked out.
Other runs are read from MLflow, or from a folder that a pipeline worked in. The curve of a setting is the
mean over its runs, the band one standard deviation to each side, as openrlbenchmark draws them (arXiv
2402.03046).
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import experiments, git
from rlhf_tasks.project.paths import Paths

HOW_NOT_WHAT = {"launch", "resume", "tracking", "service"}  # change nothing that a run makes
UNCOMPARED = HOW_NOT_WHAT | {"promotion"}  # the gate changes the verdict: no weight, no win rate
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
    """By dotted key, as text: those that decide what comes out, the seed left aside."""
    identity: str = ""
    """A commit, a folder or MLflow's id: one run may be asked for by several names."""


# --------------------------------------------------------------------------------------- reading


def read(root: Path, setting: str, seed: int, name: str) -> Result:
    """The experiment `name`.

    Raises:
        UserError: if there is none.
    """
    revision = experiments.find(root, name)
    if revision is None:
        raise UserError(f"there is no experiment {name!r}; `dvc exp list` shows what there is")
    return replace(_of_commit(root, revision, name), setting=setting, seed=seed)


def find(root: Path, asked: str, drawn: Sequence[str]) -> Result:
    """What is asked for: a folder that a pipeline worked in, an experiment, or a run of MLflow.

    An MLflow run whose experiment is here is read from git, which has its cached stages too. `drawn` are
    the ends of the names of the curves that are wanted. The result has no setting yet: see `settled`.

    Raises:
        UserError: if nothing is known by that name, or MLflow cannot be asked.
    """
    if (Path(asked) / "metrics").is_dir():
        return _of_folder(Path(asked), asked)
    made = _experiment(root, asked)
    if made is not None:
        return _of_commit(root, made, asked)
    from rlhf_tasks.tracking import context, records

    uri = context.uri(config.load(root / "params.yaml").tracking)
    record = records.find(uri, Paths(root).home, asked, drawn)
    if record is None or not record.metrics:
        why = "is no run that MLflow or git knows here" if record is None else "has no stage that ran"
        raise UserError(
            f"{asked} {why}; give an MLflow run's id or name, a key (`rlhf.run` or `rlhf.pipeline` among its "
            "tags), an experiment (`dvc exp list`), or a folder that holds metrics/"
        )
    made = _experiment(root, record.experiment) if record.experiment else None
    if made is not None:
        return _of_commit(root, made, asked)
    metrics = {f"{stage}/{key}": value for stage, own in record.metrics.items() for key, value in own.items()}
    return _result(asked, metrics, record.curves, record.parameters, record.run)


def _experiment(root: Path, name: str) -> str | None:
    """As `repository.experiment`; None outside of git, where MLflow and folders can be asked still."""
    return experiments.find(root, name) if git.revision(root) else None


def _of_commit(root: Path, revision: str, name: str) -> Result:
    paths = [path for kind in ("metrics/", "plots/") for path in git.files(root, revision, kind)]
    paths += git.files(root, revision, "params.yaml")
    return _of_files(name, paths, lambda path: git.show(root, revision, path), revision)


def _of_folder(folder: Path, name: str) -> Result:
    found = [*folder.glob("metrics/*.json"), *folder.glob("plots/*.csv"), *folder.glob("params.yaml")]
    paths = sorted(path.relative_to(folder).as_posix() for path in found)
    if not any(path.startswith("metrics/") for path in paths):
        raise UserError(f"{name}/metrics is empty: no stage has run there; leave it out")
    identity = str(folder.resolve())
    return _of_files(name, paths, lambda path: (folder / path).read_text(encoding="utf-8"), identity)


def _of_files(name: str, paths: Sequence[str], text: Callable[[str], str], identity: str) -> Result:
    metrics: dict[str, float] = {}
    curves: dict[str, Sequence[Mapping[str, float]]] = {}
    parameters: dict[str, Any] = {}
    for path in paths:
        stage = Path(path).stem
        try:
            if path == "params.yaml":
                parameters = config.flatten(config.parse(text(path), path))
            elif path.endswith(".csv"):
                curves[stage] = _rows(text(path))
            else:
                tree = config.flatten(json.loads(text(path)))
                metrics |= {f"{stage}/{key}": float(value) for key, value in tree.items()}
        except (ValueError, TypeError, AttributeError, UserError) as error:
            raise UserError(
                f"{path} of {name} cannot be read ({error}); bring it back, or leave it out"
            ) from None
    return _result(name, metrics, curves, parameters, identity)


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
    """One text for a value, whether it comes from YAML (`12`) or, as text, from MLflow (`12.0`)."""
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


def settled(results: Sequence[Result]) -> list[Result]:
    """The same with their settings: the parameters in which they differ; runs that differ in none share one.

    MLflow has the parameters of the stages that ran: a run that does not tell one of those is a setting of
    its own. Runs that differ in their verdict only, under another gate, are one: they were trained once.
    """
    results = list({_training(result): result for result in results}.values())
    keys = differing([result.parameters for result in results])
    return [
        replace(result, setting=", ".join(f"{k}={result.parameters.get(k, UNKNOWN)}" for k in keys) or "all")
        for result in results
    ]


def _training(result: Result) -> tuple[Any, ...]:
    """What only runs of one training share: seed, parameters, and all they measured, to the last digit."""
    measured = {key: value for key, value in result.metrics.items() if not key.startswith("verdict/")}
    return result.seed, *sorted(result.parameters.items()), *sorted(measured.items())


def differing(parameters: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys that have several values among those who tell them, in order."""
    keys = {key for known in parameters for key in known}
    return sorted(key for key in keys if len({known[key] for known in parameters if key in known}) > 1)


def _rows(text: str) -> list[dict[str, float]]:
    """The points that are finite: no mean has a place for the others."""
    return [
        {name: float(cell) for name, cell in row.items() if cell and math.isfinite(float(cell))}
        for row in csv.DictReader(io.StringIO(text))
    ]


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per setting: how many seeds, and each metric's mean and standard deviation over them."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        own = [result for result in results if result.setting == setting]
        row: dict[str, Any] = {"setting": setting, "seeds": len(own)}
        for name in names:
            row[name] = cell(own, name)
        rows.append(row)
    return rows


def cell(results: Sequence[Result], name: str) -> str:
    """Mean and standard deviation of one metric over the runs of a setting, and over how many if not all."""
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

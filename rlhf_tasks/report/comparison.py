"""Runs side by side: `rlhf compare RUN…` writes the page, a sweep shows the table. No torch.

An experiment is read from git: its commit has metrics and curves, so that nothing is checked out. Other runs
are read from MLflow, or from the folder of a pipeline. The curve of a setting is the mean over its runs; the
band is one standard deviation to each side, as openrlbenchmark draws them (arXiv 2402.03046).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_tasks import config, console, presets
from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.config.judge import Judge
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, run_facts
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.curves import CURVES, Curve, Figure, Points, read_csv

HOW_NOT_WHAT = {"launch", "resume", "tracking", "service"}  # sections that change no result but by PRECISION
UNCOMPARED = HOW_NOT_WHAT | {"promotion"}  # the gate changes the verdict, but no weight and no win rate
MAX_SETTINGS = 6  # lines that a figure can tell apart
MAX_CHANGES = 6  # in the title of a setting


@dataclass(frozen=True)
class Result:
    """One run of a comparison."""

    setting: str  # the parameters in which it differs from the others; see `with_settings`
    seed: int
    experiment: str
    metrics: Mapping[str, float]  # `{"ppo/objective/kl": 1.2, …}`
    curves: Mapping[str, Points]  # by stage
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Text by dotted key: the parameters that decide the result, without the seed."""
    code: str = ""  # the beginning of the commit that it ran from; empty where it is not known


def find(paths: Paths, name: str) -> Result:
    """Read a run by name: a folder that a pipeline worked in, an experiment, or a run of MLflow.

    An MLflow run whose experiment exists here is read from git, which has its cached stages too. Raises
    UserError if no run has this name, or MLflow does not answer. The setting is left to `with_settings`.
    """
    folder = paths.root / name
    if (folder / "metrics").is_dir():
        found = [*folder.glob("metrics/*.json"), *folder.glob("plots/*.csv"), *folder.glob("params.yaml")]
        return _of_texts(name, {f.relative_to(folder).as_posix(): f.read_text("utf-8") for f in found})
    if revision := git.find_experiment(paths.root, name):
        return _of_commit(paths.root, revision, name)
    from rlhf_tasks.tracking import context, runs

    # MLflow finds curves by the ends of their names: of a family what follows its last placeholder.
    drawn = (m for stage in CURVES for panel in catalogue.panels(stage) for m in panel.metrics)
    ends = dict.fromkeys(
        m.name.rpartition(m.placeholders[-1])[2] if m.placeholders else m.name for m in drawn
    )
    record = runs.find(context.uri(config.load(paths.params).tracking), paths.home, name, list(ends))
    if record is None or not record.metrics:
        reason = "is not a run that MLflow or git has here" if record is None else "has no finished stage"
        raise UserError(
            f"{name} {reason}; give an MLflow run's id or name, a key (`rlhf.run` or `rlhf.pipeline` among "
            "its tags), an experiment (`dvc exp list`), or a folder that holds metrics/"
        )
    if record.experiment and (revision := git.find_experiment(paths.root, record.experiment)):
        return _of_commit(paths.root, revision, name)
    metrics = {f"{stage}/{key}": value for stage, own in record.metrics.items() for key, value in own.items()}
    seed = int(record.parameters.get("seed", 0))
    return Result("", seed, name, metrics, record.curves, select_decisive(record.parameters))


def _of_commit(root: Path, revision: str, name: str) -> Result:
    kinds = {"metrics/": ".json", "plots/": ".csv", "params.yaml": ""}
    texts = {
        path: git.show(root, revision, path)
        for kind, suffix in kinds.items()
        for path in git.files(root, revision, kind)
        if path.endswith(suffix)  # a user's own stages may write other files
    }
    code = git.commit(root, f"{revision}^") or ""
    return replace(_of_texts(name, texts), code=code[: run_facts.SHOWN_HASH])


def _of_texts(name: str, texts: Mapping[str, str]) -> Result:
    """A run by the texts of its files."""
    metrics: dict[str, float] = {}
    curves: dict[str, Points] = {}
    parameters: Mapping[str, Any] = {}
    for path, text in texts.items():
        stage = Path(path).stem
        try:
            if path == "params.yaml":
                parameters = config.values(config.parse(text, path), path)
            elif path.endswith(".json"):
                for key, value in config.flatten(json.loads(text)).items():
                    if stage in STAGES or isinstance(value, int | float):  # a user's own may write texts
                        metrics[f"{stage}/{key}"] = float(value)
            elif stage in CURVES:
                curves[stage] = read_csv(text)
        except (ValueError, TypeError, AttributeError, UserError) as error:
            raise UserError(
                f"{path} of {name} cannot be read ({error}); restore it, or leave this run out"
            ) from None
    if not metrics:
        raise UserError(f"{name} has no metrics: no stage has run there; leave this run out")
    return Result("", int(parameters.get("seed", 0)), name, metrics, curves, select_decisive(parameters))


def select_decisive(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that decide a result, without the seed, as text: the one that MLflow has."""
    out = UNCOMPARED | {"seed"}
    kept = {k: v for k, v in parameters.items() if k == PRECISION or k.split(".")[0] not in out}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in kept.items()}


def with_settings(results: Sequence[Result]) -> list[Result]:
    """The results with their settings: the parameters in which they differ.

    MLflow has only the parameters of the stages that ran, so a run without one is a setting of its own. Runs
    that differ only in their verdict, under another gate, count once: they were trained once.
    """

    def training(result: Result) -> tuple[Any, ...]:
        measured = ((key, x) for key, x in result.metrics.items() if not key.startswith("verdict/"))
        return result.seed, *sorted(result.parameters.items()), *sorted(measured)

    results = list({training(result): result for result in results}.values())
    rows = _find_differences([result.parameters for result in results])
    settings = [", ".join(f"{key}={row[i]}" for key, row in rows.items()) for i in range(len(results))]
    return [replace(one, setting=setting or "all") for one, setting in zip(results, settings, strict=True)]


def _find_differences(parameters: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The parameters with several values, in the order of their keys; "?" where a run lacks one."""
    keys = sorted({key for known in parameters for key in known} - {"preset"})
    rows = {key: [known.get(key, "?") for known in parameters] for key in keys}
    return {key: row for key, row in rows.items() if len({*row} - {"?"}) > 1}


def name_setting(parameters: Mapping[str, str], committed: str) -> str:
    """What the user chose: presets, and what differs from their values over those of a params.yaml's text."""
    chosen = parameters.get("preset", "null").replace("null", "")
    try:
        settings = presets.combine(committed, list(filter(None, chosen.split(presets.BETWEEN))))[1]
    except UserError:  # an earlier version had the preset, or the file is not valid now
        settings = config.Config()
    expected = select_decisive(config.in_force(settings)) | {"preset": chosen or "null"}
    # What `auto` stood for on some machine is no choice.
    changes = [f"{k}={v}" for k, v in parameters.items() if expected.get(k) not in (v, "auto")]
    more = [f"and {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []
    first = [f"preset {chosen}"] if chosen else []
    return ", ".join([*first, *changes[:MAX_CHANGES], *more]) or "default"


def _by_setting(results: Sequence[Result]) -> dict[str, list[Result]]:
    settings = dict.fromkeys(result.setting for result in results)
    return {setting: [result for result in results if result.setting == setting] for setting in settings}


def table(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per setting: the number of seeds, and each metric's mean and standard deviation over them."""
    return [
        {"setting": setting, "seeds": len(own), **{name: cell(own, name) for name in names}}
        for setting, own in _by_setting(results).items()
    ]


def cell(results: Sequence[Result], name: str) -> str:
    """One run's value, with its interval if it has one; of several mean ± standard deviation.

    With the number of runs that have a finite value, if some have not.
    """
    values = [x for result in results if math.isfinite(x := result.metrics.get(name, math.nan))]
    if not values:
        return "–"
    if len(results) == 1:
        return document.metric(results[0].metrics, name)
    some = f" ({len(values)} of {len(results)})" if len(values) < len(results) else ""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0  # n − 1
    return document.number(statistics.fmean(values), deviation) + some


def run(paths: Paths, names: Sequence[str], out: Path) -> None:
    """Write the comparison of these runs to `out`, and print its headline metrics."""
    results = with_settings([find(paths, name) for name in names])
    if len(results) < len(names):
        console.say(f"{len(names) - len(results)} of these runs count once with another: the same training")
    committed = "{}"
    with suppress(UserError):  # there is no commit
        committed = git.show(paths.root, "HEAD", "params.yaml")
    variables = context(results, committed)
    atomic.write_text(paths.root / out, document.render("comparison.html", variables))
    columns = [f"{letter}: {title}" for letter, title in variables["titles"].items()]
    rows = [[name, *cells.values()] for name, cells in variables["headlines"].items()]
    console.table(f"{len(results)} run(s), {len(columns)} setting(s)", ["metric", *columns], rows)
    console.say(f"wrote {out}")


def context(results: Sequence[Result], committed: str = "{}") -> dict[str, Any]:
    """The template's variables; `committed`: the text of a params.yaml with which settings are compared.

    Raises UserError for more settings than a figure can show.
    """
    settings = _by_setting(results)
    if len(settings) > MAX_SETTINGS:
        raise UserError(
            f"these runs have {len(settings)} different settings, and a figure shows {MAX_SETTINGS} at most; "
            "give fewer runs"
        )
    groups = dict(zip("ABCDEF", settings.values(), strict=False))
    names = sorted({name for result in results for name in result.metrics})
    headlines = catalogue.headlines(names, sorted(STAGES, key=lambda stage: stage != "judge"))
    cells = {name: {letter: cell(own, name) for letter, own in groups.items()} for name in names}
    differences = _find_differences([own[0].parameters for own in groups.values()])
    judges = list[Judge]()
    for own in groups.values():
        with suppress(ValidationError):  # MLflow may not have them
            listed = f'{{"judges": {own[0].parameters.get("judge.judges")}}}'
            judges += config.Judging.model_validate_json(listed).judges
    words = catalogue.words_of(judges)
    first, more = document.split(_figures(groups, words))
    return {
        "judges": words,
        "groups": groups,
        "titles": {letter: name_setting(own[0].parameters, committed) for letter, own in groups.items()},
        "columns": {letter: letter for letter in groups},
        "parameters": {key: dict(zip(groups, row, strict=True)) for key, row in differences.items()},
        "headlines": {name: cells[name] for name in headlines},
        "others": {name: cells[name] for name in names if name not in headlines},
        "first_figures": first,
        "more_figures": more,
    }


def _figures(groups: Mapping[str, Sequence[Result]], words: Mapping[str, str]) -> Iterator[Figure]:
    """A figure per curve, with a line and a band per setting, which has the same color in all figures."""
    for stage in CURVES:
        rows = (row for own in groups.values() for one in own for row in one.curves.get(stage, ()))
        known = dict.fromkeys(name for row in rows for name in row)
        for panel in catalogue.panels(stage):
            for name in panel.select(known):
                curves = [mean_curve(letter, own, stage, name) for letter, own in groups.items()]
                if any(curve.x for curve in curves):
                    note = f"{catalogue.in_words(stage, name, words)}, `{stage}/{name}`"
                    axis = next(iter(known))
                    yield Figure(panel.title, note, axis, curves, panel.band, panel.guide)


def mean_curve(letter: str, results: Sequence[Result], stage: Stage, name: str) -> Curve:
    """The mean of a curve and one standard deviation to each side, at the points that all the runs have."""
    curves = [
        {next(iter(row.values())): y for row in points if math.isfinite(y := row.get(name, math.nan))}
        for points in (result.curves.get(stage, ()) for result in results)
    ]
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    means = [statistics.fmean(v) for v in values]
    if len(results) == 1:
        return Curve(letter, common, means)
    deviations = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
    return Curve(letter, common, means, low, high)

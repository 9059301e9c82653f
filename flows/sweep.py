"""`rlhf-sweep`: settings × seeds, each a run of the pipeline's deployment, and one comparison at the end.

Each run ends as a DVC experiment whose name is a digest of everything that decides its result: commit,
resolved parameters, data. A run that has its experiment is done, so that an interrupted sweep continues where
it stopped. Another gate makes another experiment; DVC then has everything but the verdict. All runs work on
the commit with which the sweep began; later commits belong to the next sweep. The runs go to the work pool of
a deployment and respect its limits: another `deployment` puts them on other machines.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import (
    create_image_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.variables import Variable
from pydantic import Field

from flows import request, results, settings, slots, sweep_runs, watch
from flows.sweep_runs import Cell, Data, Lost, Runs, SweepFailed
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import experiments, git, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison
from rlhf_tasks.tracking import catalogue, links
from rlhf_tasks.tracking import pipeline as tracking

CURVES = [metric.name for metric in catalogue.metrics("ppo") if metric.headline and metric.curve]
TABLE_KEY, FIGURE_KEY = "rlhf-sweep", "rlhf-sweep-curves"

Grid = Annotated[dict[str, list[Any]], Field(examples=[{"ppo.kl_coef": [0.01, 0.05]}])]
Seeds = Annotated[list[int], Field(min_length=1)]


class SweepIncomplete(SweepFailed):
    """Some runs of the sweep failed; the others are compared."""


@flow(
    name=settings.SWEEP,
    description="Run the pipeline with several settings and seeds, and compare them.",
    persist_result=False,
)
def sweep(
    grid: Grid = {},  # noqa: B006  Prefect shows it in the form
    settings_list: list[dict[str, Any]] = [],  # noqa: B006
    seeds: Seeds = [1, 2, 3],  # noqa: B006
    preset: request.PresetName = request.DEFAULT,
    name: request.ExperimentName = "sweep",
    revision: request.Revision | None = None,
    metrics: list[str] = [],  # noqa: B006
    curves: list[str] = list(CURVES),  # noqa: B006
    parallel: Annotated[int, Field(ge=0)] = 0,
    promote: bool = False,
    deployment: str = f"{settings.PIPELINE}/pipeline",
) -> State[Any]:
    """Run every setting with every seed, skip the runs that are done, and compare all of them.

    Args:
        grid: Values per dotted key of params.yaml; every combination is one setting.
        settings_list: In place of a grid: the overrides of each setting.
        seeds: Every setting is run with each of these seeds.
        preset: Changes of params.yaml for all runs. default: no preset.
        name: The name of the sweep; its experiments have this name and a digest.
        revision: The commit of all runs, by hash, branch or tag. The default is the commit of an unfinished
            sweep of this name, or the last commit.
        metrics: The columns of the table, such as ppo/objective/kl. The default is the headline metrics.
        curves: The panels of the figure: columns of plots/ppo.csv.
        parallel: The number of runs at once; the limit `gpu` applies as well. 0: one run more than its slots
            suffice for.
        promote: Let the gate decide at the end of each run whether its policy becomes the champion.
        deployment: The deployment that runs them; one of another work pool uses other machines.
    """
    try:
        request.check_name(name)
        shown = Shown(name, metrics, curves)
        name_of_preset, listed = request.preset_of(preset), combinations(grid, settings_list)
        return _run(listed, seeds, name_of_preset, revision, parallel, promote, deployment, shown)
    except (UserError, SweepFailed) as error:
        return request.refused(error)


@dataclass(frozen=True)
class Shown:
    """The comparison: its title, the columns of its table (empty: the default) and its curves."""

    name: str
    metrics: Sequence[str]
    curves: Sequence[str]


def _run(
    settings_: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    preset: str | None,
    revision: str | None,
    parallel: int,
    promote: bool,
    deployment: str,
    shown: Shown,
) -> State[Any]:
    """The final state of a sweep in which every run completes.

    Raises:
        UserError: for a mistake that the user can fix, before any run starts.
        SweepFailed: if some of it cannot be done.
    """
    watch.parameters_of(deployment)  # refuses a deployment that does not exist
    root, run, data = Path.cwd(), str(flow_run.get_id()), Data(Path.cwd())
    last = git.resolve(root, None)
    project = request.resolve(root, Request(preset), last)[1].tracking.experiment
    key = variable(project, shown.name, preset, settings_)
    commit = first_commit(root, shown.name, key) if revision is None else git.resolve(root, revision)
    cells, values = sweep_runs.cells(root, shown.name, preset, settings_, seeds, commit, data)
    Variable.set(key, commit, overwrite=True)
    if commit != last:
        get_run_logger().warning("all runs use commit %s; `revision: HEAD` uses the last one", commit)
    done = [cell for cell in cells if experiments.find(root, cell.experiment)]
    get_run_logger().info("%d of %d runs are already done", len(done), len(cells))
    tags = {tracking.NAME: shown.name, "rlhf.sweep": shown.name}
    try:
        with tracking.open_run(Paths(root), run, values.tracking, tags) as tracked:
            todo = [cell for cell in cells if cell not in done]
            runs, show = Runs(deployment, preset, commit, promote), progress(cells, done)
            lost = sweep_runs.run_cells(todo, runs, parallel or slots.num_runs(values) + 1, data, show)
            rows = compare(_completed(root, cells, lost), lost, shown, tracked)
            if lost:
                raise SweepIncomplete(
                    f"{len(lost)} of {len(cells)} runs failed ({'; '.join(map(str, lost))}). Start the sweep "
                    "again to run only these, on the same commit (`revision: HEAD`: all, on the last commit)"
                )
    except SweepIncomplete:  # the sweep's run in MLflow has ended as FAILED, and has the figure
        show_figure(run, values)
        raise
    show_figure(run, values)
    Variable.unset(key)
    return Completed(message=f"{len(rows)} setting(s), {len(cells)} runs, {len(done)} of them done before")


def progress(cells: Sequence[Cell], done: Sequence[Cell]) -> sweep_runs.Show:
    """Makes the sweep's progress artifact, a line per cell; returns what updates it and logs the changes."""
    lines = {cell.name: "done before" if cell in done else "not started" for cell in cells}

    def values(ended: int) -> tuple[float, str]:
        text = "\n".join(f"- `{name}`: {doing}" for name, doing in lines.items())
        return 100.0 * (len(done) + ended) / len(cells), text

    percent, text = values(0)
    artifact: Any = create_progress_artifact(percent, key=results.PROGRESS_KEY, description=text)

    def show(doing: Mapping[str, str], ended: int) -> None:
        changed = [name for name in doing if lines[name] != doing[name]]
        lines.update(doing)
        for name in changed:
            get_run_logger().info("%s: %s", name, doing[name])
        if changed:
            update_progress_artifact(artifact, *values(ended))

    return show


def _completed(root: Path, cells: Sequence[Cell], lost: Sequence[Lost]) -> list[comparison.Result]:
    failed = [each.cell for each in lost]
    return [comparison.read(root, c.setting, c.seed, c.experiment) for c in cells if c not in failed]


def combinations(
    grid: Mapping[str, Sequence[Any]], listed: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The overrides of each setting.

    Raises:
        UserError: if both or neither are given.
    """
    if bool(grid) == bool(listed):
        raise UserError("give either grid (values per key) or settings_list (overrides of each setting)")
    if listed:
        return [dict(overrides) for overrides in listed]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def variable(project: str, name: str, preset: str | None, listed: Sequence[Mapping[str, Any]]) -> str:
    """The Prefect variable that holds the commit of an unfinished sweep.

    Sweeps of one name but of another project or with other settings have other variables; more seeds make
    the same sweep larger. `project`: the experiment in MLflow.
    """
    return f"rlhf_sweep_{hashing.json_sha256([project, name, preset, list(map(dict, listed))])[:12]}"


def first_commit(root: Path, name: str, key: str) -> str:
    """The commit of this sweep if it is unfinished, or the last commit.

    Raises:
        UserError: if git no longer has the commit of the sweep.
    """
    commit: Any = Variable.get(key, None)
    if commit is not None and git.commit(root, commit) is None:
        raise UserError(
            f"the unfinished sweep {name} used commit {commit}, which git in {root} no longer has; "
            "`revision: HEAD` runs all of it on the last commit"
        )
    return git.resolve(root, commit)


def compare(
    completed: Sequence[comparison.Result], lost: Sequence[Lost], shown: Shown, tracked: tracking.Pipeline
) -> list[dict[str, Any]]:
    """One table and one figure, kept with the sweep's run in MLflow and shown in Prefect.

    The row of a setting names its missing runs, and why they are missing.
    """
    logged = list(dict.fromkeys(key for result in completed for key in result.metrics))
    default = results.headlines(logged) or logged
    rows = comparison.table(completed, shown.metrics or default)
    rows = with_lost(rows, lost)
    columns = {name for r in completed for row in r.curves.get("ppo", ()) for name in row}
    drawn = [curve for curve in shown.curves if curve in columns]
    with tempfile.TemporaryDirectory() as folder:
        file, figure = Path(folder) / "comparison.json", Path(folder) / "comparison.png"
        file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        tracked.artifact(file)
        if drawn:
            comparison.draw(completed, drawn, shown.name, figure)
            tracked.artifact(figure)
    caption = f"{shown.name}: mean ± standard deviation over seeds"
    create_table_artifact(rows, key=TABLE_KEY, description=caption)
    return rows


def with_lost(rows: Sequence[Mapping[str, Any]], lost: Sequence[Lost]) -> list[dict[str, Any]]:
    """The rows with a column for missing runs, if there are any; a setting without a run has a row too."""
    if not lost:
        return [dict(row) for row in rows]
    empty = dict.fromkeys((key for row in rows for key in row), "–")
    by_setting = {row["setting"]: dict(row) for row in rows}
    for each in lost:
        by_setting.setdefault(each.cell.setting, {**empty, "setting": each.cell.setting, "seeds": 0})
    for setting, row in by_setting.items():
        own = [f"seed {each.cell.seed}: {each.why}" for each in lost if each.cell.setting == setting]
        row["missing"] = "; ".join(own) or "–"
    return list(by_setting.values())


def show_figure(run: str, values: Config) -> None:
    """Show the figure of MLflow in Prefect too; nothing happens if MLflow does not answer."""
    pages = links.run_links(values.tracking, {}, tracking.key(run))
    if "pipeline" in pages:
        server, _, identity = pages["pipeline"].partition("/#/experiments/")
        identity = identity.partition("?")[0].rpartition("/")[2]
        address = f"{server}/get-artifact?path=comparison.png&run_uuid={identity}"
        create_image_artifact(address, key=FIGURE_KEY, description=f"[in MLflow]({pages['pipeline']})")

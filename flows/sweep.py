"""`rlhf-sweep`: settings × seeds, each a run of the pipeline's deployment, and one comparison at the end.

Each run ends as a DVC experiment whose name is a digest of all that decides its result: commit, settled
parameters, data. What has one is done, so that a sweep that broke off goes on where it was. One with
another gate is another experiment: once one of them is done, DVC has all of the others but the verdict.
All runs are of the commit that the sweep began with: what is committed meanwhile is for the next one. The
runs go to a deployment's work pool and keep its limits: another `deployment` puts them on other machines.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_image_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelling, Completed
from prefect.variables import Variable
from pydantic import Field

from flows import request, results, settings, watch
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import experiments, git, hashing
from rlhf_tasks.report import comparison
from rlhf_tasks.tracking import links
from rlhf_tasks.tracking import pipeline as tracking

POLL_SECONDS = 1.0
CURVES = ("objective/scores", "objective/kl", "objective/rlhf_reward", "policy/clipfrac_avg")
TABLE_KEY, FIGURE_KEY = "rlhf-sweep", "rlhf-sweep-curves"

Grid = Annotated[dict[str, list[Any]], Field(examples=[{"ppo.kl_coef": [0.01, 0.05]}])]
Seeds = Annotated[list[int], Field(min_length=1)]


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    setting: str
    seed: int
    overrides: Mapping[str, Any]
    experiment: str


@dataclass(frozen=True)
class Lost:
    """A run that did not come to its end, and why."""

    cell: Cell
    why: str

    def __str__(self) -> str:
        return f"{self.cell.setting}, seed {self.cell.seed}: {self.why}"


@flow(
    name=settings.SWEEP,
    description="Run the pipeline with several settings and seeds, and compare them.",
    persist_result=False,
)
def sweep(
    grid: Grid | None = None,
    settings_list: list[dict[str, Any]] | None = None,
    seeds: Seeds = [1, 2, 3],  # noqa: B006  Prefect shows it in the form
    preset: request.PresetName | None = None,
    name: request.ExperimentName = "sweep",
    revision: request.Revision | None = None,
    metrics: list[str] | None = None,
    curves: list[str] = list(CURVES),  # noqa: B006
    parallel: Annotated[int, Field(ge=1)] = 2,
    deployment: str = f"{settings.PIPELINE}/pipeline",
) -> State[Any]:
    """Run what is not done yet of settings × seeds, then compare all of it.

    Args:
        grid: Values per dotted key of params.yaml; every combination is run.
        settings_list: Instead of a grid: the overrides of each setting.
        seeds: Every setting is run with each.
        preset: Values written over those of params.yaml before all of it.
        name: Of the sweep; its experiments are called by it and a digest.
        revision: The commit of all runs, by hash, branch or tag; by default that of the sweep of this name
            which broke off, if one did, else the last one.
        metrics: The table's columns, such as ppo/objective/kl; by default the headlines and win rates.
        curves: The figure's panels: columns of plots/ppo.csv.
        parallel: Runs started at once; the limit `gpu` holds besides.
        deployment: What runs them; one of another work pool puts them on other machines.
    """
    try:
        request.check_name(name)
        listed = combinations(grid, settings_list)
        return _run(listed, seeds, preset, name, revision, metrics, curves, parallel, deployment)
    except (UserError, SweepFailed) as error:
        return request.refused(error)


def _run(
    listed: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    preset: str | None,
    name: str,
    revision: str | None,
    metrics: Sequence[str] | None,
    curves: Sequence[str],
    parallel: int,
    deployment: str,
) -> State[Any]:
    """The state of a sweep that comes to its end.

    Raises:
        UserError: for what the user can mend, before any run starts.
        SweepFailed: if some of it could not be done.
    """
    watch.parameters_of(deployment)  # that there is one
    root, run, data = Path.cwd(), str(flow_run.get_id()), Data(Path.cwd())
    last = git.resolve(root, None)
    project = request.settle(root, Request(preset), last)[1].tracking.experiment
    kept = variable(project, name, preset, listed)
    commit = begun_with(root, name, kept) if revision is None else git.resolve(root, revision)
    wanted, values = cells(root, name, preset, listed, seeds, commit, data)
    Variable.set(kept, commit, overwrite=True)
    if commit != last:
        get_run_logger().warning("all runs are of commit %s; `revision: HEAD` takes the last one", commit)
    done = [cell for cell in wanted if experiments.find(root, cell.experiment)]
    get_run_logger().info("%d of %d runs are done already", len(done), len(wanted))
    try:
        with tracking.open_run(run, values.tracking, {"rlhf.sweep": name}) as told:
            todo = [cell for cell in wanted if cell not in done]
            lost = run_cells(todo, deployment, preset, commit, parallel, data)
            failed = [each.cell for each in lost]
            found = [
                comparison.read(root, c.setting, c.seed, c.experiment) for c in wanted if c not in failed
            ]
            rows = compare(found, lost, metrics, curves, name, told)
            if lost:
                raise SweepIncomplete(
                    f"{len(lost)} of {len(wanted)} runs failed ({'; '.join(map(str, lost))}); a new run does "
                    "these only, of the same commit (`revision: HEAD`: all, of the last one)"
                )
    except SweepIncomplete:  # by which the sweep's run in MLflow has ended as FAILED
        show_figure(run, values)
        raise
    show_figure(run, values)
    Variable.unset(kept)
    return Completed(message=f"{len(rows)} setting(s), {len(wanted)} runs, {len(done)} of them done before")


def combinations(
    grid: Mapping[str, Sequence[Any]] | None, listed: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The overrides of each setting.

    Raises:
        UserError: if both or none are given.
    """
    if (grid is None) == (listed is None):
        raise UserError("give either grid (values per key) or settings_list (overrides of each setting)")
    if listed is not None:
        return [dict(overrides) for overrides in listed]
    assert grid is not None
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def variable(project: str, name: str, preset: str | None, listed: Sequence[Mapping[str, Any]]) -> str:
    """The Prefect variable that holds the commit of a sweep which has not come to its end.

    Sweeps of one name but of another project or of other settings have others; more seeds are the same
    sweep. `project`: the experiment of MLflow.
    """
    digest = hashing.json_sha256([project, name, preset, list(map(dict, listed))])
    return f"rlhf_sweep_{digest[:12]}"


def begun_with(root: Path, name: str, kept: str) -> str:
    """The commit of this sweep if it broke off, else the last one.

    Raises:
        UserError: if git has lost that of the sweep.
    """
    begun: Any = Variable.get(kept, None)
    if begun is not None and git.commit(root, begun) is None:
        raise UserError(
            f"the sweep {name} broke off on commit {begun}, which git in {root} does not know any more; "
            "`revision: HEAD` does all of it, of the last one"
        )
    return git.resolve(root, begun)


class SweepFailed(Exception):
    """The sweep could not be done; the message says why, and what to do."""


class SweepIncomplete(SweepFailed):
    """Some of its runs failed; the others are compared."""


class Data:
    """The fingerprints of all data that the sweep reads, as they were when it began."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._begun: dict[str, tuple[Config, str]] = {}

    def fingerprint(self, values: Config) -> str:
        place = f"{values.data.source} {values.data.path} {values.data.hub}"
        if place not in self._begun:
            self._begun[place] = values, watch.fingerprint(self._root, values)
        return self._begun[place][1]

    def check(self, ended: Sequence[Cell] = ()) -> None:
        """Raises SweepFailed if any of it differs now; `ended`: the runs that may have seen either."""
        for values, begun in self._begun.values():
            if watch.fingerprint(self._root, values) != begun:
                names = " ".join(cell.experiment for cell in ended)
                unsure = (
                    f"; `dvc exp remove {names}` first: which data they saw is not known" if names else ""
                )
                raise SweepFailed(
                    f"the data at {values.data.path} changed since the sweep began, so its runs are not "
                    f"to be compared: start it again, and all is run on the data as it is then{unsure}"
                )


def cells(
    root: Path,
    name: str,
    preset: str | None,
    listed: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    commit: str,
    data: Data,
) -> tuple[list[Cell], Config]:
    """All runs of the sweep, checked before any starts, and the config of the first.

    Raises:
        UserError: naming the problems of every setting that has some.
    """
    found, problems, first = [], [], None
    for overrides in listed:
        setting = ", ".join(f"{key}={value}" for key, value in overrides.items()) or "as it is"
        for seed in seeds:
            asked = Request(preset, seed, dict(overrides))
            try:
                _, values, _ = request.settle(root, asked, commit)
            except UserError as error:
                problems.append(f"{setting}: {error}")
                break
            first = first or values
            found.append(Cell(setting, seed, overrides, f"{name}-{_digest(values, commit, data)}"))
    if problems or first is None:
        raise UserError("\n".join(problems) or "the sweep has no setting")
    return found, first


def _digest(values: Config, commit: str, data: Data) -> str:
    tree = {
        "commit": commit,
        "data": data.fingerprint(values),
        "params": values.model_dump(mode="json", exclude=comparison.HOW_NOT_WHAT),
    }
    return hashing.json_sha256(tree)[:12]


def run_cells(
    todo: Sequence[Cell], deployment: str, preset: str | None, commit: str, parallel: int, data: Data
) -> list[Lost]:
    """Run them, some at once; those that failed. A sweep that ends before cancels its runs.

    Raises:
        SweepFailed: if the data changed.
    """
    waiting, running, lost = list(todo), dict[Any, Cell](), list[Lost]()
    with get_client(sync_client=True) as client:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    data.check()
                    cell = waiting.pop(0)
                    parameters = {
                        "preset": preset, "seed": cell.seed, "overrides": dict(cell.overrides),
                        "name": cell.experiment, "revision": commit,
                    }  # fmt: skip
                    started: Any = run_deployment(
                        deployment, parameters=parameters, timeout=0, as_subflow=True
                    )
                    running[started.id] = cell
                time.sleep(POLL_SECONDS)
                ended = list[Cell]()
                for identity in list(running):
                    state = client.read_flow_run(identity).state
                    if state is not None and state.is_final():
                        cell = running.pop(identity)
                        if state.is_completed():
                            ended.append(cell)
                        else:
                            lost.append(Lost(cell, _why(state)))
                if ended:
                    data.check(ended)
        except BaseException:
            for identity in running:
                with suppress(ObjectNotFound):
                    client.set_flow_run_state(identity, Cancelling())
            raise
    return lost


def _why(state: State[Any]) -> str:
    """A state's name, and the first line of what it says."""
    said = (state.message or "").partition("\n")[0]
    return f"{state.name}: {said}" if said else str(state.name)


def compare(
    found: Sequence[comparison.Result],
    lost: Sequence[Lost],
    metrics: Sequence[str] | None,
    curves: Sequence[str],
    name: str,
    told: tracking.Pipeline,
) -> list[dict[str, Any]]:
    """One table and one figure, kept with the sweep's run in MLflow and shown in Prefect.

    A setting's row says which of its runs are missing, and why.
    """
    known = list(dict.fromkeys(key for result in found for key in result.metrics))
    headlines = [key for key in known if key in results.HEADLINES or key.endswith("/win_rate")]
    rows = comparison.table(found, metrics if metrics is not None else headlines or known)
    rows = with_lost(rows, lost)
    drawn = [curve for curve in curves if any(curve in row for r in found for row in r.curves.get("ppo", ()))]
    with tempfile.TemporaryDirectory() as folder:
        file, figure = Path(folder) / "comparison.json", Path(folder) / "comparison.png"
        file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        told.artifact(file)
        if drawn:
            comparison.draw(found, drawn, name, figure)
            told.artifact(figure)
    create_table_artifact(rows, key=TABLE_KEY, description=f"{name}: mean ± standard deviation over seeds")
    return rows


def with_lost(rows: Sequence[Mapping[str, Any]], lost: Sequence[Lost]) -> list[dict[str, Any]]:
    """The rows with a column for what is missing, if anything is; a setting without a run has a row too."""
    if not lost:
        return [dict(row) for row in rows]
    empty = dict.fromkeys((key for row in rows for key in row), "–")
    known = {row["setting"]: dict(row) for row in rows}
    for each in lost:
        known.setdefault(each.cell.setting, {**empty, "setting": each.cell.setting, "seeds": 0})
    for setting, row in known.items():
        own = [f"seed {each.cell.seed}: {each.why}" for each in lost if each.cell.setting == setting]
        row["missing"] = "; ".join(own) or "–"
    return list(known.values())


def show_figure(run: str, values: Config) -> None:
    """The figure in Prefect, as MLflow has it; nothing where MLflow does not answer."""
    pages = links.run_links(values.tracking, {}, tracking.key(run))
    if "pipeline" in pages:
        server, _, identity = pages["pipeline"].partition("/#/experiments/")
        identity = identity.rpartition("/")[2]
        address = f"{server}/get-artifact?path=comparison.png&run_uuid={identity}"
        create_image_artifact(address, key=FIGURE_KEY, description=f"[in MLflow]({pages['pipeline']})")

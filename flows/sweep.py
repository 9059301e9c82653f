"""`rlhf-sweep`: settings × seeds, each a run of the pipeline, and one table at the end.

Each run ends as a DVC experiment whose name is a digest of everything that decides its result: commit,
resolved parameters, data. A run that has its experiment is done, so that an interrupted sweep continues where
it stopped. Another gate makes another experiment; DVC then has everything but the verdict. Prefect shows a
task per run, and cancels the runs with the sweep. They go to the work pool of a deployment and respect its
limits: another `deployment` puts them on other machines. Without one they run here, one after the other.

Settings that are methods, which are presets, end as the page of `report.methods` too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field, TypeAdapter, ValidationError

from flows import automations, form, settings, watch
from flows.pipeline import pipeline, run_here
from flows.slots import Slots, find_limit
from rlhf_tasks.config import STAGES, Config
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import BETWEEN, Request, read
from rlhf_tasks.project import git, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison
from rlhf_tasks.report import methods as page
from rlhf_tasks.tracking import catalogue

TABLE_KEY = "rlhf-sweep"
ALIKE = ("data", "model", "prepare", "base", "sft", "judge")
"""Sections that methods have in common: what their policies start from, and what judges them."""

Values = Annotated[list[Any], Field(min_length=1)]
Grid = Annotated[dict[str, Values], Field(examples=[{"ppo.kl_coef": [0.01, 0.05]}])]
Seeds = Annotated[list[int], Field(min_length=1)]


class SweepFailed(Exception):
    """Some runs of the sweep failed; the message says why, and what to do. The others are compared."""


@dataclass(frozen=True)
class Cell:
    """One run of the sweep: a setting with a seed."""

    setting: str
    seed: int
    overrides: Mapping[str, Any] = field(hash=False)
    experiment: str
    data: str  # the fingerprint of its data at the start of the sweep
    values: Config = field(hash=False)

    @property
    def name(self) -> str:
        """Such as `ppo.kl_coef=0.01 seed=2`."""
        return f"{self.setting} seed={self.seed}"


@flow(
    name=settings.SWEEP,
    description="Run the pipeline with several settings and seeds, and compare them.",
    persist_result=False,
    on_completion=[automations.emit_end],
    on_failure=[automations.emit_end],
    on_cancellation=[automations.emit_end],
    on_crashed=[automations.emit_end],
)
def sweep(
    grid: Grid = {},  # noqa: B006  Prefect shows it in the form
    methods: list[str] = [],  # noqa: B006  no choice in the form: best_of_N is no preset
    seeds: Seeds = [1, 2, 3],  # noqa: B006
    preset: form.PresetName = form.DEFAULT,
    name: form.ExperimentName = "sweep",
    revision: form.Revision | None = None,
    metrics: list[str] = [],  # noqa: B006
    parallel: Annotated[int, Field(ge=0)] = 0,
    promote: bool = False,
    deployment: str = f"{settings.PIPELINE}/pipeline",
) -> State[Any]:
    """Run every setting with every seed, skip the runs that are done, and compare all of them.

    Args:
        grid: Values per dotted key of params.yaml; every combination is one setting. The default is
            params.yaml as it is.
        methods: Presets of which each is a setting, with every combination of the grid, such as ppo, dpo and
            rloo. They also make a page that compares them. best_of_N compares the best of N responses of the
            SFT model.
        seeds: Every setting is run with each of these seeds.
        preset: Changes of params.yaml for all runs. default: no preset.
        name: The name of the sweep; its experiments have this name and a digest.
        revision: The commit of all runs, by hash, branch or tag. The default is the last commit.
        metrics: The columns of the table, such as ppo/objective/kl. The default is the headline metrics.
        parallel: The number of runs at once; the limit `gpu` applies as well. 0: one run more than its slots
            suffice for.
        promote: Let the gate decide at the end of each run whether its policy becomes the champion.
        deployment: The deployment that runs them; one of another work pool uses other machines. Empty: they
            run in this process.
    """
    try:
        # 1. Everything is checked before any run starts.
        if deployment:
            watch.parameters_of(deployment)  # refuses one that does not exist
        root = Path.cwd()
        commit, chosen = git.resolve(root, revision), form.preset_of(preset)
        found = cells(root, name, chosen, list_settings(chosen, methods, grid), seeds, commit)
        if methods:
            check_comparable(found)

        # 2. The runs, a few at once.
        todo = [cell for cell in found if not git.find_experiment(root, cell.experiment)]
        get_run_logger().info("%d of %d runs are already done", len(found) - len(todo), len(found))
        given = {"preset": preset, "revision": commit, "promote": promote, "common": {}, "where": "workspace"}
        inputs = [{"cell": cell, "deployment": deployment, "given": given} for cell in todo]
        states = list[State[Any]]()
        if deployment:
            num_threads = parallel or num_runs(found[0].values) + 1
            pool: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(num_threads)
            with pool:
                futures = [pool.submit(run_cell, parameters) for parameters in inputs]
                for future in futures:
                    future.wait()
                    states.append(future.state)
        else:  # called, not submitted: a submitted one would go on after Ctrl-C
            states = [run_cell(**parameters, return_state=True) for parameters in inputs]
        ends = zip(todo, states, strict=True)
        lost = {cell: f"{state.name}: {state.message}" for cell, state in ends if not state.is_completed()}

        # 3. One table.
        completed = [cell for cell in found if cell not in lost]
        results = [
            replace(comparison.find(Paths(root), c.experiment), setting=c.setting, seed=c.seed)
            for c in completed
        ]
        logged = list(dict.fromkeys(key for result in results for key in result.metrics))
        rows = comparison.table(results, metrics or catalogue.headlines(logged) or logged)
        if rows:
            compare = " ".join(["rlhf compare", *(cell.experiment for cell in completed)])
            caption = f"mean ± standard deviation over seeds; for the curves: `{compare}`"
            create_table_artifact(rows, key=TABLE_KEY, description=caption)
        if methods and completed:
            from rlhf_tasks.tracking.store import log_page  # MLflow takes seconds to import

            out, shown = root / f"{name}.html", [(cell.setting, cell.experiment) for cell in completed]
            with suppress(UserError) if lost else nullcontext():  # why runs failed is said below
                page.write(root, shown, out)
                get_run_logger().info("wrote %s", out)
                log_page(found[0].values.tracking, Paths(root).home, name, out)
        if lost:
            reasons = "; ".join(f"{cell.name}: {why}" for cell, why in lost.items())
            raise SweepFailed(
                f"{len(lost)} of {len(found)} runs failed ({reasons}). Start the sweep again with "
                f"`revision: {commit}` to run only these"
            )
        done = f"{len(found) - len(todo)} of them done before"
        return Completed(message=f"{len(rows)} setting(s), {len(found)} runs, {done}")
    except (UserError, SweepFailed) as error:
        return form.fail_with(error)


def run_methods(methods: Sequence[str], seeds: Sequence[int], preset: str, name: str) -> int:
    """Run the sweep of these methods in this process; returns the exit status.

    Raises UserError for a name that no experiment may have.
    """
    try:
        TypeAdapter(form.ExperimentName).validate_python(name)
    except ValidationError as error:
        raise UserError(f"--name {name}: {error.errors()[0]['msg']}") from None
    given = {"methods": methods, "seeds": seeds, "preset": preset, "name": name, "deployment": ""}
    return run_here(lambda: sweep(**given, return_state=True))


def num_runs(values: Config) -> int:
    """How many runs with these parameters fit into the limit `gpu`, at least 1."""
    with get_client(sync_client=True) as client:
        limit = find_limit(client, settings.SLOTS)
    most = max(Slots().num_slots(stage, values) for stage in STAGES)
    return max(1, (limit.limit if limit is not None else 1) // max(1, most))


@task(name="run", task_run_name="{cell.name}", cache_policy=NO_CACHE, persist_result=False)
def run_cell(cell: Cell, deployment: str, given: Mapping[str, Any]) -> State[Any]:
    """Run one cell of the sweep by a deployment or here, and give the run its name; ends as the run does.

    It fails if the data differs from that at the sweep's start, because the runs could not be compared.
    """
    changed = f"the data ({cell.values.data.in_words}) changed since the sweep began"
    if watch.fingerprint(Path.cwd(), cell.values) != cell.data:
        return Failed(message=changed)
    own = {"seed": cell.seed, "overrides": dict(cell.overrides), "name": cell.experiment}
    if deployment:
        run: Any = run_deployment(
            deployment, flow_run_name=cell.name, parameters={**given, **own}, poll_interval=1
        )
        end: State[Any] = run.state
    else:
        named = pipeline.with_options(flow_run_name=lambda: cell.name)  # a text would be a format
        end = named(**given, **own, return_state=True)
    if watch.fingerprint(Path.cwd(), cell.values) != cell.data:
        return Failed(message=f"{changed}; remove its result: `dvc exp remove {cell.experiment}`")
    message = (end.message or "").partition("\n")[0]
    return State(type=end.type, name=end.name, message=message)


def list_settings(
    preset: str | None, methods: Sequence[str], grid: Mapping[str, Sequence[Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Each setting's name and its changes over `preset`: every method with every combination.

    Raises:
        UserError: for a preset or a seed in the grid; for a method that is no preset, none that trains, two
            best_of_N, or more settings than the figures of the page show.
    """
    if wrong := sorted({"preset", "seed"} & grid.keys()):
        raise UserError(f"grid: {', '.join(wrong)} cannot be there; `methods` are presets, `seeds` are seeds")
    best = [int(found[1]) for found in map(page.BEST_OF.fullmatch, methods) if found]
    trained = [method for method in methods if not page.BEST_OF.fullmatch(method)]
    if len(best) > 1 or (best and not trained):
        raise UserError(
            "give one best_of_N at most, with a method to compare it with, such as `ppo best_of_16`"
        )
    fixed: dict[str, Any] = {"judge.best_of_n": best[0], "judge.best_of_n_model": "sft"} if best else {}
    listed = list[tuple[str, dict[str, Any]]]()
    for method, values in itertools.product(trained or [""], itertools.product(*grid.values())):
        changes, single = dict[str, Any](), dict(zip(grid, values, strict=True))
        if form.preset_of(method or form.DEFAULT):
            changes = {"preset": BETWEEN.join(filter(None, [preset, method])), **read(method)}
        words = [*filter(None, [method]), *(f"{key}={value}" for key, value in single.items())]
        listed.append((", ".join(words) or "unchanged", changes | single | fixed))
    if methods and len(listed) > comparison.MAX_SETTINGS:
        most = comparison.MAX_SETTINGS
        raise UserError(f"{len(listed)} settings, and the figures of methods show {most} at most; give fewer")
    return listed


def check_comparable(found: Sequence[Cell]) -> None:
    """Check that the policies of all cells start from one SFT model, and are judged alike.

    Raises:
        UserError: naming the sections in which methods differ.
    """
    first = found[0].values
    if other := [key for key in ALIKE if any(getattr(c.values, key) != getattr(first, key) for c in found)]:
        raise UserError(
            f"the methods differ in {', '.join(other)}, so that they have another start or other judges: "
            "give a preset that changes these as `preset`, which is of all runs"
        )


def cells(
    root: Path,
    name: str,
    preset: str | None,
    listed: Sequence[tuple[str, Mapping[str, Any]]],
    seeds: Sequence[int],
    commit: str,
) -> list[Cell]:
    """All runs of the sweep, of the settings that are `listed`, checked before any starts.

    Raises UserError with the problems of every invalid setting.
    """
    valid, problems, data = list[Cell](), list[str](), dict[str, str]()
    for (setting, overrides), seed in itertools.product(listed, seeds):
        try:
            _, values, _ = form.resolve(root, Request(preset, seed, dict(overrides)), commit)
        except UserError as error:
            problems.append(f"{setting}: {error}")
            continue
        read = f"{values.data.source} {values.data.path} {values.data.hub} {values.data.mix}"
        data[read] = data.get(read) or watch.fingerprint(root, values)
        params = values.model_dump(mode="json", exclude=comparison.HOW_NOT_WHAT)
        if values.launch.precision != "auto":
            params[PRECISION] = values.launch.precision
        tree = {"commit": commit, "data": data[read], "params": params}
        experiment = f"{name}-{hashing.json_sha256(tree)[:12]}"
        if experiment in [cell.experiment for cell in valid]:
            problems.append(f"{setting}, seed {seed}: the sweep has this run twice; give each once")
        valid.append(Cell(setting, seed, overrides, experiment, data[read], values))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return valid

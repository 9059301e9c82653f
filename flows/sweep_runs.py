"""The runs of a sweep: which there are, what each is named, and how they are run. No torch here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows import request, results, watch
from flows.outcome import has_results
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import hashing
from rlhf_tasks.report import comparison

POLL_SECONDS = 1.0

Show = Callable[[Mapping[str, str], int], None]
"""Gets what each cell does, by its name, and how many of them have ended."""


class SweepFailed(Exception):
    """The sweep cannot be done; the message says why, and what to do."""


@dataclass(frozen=True)
class Cell:
    """One run of the sweep: a setting with a seed."""

    setting: str
    seed: int
    overrides: Mapping[str, Any]
    experiment: str
    name: str
    """Such as `kl_coef=0.01 seed=2`."""


@dataclass(frozen=True)
class Lost:
    """A run that did not complete, and why."""

    cell: Cell
    why: str

    def __str__(self) -> str:
        return f"{self.cell.name}: {self.why}"


class Data:
    """The fingerprints of all data that the sweep reads, as they were at its start."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._first: dict[str, tuple[Config, str]] = {}

    def fingerprint(self, values: Config) -> str:
        key = f"{values.data.source} {values.data.path} {values.data.hub}"
        if key not in self._first:
            self._first[key] = values, watch.fingerprint(self._root, values)
        return self._first[key][1]

    def check(self, completed: Sequence[Cell] = ()) -> None:
        """Raises SweepFailed if any data differs now; `completed`: runs that may have seen either version."""
        for values, first in self._first.values():
            if watch.fingerprint(self._root, values) != first:
                names = " ".join(cell.experiment for cell in completed)
                unsure = (
                    f". Remove runs that may have seen either data: `dvc exp remove {names}`" if names else ""
                )
                raise SweepFailed(
                    f"the data at {values.data.path} changed since the sweep began, so its runs cannot be "
                    f"compared. Start the sweep again to run all of it on the new data{unsure}"
                )


def cells(
    root: Path,
    name: str,
    preset: str | None,
    settings: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    commit: str,
    data: Data,
) -> tuple[list[Cell], Config]:
    """All runs of the sweep, checked before any starts, and the config of the first.

    Raises:
        UserError: with the problems of every invalid setting.
    """
    valid, problems, first = list[Cell](), list[str](), None
    words = short_names([key for overrides in settings for key in overrides])
    for overrides in settings:
        setting = ", ".join(f"{key}={value}" for key, value in overrides.items()) or "unchanged"
        for seed in seeds:
            try:
                _, values, _ = request.resolve(root, Request(preset, seed, dict(overrides)), commit)
            except UserError as error:
                problems.append(f"{setting}: {error}")
                break
            first = first or values
            shown = " ".join([*(f"{words[key]}={value}" for key, value in overrides.items()), f"seed={seed}"])
            cell = Cell(setting, seed, overrides, f"{name}-{_digest(values, commit, data)}", shown)
            if any(cell.experiment == other.experiment for other in valid):
                problems.append(f"{setting}, seed {seed}: the sweep has this run twice; give each once")
            valid.append(cell)
    if problems or first is None:
        raise UserError("\n".join(problems) or "the sweep has no setting")
    return valid, first


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key; the whole key where another one ends in the same word."""
    last = {key: key.rpartition(".")[2] for key in keys}
    times = Counter(last.values())
    return {key: word if times[word] == 1 else key for key, word in last.items()}


def _digest(values: Config, commit: str, data: Data) -> str:
    tree = {
        "commit": commit,
        "data": data.fingerprint(values),
        "params": values.model_dump(mode="json", exclude=comparison.HOW_NOT_WHAT),
    }
    return hashing.json_sha256(tree)[:12]


@dataclass
class Runs:
    """Runs of the pipeline's deployment, in Prefect."""

    deployment: str
    preset: str | None
    commit: str
    promote: bool

    def start(self, cell: Cell) -> Any:
        """Start the run of one cell, which has its name; returns its id."""
        parameters = {
            "preset": self.preset or request.DEFAULT, "seed": cell.seed, "overrides": dict(cell.overrides),
            "name": cell.experiment, "revision": self.commit, "promote": self.promote,
        }  # fmt: skip
        run: Any = run_deployment(
            self.deployment, flow_run_name=cell.name, parameters=parameters, timeout=0, as_subflow=True
        )
        return run.id

    def state(self, identity: Any) -> State[Any] | None:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(identity).state

    def doing(self, identity: Any) -> str:
        """What a run that has not ended does, by its own progress: `ppo: running`."""
        of_run = {"flow_run_id": {"any_": [identity]}, "key": {"any_": [results.PROGRESS_KEY]}}
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(of_run))
        return (found[0].description or "").rpartition("; ")[2] if found else "scheduled"

    def cancel(self, identity: Any) -> None:
        with get_client(sync_client=True) as client, suppress(ObjectNotFound):
            client.set_flow_run_state(identity, Cancelling())


def run_cells(
    cells: Sequence[Cell],
    runs: Runs,
    parallel: int,
    data: Data,
    show: Show,
    poll_seconds: float = POLL_SECONDS,
) -> list[Lost]:
    """Run the cells, `parallel` at once, and return those that failed. `show` gets what each of them does.

    A sweep that ends early cancels its runs.

    Raises:
        SweepFailed: if the data changed.
    """
    waiting, running, lost = list(cells), dict[Any, Cell](), list[Lost]()
    doing = {cell.name: "not started" for cell in cells}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                data.check()
                cell = waiting.pop(0)
                running[runs.start(cell)] = cell
            time.sleep(poll_seconds)
            completed = list[Cell]()
            for identity in list(running):
                state = runs.state(identity)
                if state is None or not state.is_final():
                    doing[running[identity].name] = runs.doing(identity)
                    continue
                cell = running.pop(identity)
                doing[cell.name] = _why(state)
                if has_results(state):
                    completed.append(cell)
                else:
                    lost.append(Lost(cell, _why(state)))
            show(doing, len(cells) - len(waiting) - len(running))
            if completed:
                data.check(completed)
    except BaseException:
        for identity in running:
            runs.cancel(identity)
        raise
    return lost


def _why(state: State[Any]) -> str:
    """A state's name, and the first line of its message."""
    message = (state.message or "").partition("\n")[0]
    return f"{state.name}: {message}" if message else str(state.name)

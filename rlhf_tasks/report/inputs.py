"""What the report reads: small files of the other stages. Only the results of stage judge must exist."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths

Rows = list[dict[str, Any]]
MAX_KEYS_SHOWN = 5  # wrong keys of a file
REPORTED = tuple(stage for stage in STAGES if stage != "report")
CURVED: tuple[Stage, ...] = ("base", "sft", "reward", "ppo", "judge")


class JsonObject(dict[str, Any]):
    """An object of a JSON file. A missing key raises a UserError that names the file and its stage."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self._path} lacks {key}; {_advice(self._path)}")


@dataclass(frozen=True)
class Curve:
    """One metric over steps or episodes: finite points in file order, and how many were not finite.

    `low` and `high`, if they are not empty, are a band around each point.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    num_not_finite: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curves:
    """A plots/STAGE.csv: the name of the x axis ("step" or "episode"), and the metrics by name."""

    axis: str
    by_name: Mapping[str, Curve]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that the page shows. An empty value is a `missing` file, or one without rows."""

    results: EvaluationResults
    metrics: Mapping[str, Mapping[str, float]]
    """By stage."""
    curves: Mapping[str, Curves]
    """By stage."""
    lineage: Mapping[str, Mapping[str, Any]]
    """By stage."""
    outs: Mapping[str, Sequence[str]]
    """Of each stage in dvc.yaml."""
    responses: Rows
    comparisons: Rows
    calibration: Rows
    lengths: Rows
    ppo_samples: Rows
    trips: Rows | None
    """Trips of PPO's guards; None without guards, or without evaluation/ppo/guards.json."""
    verdict: Mapping[str, Any] | None
    """The gate's verdict: empty if promotion is null, None if evaluation/verdict.json is missing."""
    missing: tuple[str, ...]


class _Reader:
    """Reads the files below a project's folder, and notes which are missing."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.missing: list[str] = []

    def existing(self, path: Path) -> Path | None:
        if path.exists():
            return path
        self.missing.append(self.paths.relative(path))
        return None

    def json(self, path: Path) -> JsonObject | None:
        return None if (file := self.existing(path)) is None else _json(file)

    def rows(self, path: Path, *columns: str) -> Rows:
        return [] if (file := self.existing(path)) is None else _rows(file, columns)


def read(paths: Paths, unread: str | None = None) -> Inputs:
    """Read the files of a project. The lineage leaves out `unread`, a dep that no stage reads.

    Raises:
        UserError: if the results of stage judge are missing, or a file exists and cannot be read; later, if
            the page needs a key that a JSON file lacks.
    """
    if not paths.evaluation_results.exists():
        raise UserError(
            f"{paths.relative(paths.evaluation_results)} is missing, and the report is about its win rates; "
            "run `rlhf judge` first, or `dvc repro` for the whole pipeline"
        )
    reader, judge, ppo = _Reader(paths), paths.judge_results, paths.ppo_samples
    guards = reader.json(ppo / "guards.json")
    return Inputs(
        results=EvaluationResults.read(paths.evaluation_results),
        metrics={s: _metrics(p) for s in REPORTED if (p := reader.existing(paths.metrics(s)))},
        curves={s: _curves(p) for s in CURVED if (p := reader.existing(paths.curves(s)))},
        lineage={s: _lineage(p, unread) for s in REPORTED if (p := reader.existing(paths.lineage(s)))},
        outs=_outs(paths),
        responses=reader.rows(paths.judged_responses, "index", "prompt"),
        comparisons=reader.rows(
            judge / "comparisons.parquet", "judge", "a", "b", "index", "outcome", "score_a", "score_b"
        ),
        calibration=reader.rows(
            judge / "calibration.parquet", "model", "origin", "confidence", "right", "low", "high", "pairs"
        ),
        lengths=reader.rows(judge / "lengths.parquet", "judge", "who", "length", "score", "low", "high"),
        ppo_samples=reader.rows(ppo / "samples.parquet", "episode", "prompt", "response", "score"),
        trips=None if guards is None else guards["trips"],
        verdict=reader.json(paths.verdict),
        missing=tuple(reader.missing),
    )


def _outs(paths: Paths) -> dict[str, Sequence[str]]:
    if not paths.dvc_yaml.exists():
        return {}
    return {stage: node.outs for stage, node in dvc_files.graph(paths.root).items()}


def _advice(path: Path) -> str:
    """The command that writes the file again: the stage that the file, or its folder, is named after."""
    return f"run `rlhf {path.stem if path.stem in STAGES else path.parent.name}` again"


def _json(path: Path) -> JsonObject:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_hook=functools.partial(JsonObject, path))
    except ValueError as error:
        raise UserError(f"{path} is not readable as JSON ({error}); {_advice(path)}") from None
    if not isinstance(tree, JsonObject):
        raise UserError(f"{path} must hold an object, but holds {type(tree).__name__}; {_advice(path)}")
    return tree


def _lineage(path: Path, unread: str | None) -> JsonObject:
    tree = _json(path)
    tree.get("inputs", {}).pop(unread, None)
    return tree


def _metrics(path: Path) -> JsonObject:
    tree = _json(path)
    wrong = [key for key, value in tree.items() if not isinstance(value, int | float)]
    if wrong:
        num_more = len(wrong) - MAX_KEYS_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        keys = ", ".join(wrong[:MAX_KEYS_SHOWN])
        raise UserError(f"{path} must hold numbers, but does not at {keys}{more}; {_advice(path)}")
    return tree


def _rows(path: Path, columns: Sequence[str]) -> Rows:
    try:
        table = pq.read_table(path)
    except PermissionError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a Parquet table ({error}); {_advice(path)}") from None
    if table.num_rows == 0:
        return []  # a table that was written without rows has no columns either
    lacking = [name for name in columns if name not in table.column_names]
    if lacking:
        raise UserError(f"{path} has no column {', '.join(lacking)}; {_advice(path)}")
    rows: Rows = table.to_pylist()
    return rows


def _curves(path: Path) -> Curves:
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [["step"]]
    try:
        columns = {
            name: [(float(line[0]), float(line[i])) for line in lines if line[i] != ""]
            for i, name in enumerate(header[1:], start=1)
        }
    except (ValueError, IndexError) as error:
        raise UserError(f"{path} is not a table of numbers ({error}); {_advice(path)}") from None
    return Curves(header[0], {name: _curve(name, points) for name, points in columns.items()})


def _curve(name: str, points: list[tuple[float, float]]) -> Curve:
    finite = [point for point in points if math.isfinite(point[1])]
    return Curve(name, tuple(x for x, _ in finite), tuple(y for _, y in finite), len(points) - len(finite))

"""What the report reads: small files of the other stages. Only metrics/judge.json must exist."""

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

from rlhf_tasks.config import STAGES
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files

Rows = list[dict[str, Any]]
MAX_SHOWN = 5  # keys of a file that are wrong


class Held(dict[str, Any]):
    """An object of a JSON file. Asked for a key that it lacks, it says which file that is, and whose."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self._path} lacks {key}; {_again(self._path)}")


@dataclass(frozen=True)
class Curve:
    """One metric over steps or episodes: finite points in file order, and how many were not finite.

    `low` and `high`, where they are given, are a band around each point.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    num_not_finite: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curves:
    """A plots/STAGE.csv: the x axis' name ("step" or "episode") and the metrics by name."""

    axis: str
    by_name: Mapping[str, Curve]


@dataclass(frozen=True)
class Inputs:
    """Everything the page is made of; an empty value is a file that is `missing` or holds no row."""

    metrics: Mapping[str, Mapping[str, float]]
    curves: Mapping[str, Curves]
    lineage: Mapping[str, Mapping[str, Any]]
    outs: Mapping[str, Sequence[str]]
    """Of each stage, by dvc.yaml."""
    answers: Rows
    verdicts: Rows
    calibration: Rows
    lengths: Rows
    ppo_samples: Rows
    trips: Rows | None
    """What PPO's guards said; None without guards, or without evaluation/ppo/guards.json."""
    gate: Mapping[str, Any] | None
    """evaluation/verdict.json: empty where the gate is off, None where it is missing."""
    missing: tuple[str, ...]


def read(root: Path) -> Inputs:
    """Read the files under `root`, the pipeline's working folder.

    Raises:
        UserError: if metrics/judge.json is missing, or any file is there and cannot be read; and later, by
            whoever takes something of a JSON file that it lacks.
    """
    judge = root / "metrics" / "judge.json"
    if not judge.exists():
        raise UserError(
            "metrics/judge.json is missing, and the report is about its win rates; "
            "run `rlhf judge` first, or `dvc repro` for the whole pipeline"
        )
    missing: list[str] = []

    def there(name: str) -> Path | None:
        if (root / name).exists():
            return root / name
        missing.append(name)
        return None

    reported = [stage for stage in STAGES if stage != "report"]
    curved = ("base", "sft", "reward", "ppo", "judge")
    return Inputs(
        metrics={s: _metrics(p) for s in reported if (p := there(f"metrics/{s}.json"))},
        curves={s: _curves(p) for s in curved if (p := there(f"plots/{s}.csv"))},
        lineage={s: _json(p) for s in reported if (p := there(f"models/lineage/{s}.json"))},
        outs=_outs(root),
        answers=_rows(there("evaluation/judge/answers.parquet"), ("index", "prompt")),
        verdicts=_rows(
            there("evaluation/judge/comparisons.parquet"),
            ("judge", "a", "b", "index", "outcome", "score_a", "score_b"),
        ),
        calibration=_rows(
            there("evaluation/judge/calibration.parquet"),
            ("model", "origin", "confidence", "right", "low", "high", "pairs"),
        ),
        lengths=_rows(
            there("evaluation/judge/lengths.parquet"), ("judge", "who", "length", "score", "low", "high")
        ),
        ppo_samples=_rows(
            there("evaluation/ppo/samples.parquet"), ("episode", "prompt", "response", "score")
        ),
        trips=_json(p)["trips"] if (p := there("evaluation/ppo/guards.json")) else None,
        gate=_json(p) if (p := there("evaluation/verdict.json")) else None,
        missing=tuple(missing),
    )


def _outs(root: Path) -> dict[str, Sequence[str]]:
    if not (root / "dvc.yaml").exists():
        return {}
    return {stage: node.outs for stage, node in dvc_files.graph(root).items()}


def _again(path: Path) -> str:
    """What makes it anew: the stage that the file, or its folder, is named by."""
    return f"run `rlhf {path.stem if path.stem in STAGES else path.parent.name}` again"


def _json(path: Path) -> Held:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_hook=functools.partial(Held, path))
    except ValueError as error:
        raise UserError(f"{path} is not readable as JSON ({error}); {_again(path)}") from None
    if not isinstance(tree, Held):
        raise UserError(f"{path} must hold an object, but holds {type(tree).__name__}; {_again(path)}")
    return tree


def _metrics(path: Path) -> Held:
    tree = _json(path)
    wrong = [key for key, value in tree.items() if not isinstance(value, int | float)]
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise UserError(f"{path} holds no number at {', '.join(wrong[:MAX_SHOWN])}{more}; {_again(path)}")
    return tree


def _rows(path: Path | None, columns: tuple[str, ...]) -> Rows:
    if path is None:
        return []
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise UserError(f"{path} is no table ({error}); {_again(path)}") from None
    if table.num_rows == 0:
        return []  # a table made of no rows has no columns either
    lacking = [name for name in columns if name not in table.column_names]
    if lacking:
        raise UserError(f"{path} has no column {', '.join(lacking)}; {_again(path)}")
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
        raise UserError(f"{path} is no table of numbers ({error}); {_again(path)}") from None
    return Curves(header[0], {name: _curve(name, points) for name, points in columns.items()})


def _curve(name: str, points: list[tuple[float, float]]) -> Curve:
    finite = [point for point in points if math.isfinite(point[1])]
    return Curve(name, tuple(x for x, _ in finite), tuple(y for _, y in finite), len(points) - len(finite))

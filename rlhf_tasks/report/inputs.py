"""What the report reads: small files of the other stages. Only the results of stage judge must exist."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks.config import STAGES
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import figures

Rows = list[dict[str, Any]]
REPORTED = tuple(stage for stage in STAGES if stage != "report")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that the page shows. An empty value is a `missing` file, or one without rows."""

    results: EvaluationResults
    metrics: Mapping[str, Mapping[str, float]]
    """By stage, as the next two."""
    curves: Mapping[str, figures.Points]
    lineage: Mapping[str, Mapping[str, Any]]
    makers: Mapping[str, str]
    """The stage that writes a path, by dvc.yaml."""
    responses: Rows
    comparisons: Rows
    calibration: Rows
    lengths: Rows
    ppo_samples: Rows
    audit: Mapping[str, Mapping[str, float]]
    """What trivial responses earn, by kind: see `ppo.audit.Earnings`. Empty without an audit."""
    trips: Sequence[Mapping[str, Any]] | None
    """Trips of PPO's guards; None without evaluation/ppo/guards.json."""
    verdict: Mapping[str, Any] | None
    """The gate's verdict: empty if promotion is null, None if evaluation/verdict.json is missing."""
    missing: Sequence[str]


def read(paths: Paths, unread: str | None = None) -> Inputs:
    """Read the files of a project. The lineage leaves out `unread`, a dep that no stage reads.

    Raises:
        UserError: if the results of stage judge are missing, or a file exists and cannot be read.
    """
    if not paths.evaluation_results.exists():
        raise UserError(
            f"{paths.relative(paths.evaluation_results)} is missing, and the report is about its win rates; "
            "run `rlhf judge` first, or `dvc repro` for the whole pipeline"
        )
    missing: list[str] = []

    def exists(path: Path) -> bool:
        if not path.exists():
            missing.append(paths.relative(path))
        return path.exists()

    judge, ppo = paths.judge_results, paths.ppo_samples
    guards, audit = ppo / "guards.json", ppo / "audit.json"
    tables = (
        paths.judged_responses,
        *(judge / f"{name}.parquet" for name in ("comparisons", "calibration", "lengths")),
        ppo / "samples.parquet",
    )
    responses, comparisons, calibration, lengths, samples = (_rows(t) if exists(t) else [] for t in tables)
    lineage = {stage: _json(path) for stage in REPORTED if exists(path := paths.lineage(stage))}
    for tree in lineage.values():
        tree.get("inputs", {}).pop(unread, None)
    graph = dvc_files.graph(paths.root) if paths.dvc_yaml.exists() else {}
    return Inputs(
        results=EvaluationResults.read(paths.evaluation_results),
        metrics={stage: _json(path) for stage in REPORTED if exists(path := paths.metrics(stage))},
        curves={stage: _curves(path) for stage in figures.STAGES if exists(path := paths.curves(stage))},
        lineage=lineage,
        makers={out: stage for stage, node in graph.items() for out in node.outs},
        responses=responses,
        comparisons=comparisons,
        calibration=calibration,
        lengths=lengths,
        ppo_samples=samples,
        audit=_json(audit) if audit.exists() else {},
        trips=_json(guards)["trips"] if exists(guards) else None,
        verdict=_json(paths.verdict) if exists(paths.verdict) else None,
        missing=missing,
    )


def points(text: str) -> figures.Points:
    """The rows of a plots/STAGE.csv; a cell is empty where a step has no value.

    Raises:
        ValueError: if a cell is no number.
    """
    rows = csv.DictReader(io.StringIO(text), restval="no cell")
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def _advice(path: Path) -> str:
    """The command that writes the file again: the stage that the file, or its folder, is named after."""
    return f"run `rlhf {path.stem if path.stem in STAGES else path.parent.name}` again"


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable as JSON ({error}); {_advice(path)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold an object, but holds {type(tree).__name__}; {_advice(path)}")
    return tree


def _curves(path: Path) -> figures.Points:
    try:
        return points(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a table of numbers ({error}); {_advice(path)}") from None


def _rows(path: Path) -> Rows:
    try:
        rows: Rows = pq.read_table(path).to_pylist()
    except PermissionError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a Parquet table ({error}); {_advice(path)}") from None
    return rows

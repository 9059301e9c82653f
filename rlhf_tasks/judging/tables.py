"""Tables of an evaluation: one row per comparison, win rates by source, and the win rates for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_tasks import console
from rlhf_tasks.data import columns
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import ComparisonResult
from rlhf_tasks.judging.summary import ByKey

COMPARISONS = pa.schema([
    ("judge", pa.string()), ("a", pa.string()), ("b", pa.string()), ("index", pa.int64()),
    ("outcome", pa.float64()), ("score_a", pa.float64()), ("score_b", pa.float64()),
    ("a_shown_first", pa.float64()), ("a_shown_second", pa.float64()), ("failure", pa.string()),
])  # fmt: skip
WITH_TEXTS = pa.schema(
    [*COMPARISONS, *(pa.field(name, pa.string()) for name in ("prompt", "response_a", "response_b"))]
)
SOURCES = pa.schema([
    ("judge", pa.string()), ("a", pa.string()), ("b", pa.string()), ("source", pa.string()),
    ("win_rate", pa.float64()), ("low", pa.float64()), ("high", pa.float64()), ("prompts", pa.int64()),
])  # fmt: skip
MIN_SOURCE_SIZE = 5  # prompts that a source needs for a win rate of its own


def comparison_table(compared: ByKey) -> pa.Table:
    """One row per comparison; null where a judge has no such number, and NaN for the outcome of a failure."""
    rows = [
        {
            "judge": judge,
            "a": a,
            "b": b,
            "index": i,
            "outcome": float(outcome),
            "score_a": _number(c.scores and c.scores[0], i),
            "score_b": _number(c.scores and c.scores[1], i),
            "a_shown_first": _number(c.orders and c.orders[0], i),
            "a_shown_second": _number(c.orders and c.orders[1], i),
            "failure": c.failures.get(i),
        }
        for (judge, a, b), c in compared.items()
        for i, outcome in enumerate(c.outcomes)
    ]
    return pa.Table.from_pylist(rows, COMPARISONS)


def text_table(
    compared: ByKey, prompts: Sequence[str], texts: Mapping[str, Sequence[str]], kept: Columns = NONE
) -> pa.Table:
    """The same with `prompt`, `response_a` and `response_b`; the outcome of a failure is null.

    `texts` are the responses by contender. `kept` are columns of the prompts' rows, shown as `column/NAME`.
    """
    rows = comparison_table(compared).to_pylist()
    for row in rows:
        index = row["index"]
        row["outcome"] = None if row["failure"] is not None else row["outcome"]
        row |= {
            "prompt": prompts[index],
            "response_a": texts[row["a"]][index],
            "response_b": texts[row["b"]][index],
        } | columns.shown(columns.of_row(kept, index))
    shown = (pa.field(f"column/{name}", pa.string()) for name in kept)
    return pa.Table.from_pylist(rows, pa.schema([*WITH_TEXTS, *shown]))


def _number(values: Any, i: int) -> float | None:
    return None if values is None or math.isnan(values[i]) else float(values[i])


def source_table(compared: ByKey, sources: Sequence[str]) -> pa.Table:
    """Win rates by the source of the prompts: empty for one source, and without sources that are too small.

    The smallest source has MIN_SOURCE_SIZE prompts.
    """
    groups: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(group_of(source), []).append(i)
    rows = []
    for (judge, a, b), comparisons in compared.items() if len(groups) > 1 else ():
        for source, members in groups.items():
            outcomes = comparisons.outcomes[members]
            if (~np.isnan(outcomes)).sum() >= MIN_SOURCE_SIZE:
                rate = statistics.rate(outcomes)
                rows.append(
                    {"judge": judge, "a": a, "b": b, "source": source, "win_rate": rate.value,
                     "low": rate.low, "high": rate.high, "prompts": rate.count}
                )  # fmt: skip
    return pa.Table.from_pylist(rows, SOURCES)


def group_of(source: str) -> str:
    """The file, set or package that a prompt comes from.

    `prompts.jsonl:17` → `prompts.jsonl`, `owner/set:17` → `owner/set`; of docstrings, `torch==2.1
    torch/nn/linear.py:Linear.forward` → `torch` and `json/decoder.py:detect` → `json`.
    """
    place, colon, what = source.rpartition(":")
    if not colon or what.isdecimal():
        return place or source
    return place.rpartition(" ")[2].split("/")[0].removesuffix(".py")


def win_rates(results: Sequence[ComparisonResult]) -> list[dict[str, Any]]:
    """One row per result with its main numbers as text, for the console and MLflow."""
    return [
        {
            "judge": one.judge,
            "pair": f"{one.a} vs {one.b}",
            "win rate": f"{one.win_rate.value:.1%}",
            "low": f"{one.win_rate.low:.1%}",
            "high": f"{one.win_rate.high:.1%}",
            "at equal length": f"{one.length_controlled.value:.1%}",
            "flipped": "" if one.position_bias is None else f"{one.position_bias:.1%}",
            "replies": "" if one.cost is None else one.cost.replies,
            "tokens": "" if one.cost is None else one.cost.tokens,
            "ties": one.ties,
            "failed": one.failures,
            "p": f"{one.p_value:.2g}",
        }
        for one in results
    ]


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table without its empty columns."""
    columns = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    console.table(title, columns, [[row[name] for name in columns] for row in rows])

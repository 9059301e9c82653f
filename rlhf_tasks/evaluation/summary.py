"""Verdicts → metrics, table rows, and what is shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_tasks import console
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.verdicts import Verdicts

Comparison = tuple[str, str, str]
"""Judge, A, B."""
Found = Mapping[Comparison, Verdicts]

VERDICTS = pa.schema([
    ("judge", pa.string()), ("a", pa.string()), ("b", pa.string()), ("index", pa.int64()),
    ("verdict", pa.float64()), ("score_a", pa.float64()), ("score_b", pa.float64()),
    ("a_shown_first", pa.float64()), ("a_shown_second", pa.float64()), ("failure", pa.string()),
])  # fmt: skip
JUDGED = pa.schema([*VERDICTS, *(pa.field(name, pa.string()) for name in ("prompt", "answer_a", "answer_b"))])
SOURCES = pa.schema([
    ("judge", pa.string()), ("a", pa.string()), ("b", pa.string()), ("source", pa.string()),
    ("win_rate", pa.float64()), ("low", pa.float64()), ("high", pa.float64()), ("prompts", pa.int64()),
])  # fmt: skip
MIN_SOURCE_SIZE = 5  # prompts of one source, for a win rate of its own


def stem(comparison: Comparison) -> str:
    judge, a, b = comparison
    return f"{judge}/{a}_vs_{b}"


def metrics(comparison: Comparison, found: Verdicts, a: Sequence[str], b: Sequence[str]) -> dict[str, float]:
    """`JUDGE/A_vs_B/…`. Lengths, for the rate at equal length, are in characters.

    README says what each is. What only a comparing judge has is there for those alone.
    """
    verdict = statistics.verdict(found.outcomes)
    equal = statistics.length_controlled(found.outcomes, [len(x) for x in a], [len(x) for x in b])
    values: dict[str, float] = {
        "win_rate": verdict.win_rate.value,
        "low": verdict.win_rate.low,
        "high": verdict.win_rate.high,
        "ties": verdict.ties,
        "examples": verdict.win_rate.count,
        "failures": verdict.failures,
        "p_value": verdict.p_value,
    }
    for name, estimate in {"decisive": verdict.decisive, "length_controlled": equal}.items():
        values |= {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
    if found.orders is not None:
        bias = statistics.position_bias(*found.orders)
        values |= {
            "position_bias": bias.flips,
            "first_share": bias.first,
            "cost/replies": found.num_replies,
            "cost/tokens": found.num_tokens,
        }
    return {f"{stem(comparison)}/{name}": value for name, value in values.items()}


def kappas(found: Found) -> dict[str, float]:
    """`kappa/X_and_Y` of every two judges, over all comparisons that both made."""
    metrics: dict[str, float] = {}
    for x, y in itertools.combinations(dict.fromkeys(judge for judge, _, _ in found), 2):
        pairs = [(a, b) for judge, a, b in found if judge == x and (y, a, b) in found]
        first, second = (
            np.stack([found[judge, a, b].outcomes for a, b in pairs], axis=1) for judge in (x, y)
        )
        if np.isnan(first + second).all():
            continue
        value = statistics.kappa(first, second)
        key = f"kappa/{x}_and_{y}"
        metrics |= {key: value.value, f"{key}/low": value.low, f"{key}/high": value.high}
    return metrics


def verdict_table(found: Found) -> pa.Table:
    """A row a comparison and prompt; null where a judge has no such number."""
    rows = [
        {
            "judge": judge,
            "a": a,
            "b": b,
            "index": i,
            "verdict": float(outcome),
            "score_a": _number(v.scores and v.scores[0], i),
            "score_b": _number(v.scores and v.scores[1], i),
            "a_shown_first": _number(v.orders and v.orders[0], i),
            "a_shown_second": _number(v.orders and v.orders[1], i),
            "failure": v.failures.get(i),
        }
        for (judge, a, b), v in found.items()
        for i, outcome in enumerate(v.outcomes)
    ]
    return pa.Table.from_pylist(rows, VERDICTS)


def judged_table(found: Found, prompts: Sequence[str], texts: Mapping[str, Sequence[str]]) -> pa.Table:
    """The same with what was judged: `prompt`, `answer_a`, `answer_b`; a failed verdict is null.

    `texts` are the answers by contender.
    """
    rows = verdict_table(found).to_pylist()
    for row in rows:
        index = row["index"]
        row["verdict"] = None if row["failure"] is not None else row["verdict"]
        row |= {
            "prompt": prompts[index],
            "answer_a": texts[row["a"]][index],
            "answer_b": texts[row["b"]][index],
        }
    return pa.Table.from_pylist(rows, JUDGED)


def _number(values: Any, i: int) -> float | None:
    return None if values is None or math.isnan(values[i]) else float(values[i])


def source_table(found: Found, sources: Sequence[str]) -> pa.Table:
    """Win rates by the source of the prompts, where there are several, of MIN_SOURCE_SIZE prompts or more."""
    groups: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(group_of(source), []).append(i)
    rows = []
    for (judge, a, b), v in found.items() if len(groups) > 1 else ():
        for source, members in groups.items():
            outcomes = v.outcomes[members]
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


def table_rows(found: Found, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row a comparison with its main numbers, for the console and MLflow."""
    rows = []
    for comparison in found:
        key = stem(comparison)
        judge, a, b = comparison
        row: dict[str, Any] = {"judge": judge, "pair": f"{a} vs {b}"}
        for column, name in {
            "win rate": "win_rate", "low": "low", "high": "high", "at equal length": "length_controlled",
            "flipped": "position_bias",
        }.items():  # fmt: skip
            value = metrics.get(f"{key}/{name}")
            row[column] = "" if value is None else f"{value:.1%}"
        for column, name in {"replies": "cost/replies", "tokens": "cost/tokens"}.items():
            row[column] = int(metrics[f"{key}/{name}"]) if f"{key}/{name}" in metrics else ""
        row["ties"], row["failed"] = (int(metrics[f"{key}/{name}"]) for name in ("ties", "failures"))
        row["p"] = f"{metrics[f'{key}/p_value']:.2g}"
        rows.append(row)
    return rows


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The columns that hold anything."""
    columns = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    console.table(title, columns, [[row[name] for name in columns] for row in rows])

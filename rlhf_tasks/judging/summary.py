"""Comparisons → typed results, tables for people, the curve of PPO's win rate, and verifiers' accuracy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import Judging
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Comparisons, Judge, check_failures, required_judges
from rlhf_tasks.judging.results import Accuracy, ComparisonResult, Cost, Interval, JudgeKappa
from rlhf_tasks.judging.statistics import length_controlled
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.verifier import Verifier
from rlhf_tasks.tracking import Tracker


class Key(NamedTuple):
    """What identifies the comparisons of two contenders by one judge."""

    judge: str
    a: str
    b: str


ByKey = Mapping[Key, Comparisons]


def compare(
    judge: Judge,
    pairs: Sequence[tuple[str, str]],
    prompts: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    max_failure_share: float,
    columns: Columns = NONE,
) -> dict[Key, Comparisons]:
    """One judge's comparisons of each pair of contenders; `texts` are the responses by contender.
    `columns` are those of the prompts' rows.

    Raises:
        UserError: if the judge cannot work, or fails too often.
    """
    compared = {}
    for a, b in pairs:
        comparisons = judge.compare(prompts, texts[a], texts[b], columns)
        check_failures(judge.name, comparisons, max_failure_share)
        compared[Key(judge.name, a, b)] = comparisons
    return compared


def summarise(key: Key, comparisons: Comparisons, a: Sequence[str], b: Sequence[str]) -> ComparisonResult:
    """The result of the comparisons of responses `a` and `b`.

    Lengths, for the rate at equal length, are in characters. Only a pairwise judge has position bias and
    cost.
    """
    summary = statistics.summarise(comparisons.outcomes)
    controlled = length_controlled(comparisons.outcomes, [len(x) for x in a], [len(x) for x in b])
    has_orders = comparisons.orders is not None
    bias = statistics.position_bias(*comparisons.orders) if comparisons.orders is not None else None
    return ComparisonResult(
        judge=key.judge,
        a=key.a,
        b=key.b,
        win_rate=Interval.of(summary.win_rate),
        decisive=Interval.of(summary.decisive),
        length_controlled=Interval.of(controlled),
        p_value=summary.p_value,
        ties=summary.ties,
        examples=summary.win_rate.count,
        failures=summary.failures,
        position_bias=bias.flips if bias else None,
        first_share=bias.first if bias else None,
        cost=Cost(replies=comparisons.num_replies, tokens=comparisons.num_tokens) if has_orders else None,
    )


def summarise_all(compared: ByKey, texts: Mapping[str, Sequence[str]]) -> tuple[ComparisonResult, ...]:
    """The results of all comparisons; `texts` are the responses by contender."""
    return tuple(summarise(key, one, texts[key.a], texts[key.b]) for key, one in compared.items())


def kappas(compared: ByKey) -> tuple[JudgeKappa, ...]:
    """Cohen's kappa of every two judges, over all comparisons that both made."""
    result = []
    for x, y in itertools.combinations(dict.fromkeys(key.judge for key in compared), 2):
        pairs = [(a, b) for judge, a, b in compared if judge == x and Key(y, a, b) in compared]
        first, second = (
            np.stack([compared[Key(judge, a, b)].outcomes for a, b in pairs], axis=1) for judge in (x, y)
        )
        if not np.isnan(first + second).all():
            kappa = Interval.of(statistics.kappa(first, second))
            result.append(JudgeKappa(first=x, second=y, kappa=kappa))
    return tuple(result)


COMPARISONS = pa.schema(
    dict.fromkeys(("judge", "a", "b"), pa.string())
    | {"index": pa.int64()}
    | dict.fromkeys(("outcome", "score_a", "score_b", "a_shown_first", "a_shown_second"), pa.float64())
    | {"failure": pa.string()}
)
WITH_TEXTS = pa.schema(
    [*COMPARISONS, *(pa.field(name, pa.string()) for name in ("prompt", "response_a", "response_b"))]
)
SOURCES = pa.schema(
    dict.fromkeys(("judge", "a", "b", "source"), pa.string())
    | dict.fromkeys(("win_rate", "low", "high"), pa.float64())
    | {"prompts": pa.int64()}
)
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
                    {
                        "judge": judge,
                        "a": a,
                        "b": b,
                        "source": source,
                        "win_rate": rate.value,
                        "low": rate.low,
                        "high": rate.high,
                        "prompts": rate.count,
                    }
                )
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


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table without its empty columns."""
    columns = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    console.table(title, columns, [[row[name] for name in columns] for row in rows])


def curve_prompts(paths: Paths) -> set[str]:
    """The prompts of the responses that `log` compares."""
    return set(pq.read_table(paths.ppo_responses, columns=["prompt"])["prompt"].to_pylist())


def log_curve(paths: Paths, judges: Sequence[Judge], tracker: Tracker) -> None:
    """Log `JUDGE/win_rate`, `/low` and `/high` over the references, one point per evaluation of PPO.

    The responses are to validation prompts, by which PPO selects its checkpoint too. There is no point where
    every comparison failed.
    """
    rows = columns.decoded(pq.read_table(paths.ppo_responses).to_pylist())
    for episode, group in itertools.groupby(rows, key=lambda row: row["episode"]):
        evaluation = list(group)
        texts, responses, references = (
            [row[column] for row in evaluation] for column in ("prompt", "response", "reference")
        )
        for judge in judges:
            comparisons = judge.compare(texts, responses, references, columns.of_rows(evaluation))
            if len(comparisons.failures) == len(texts):
                continue
            rate = statistics.rate(comparisons.outcomes)
            point = {"win_rate": rate.value, "low": rate.low, "high": rate.high}
            tracker.metrics({f"{judge.name}/{key}": value for key, value in point.items()}, step=episode)


def _verifiers(settings: Judging) -> dict[str, Verifier]:
    return {one.name: Verifier(one.checks, one.format) for one in settings.judges if one.kind == "verifier"}


def check_verifiers(settings: Judging, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
    """Check that the verifiers can use the columns of these rows of data/prompts.

    Only verifiers that the judges `names` need are checked, by default all.

    Raises:
        UserError: naming the judge, and the column or the rows.
    """
    required = required_judges(settings, names)
    for name, verifier in _verifiers(settings).items():
        if name in required:
            verifier.check(rows, columns.of_rows(rows), f"judge.judges: {name}")


def judged_rows(paths: Paths, num_examples: int, labelled: Collection[str]) -> list[dict[str, Any]]:
    """The rows of data/prompts whose columns the judges of stage judge get.

    They are the first test rows, the test rows of the prompts `labelled` by people, and the validation rows
    of the curve. Where `source` names no line of a file, it becomes the table and the row's number.
    """
    curve = curve_prompts(paths)
    used: list[tuple[str, Mapping[str, Any]]] = []
    for i, row in enumerate(read_table(paths, "prompts", "test")):
        if i < num_examples or row["prompt"] in labelled:
            used.append((f"data/prompts/test:{i + 1}", row))
    for i, row in enumerate(read_table(paths, "prompts", "validation")):
        if row["prompt"] in curve:
            used.append((f"data/prompts/validation:{i + 1}", row))
    own = [row.get("source", "") for _, row in used]
    return [
        {**row, "source": source if ":" in source else place}
        for (place, row), source in zip(used, own, strict=True)
    ]


def accuracies(settings: Judging, texts: Mapping[str, Sequence[str]], kept: Columns) -> dict[str, Accuracy]:
    """The accuracy of each contender by each verifier; `texts` are the responses by contender.

    The gain is of `policy` over `sft`. Accuracies have Wilson's interval. Outcomes of right against wrong
    average to (1 + gain) / 2, so that the gain's interval is that of the win rate, with ties as ½.
    """
    result = {}
    for name, verifier in _verifiers(settings).items():
        right = {who: verifier.correct(own, kept) for who, own in texts.items()}
        has_format = verifier.has_format
        shaped = {who: verifier.formatted(own) for who, own in texts.items()} if has_format else {}
        rate = statistics.rate(statistics.outcomes(right["policy"], right["sft"]))
        result[name] = Accuracy(
            right={who: _share(values) for who, values in right.items()},
            formatted={who: _share(values) for who, values in shaped.items()},
            gain=Interval(value=2 * rate.value - 1, low=2 * rate.low - 1, high=2 * rate.high - 1),
        )
    return result


def _share(values: Sequence[bool]) -> Interval:
    return Interval.of(statistics.wilson(sum(values), len(values)))

"""Comparisons → typed results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Comparisons, Judge, check_failures
from rlhf_tasks.judging.length_control import length_controlled
from rlhf_tasks.judging.results import ComparisonResult, Cost, Interval, JudgeKappa


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

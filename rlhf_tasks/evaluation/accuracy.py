"""Accuracy of the contenders by the verifiers among the judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_tasks.config import Judging
from rlhf_tasks.data import columns
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.results import Accuracy, Interval
from rlhf_tasks.modeling.verifier import Verifier


def _verifiers(settings: Judging) -> dict[str, Verifier]:
    return {one.name: Verifier(one.checks, one.format) for one in settings.judges if one.kind == "verifier"}


def check(settings: Judging, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that the verifiers can use the columns of these rows of data/prompts.

    Raises:
        UserError: naming the judge, and the column or the rows.
    """
    for name, verifier in _verifiers(settings).items():
        verifier.check(rows, columns.of_rows(rows), f"judge.judges: {name}")


def measure(settings: Judging, texts: Mapping[str, Sequence[str]], kept: Columns) -> dict[str, Accuracy]:
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

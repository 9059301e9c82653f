"""Accuracy of the contenders by the verifiers among the judges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_tasks.config import Judging
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.judging import progress, statistics
from rlhf_tasks.judging.judges.optimised import required_judges
from rlhf_tasks.judging.results import Accuracy, Interval
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.verifier import Verifier


def _verifiers(settings: Judging) -> dict[str, Verifier]:
    return {one.name: Verifier(one.checks, one.format) for one in settings.judges if one.kind == "verifier"}


def check(settings: Judging, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
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
    curve = progress.prompts(paths)
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

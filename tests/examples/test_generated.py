"""The generated tasks, arithmetic, constraints and opinions: sizes, splits, seeds, answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from examples.arithmetic import arithmetic
from examples.constraints import constraints
from examples.opinions import opinions
from rlhf_tasks.data.rows import SPLITS
from tests.data.conftest import are_disjoint
from tests.examples.conftest import of_split

SUMS = {"num_sft": 1000}
TASKS: dict[Callable[..., Any], tuple[str, dict[str, int], list[int]]] = {
    arithmetic: ("prompt", SUMS, [3000, 200, 400]),
    constraints: ("topic", {}, [2000, 95, 140]),
    opinions: ("topic", {}, [300, 20, 31]),
}
"""The column that is in one split only, further sizes, and the prompts of each split."""


def generate(task: Callable[..., Any], seed: int = 3, **changes: int) -> dict[str, list[dict[str, Any]]]:
    _, further, counts = TASKS[task]
    sizes = further | dict(zip(("num_prompts", "num_validation", "num_test"), counts, strict=True))
    tables: dict[str, list[dict[str, Any]]] = task(seed, **sizes | changes)
    return tables


@pytest.mark.parametrize("task", TASKS)
def test_sizes_are_those_asked_for_and_nothing_is_in_two_splits(task: Callable[..., Any]) -> None:
    column, further, counts = TASKS[task]
    for role, rows in generate(task).items():
        splits = [of_split(rows, split) for split in SPLITS]
        assert [len(some) for some in splits] == [further.get(f"num_{role}", counts[0]), *counts[1:]]
        assert are_disjoint({row[column] for row in some} for some in splits)
        assert len({row["prompt"] for row in rows}) == len(rows)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_the_rows_and_more_than_there_are_is_an_error(task: Callable[..., Any]) -> None:
    assert generate(task) == generate(task) != generate(task, 4)
    with pytest.raises(ValueError, match="s are left for train, fewer than "):
        generate(task, num_prompts=99_999)


def solved(prompt: str) -> int:
    first, sign, second = re.fullmatch(r"(\d+)([+*])(\d)=", prompt).groups()  # type: ignore[union-attr]
    return int(first) + int(second) if sign == "+" else int(first) * int(second)


def test_answers_of_arithmetic_are_right_and_some_demonstrations_are_wrong() -> None:
    tables = generate(arithmetic)
    for row in tables["prompts"]:
        assert row["answer"] == solved(row["prompt"])
        assert row["reference"] == str(solved(row["prompt"]))
    for split, least, most in (("train", 0.16, 0.24), ("validation", 0.12, 0.28), ("test", 0, 0)):
        rows = of_split(tables["sft"], split)
        wrong = sum(row["completion"] != str(solved(row["prompt"])) for row in rows) / len(rows)
        assert least <= wrong <= most
    prompts = {row["prompt"] for row in of_split(tables["prompts"], "train")}
    assert {row["prompt"] for row in of_split(tables["sft"], "train")} <= prompts


def test_a_question_about_an_opinion_names_its_topic_and_has_no_reference() -> None:
    rows = generate(opinions)["prompts"]
    assert all(row["topic"] in row["prompt"] and "reference" not in row for row in rows)

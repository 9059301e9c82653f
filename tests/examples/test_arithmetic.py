"""The generated arithmetic problems."""

from __future__ import annotations

import re
from typing import Any

import pytest

from examples.arithmetic import arithmetic
from tests.data.conftest import are_disjoint
from tests.examples.conftest import of_split

SIZES: dict[str, Any] = {"num_prompts": 3000, "num_sft": 1000, "num_validation": 200, "num_test": 400}


def solved(prompt: str) -> int:
    first, sign, second = re.fullmatch(r"(\d+)([+*])(\d)=", prompt).groups()  # type: ignore[union-attr]
    return int(first) + int(second) if sign == "+" else int(first) * int(second)


def test_answers_are_right_and_some_demonstrations_are_wrong() -> None:
    tables = arithmetic(3, **SIZES)
    for row in tables["prompts"]:
        assert row["answer"] == solved(row["prompt"])
        assert row["reference"] == str(solved(row["prompt"]))
    for split, least, most in (("train", 0.16, 0.24), ("validation", 0.12, 0.28), ("test", 0, 0)):
        rows = of_split(tables["sft"], split)
        wrong = sum(row["completion"] != str(solved(row["prompt"])) for row in rows) / len(rows)
        assert least <= wrong <= most


def test_no_problem_is_in_two_splits_and_sizes_are_those_asked_for() -> None:
    tables = arithmetic(3, **SIZES)
    for role, num_train in {"sft": 1000, "prompts": 3000}.items():
        prompts = [
            [row["prompt"] for row in of_split(tables[role], split)]
            for split in ("train", "validation", "test")
        ]
        assert are_disjoint(map(set, prompts))
        assert (
            [len(set(some)) for some in prompts] == [len(some) for some in prompts] == [num_train, 200, 400]
        )
    prompts_of = {row["prompt"] for row in of_split(tables["prompts"], "train")}
    assert {row["prompt"] for row in of_split(tables["sft"], "train")} <= prompts_of


def test_a_seed_decides_the_problems_and_too_many_are_refused() -> None:
    assert arithmetic(3, **SIZES) == arithmetic(3, **SIZES) != arithmetic(4, **SIZES)
    with pytest.raises(ValueError, match=r"7680 problems are left for train, fewer than num_prompts=9000"):
        arithmetic(3, **SIZES | {"num_prompts": 9000})

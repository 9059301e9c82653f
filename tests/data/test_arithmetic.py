"""The generated arithmetic problems, and the tutorial's reward for them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_tasks.data import arithmetic
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.errors import UserError
from tests.data.conftest import are_disjoint

SIZES: dict[str, Any] = {"num_prompts": 3000, "num_sft": 1000, "num_validation": 200, "num_test": 400}


def generate(seed: int = 3, **changes: int) -> Any:
    return arithmetic.generate(seed, **{**SIZES, **changes}, keep=("answer",))


def solved(prompt: str) -> int:
    first, sign, second = re.fullmatch(r"(\d+)([+*])(\d)=", prompt).groups()  # type: ignore[union-attr]
    return int(first) + int(second) if sign == "+" else int(first) * int(second)


def test_answers_are_right_and_some_demonstrations_are_wrong() -> None:
    tables = generate()
    for split in SPLITS:
        for row in tables["prompts"][split]:
            assert row["columns"] == {"answer": solved(row["prompt"])}
            assert row["reference"] == str(solved(row["prompt"]))
    for split, least, most in (("train", 0.16, 0.24), ("validation", 0.12, 0.28), ("test", 0, 0)):
        rows = tables["sft"][split]
        wrong = sum(row["completion"] != str(solved(row["prompt"])) for row in rows) / len(rows)
        assert least <= wrong <= most
    assert [len(tables["prompts"][split]) for split in SPLITS] == [3000, 200, 400]
    assert [len(tables["sft"][split]) for split in SPLITS] == [1000, 200, 400]


def test_no_problem_is_in_two_splits() -> None:
    tables = generate()
    sets = {split: {row["prompt"] for row in tables["prompts"][split]} for split in SPLITS}
    assert are_disjoint(sets.values())
    assert {row["prompt"] for row in tables["sft"]["train"]} <= sets["train"]
    for split in SPLITS:
        prompts = [row["prompt"] for row in tables["prompts"][split]]
        assert len(set(prompts)) == len(prompts)


def test_a_seed_decides_the_problems_and_too_many_are_refused() -> None:
    assert generate(3) == generate(3) != generate(4)
    assert "columns" not in arithmetic.generate(3, **SIZES)["prompts"]["test"][0]
    with pytest.raises(UserError, match=r"synthetic_prompt_rows=9000, and .* different train problems"):
        generate(num_prompts=9000)

"""Questions about opinions: splits by topic, sizes."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.constraints import TOPICS
from rlhf_tasks.data.opinions import OPENERS, generate
from rlhf_tasks.errors import UserError
from tests.data.conftest import are_disjoint

SIZES: dict[str, Any] = {"num_prompts": 300, "num_validation": 20, "num_test": 31}


def test_every_topic_is_in_one_split_and_sizes_are_those_asked_for() -> None:
    found = generate(1, keep=["topic"], **SIZES)["prompts"]
    assert {split: len(rows) for split, rows in found.items()} == {"train": 300, "validation": 20, "test": 31}
    topics = {split: {row[KEY]["topic"] for row in rows} for split, rows in found.items()}
    assert are_disjoint(topics.values())
    prompts = [row["prompt"] for rows in found.values() for row in rows]
    assert len({*prompts}) == len(prompts)
    assert all(row[KEY]["topic"] in row["prompt"] for rows in found.values() for row in rows)


def test_the_seed_decides() -> None:
    first = generate(1, **SIZES)
    assert first == generate(1, **SIZES) != generate(2, **SIZES)
    assert all(KEY not in row for row in first["prompts"]["test"])
    assert all(row["reference"] is None for row in first["prompts"]["test"])


def test_more_prompts_than_there_are_is_an_error() -> None:
    with pytest.raises(UserError, match=r"opinions has .* lower prepare\.synthetic_prompt_rows"):
        generate(1, num_prompts=len(TOPICS) * len(OPENERS), num_validation=1, num_test=1)

"""Questions about opinions: splits by topic, sizes."""

from __future__ import annotations

from typing import Any

import pytest

from examples.opinions import OPENERS, opinions
from examples.topics import TOPICS
from rlhf_tasks.data.rows import SPLITS
from tests.data.conftest import are_disjoint
from tests.examples.conftest import of_split

SIZES: dict[str, Any] = {"num_prompts": 300, "num_validation": 20, "num_test": 31}


def test_every_topic_is_in_one_split_and_sizes_are_those_asked_for() -> None:
    every = opinions(1, **SIZES)["prompts"]
    rows = {split: of_split(every, split) for split in SPLITS}
    assert [len(rows[split]) for split in SPLITS] == [300, 20, 31]
    assert are_disjoint({row["topic"] for row in some} for some in rows.values())
    assert len({row["prompt"] for row in every}) == len(every)
    assert all(row["topic"] in row["prompt"] and "reference" not in row for row in every)


def test_the_seed_decides_and_more_prompts_than_there_are_is_an_error() -> None:
    assert opinions(1, **SIZES) == opinions(1, **SIZES) != opinions(2, **SIZES)
    with pytest.raises(ValueError, match=r"prompts are left for train, fewer than .*; lower the numbers"):
        opinions(1, num_prompts=len(TOPICS) * len(OPENERS), num_validation=1, num_test=1)

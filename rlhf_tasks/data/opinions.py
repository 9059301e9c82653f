"""`data.source: opinions`: questions about a topic to which no response is right or wrong; no responses.

They are about the topics of `constraints`, and every topic is in one split. Column `topic` names it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from rlhf_tasks.config import Split
from rlhf_tasks.data.constraints import TOPICS, Row, prompt
from rlhf_tasks.errors import UserError

COLUMNS = ("topic",)
OPENERS = (
    "What do you think of {}?",
    "How do people feel about {}?",
    "Write a short comment about {}.",
    "Tell a friend about {} in a sentence.",
    "Describe a day with {} in a sentence.",
    "What was it like the last time you met {}?",
)


def generate(
    seed: int,
    *,
    num_prompts: int,
    num_validation: int,
    num_test: int,
    keep: Sequence[str] = (),
) -> dict[Literal["prompts"], dict[Split, list[Row]]]:
    """Plain prompts by split.

    Raises:
        UserError: if there are not as many.
    """
    rng = random.Random(f"opinions-{seed}")
    topics = list(TOPICS)
    rng.shuffle(topics)
    parts: dict[Split, list[Row]] = {}
    sizes: dict[Split, int] = {"test": num_test, "validation": num_validation, "train": num_prompts}
    for split, count in sizes.items():
        needed = len(topics) if split == "train" else -(-count // len(OPENERS))
        rows = [
            {"text": words.format(topic), "topic": topic} for topic in topics[:needed] for words in OPENERS
        ]
        topics = topics[needed:]
        if count > len(rows):
            raise UserError(
                f"data.source=opinions has {len(TOPICS) * len(OPENERS)} prompts, and {len(rows)} are left "
                f"for the {count} of {split}; lower prepare.synthetic_prompt_rows, data.num_validation or "
                "data.num_test"
            )
        rng.shuffle(rows)
        parts[split] = [prompt(row, keep, "opinions") for row in rows[:count]]
    return {"prompts": parts}

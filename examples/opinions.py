"""Questions to which no response is right or wrong, and that have none: `rlhf preset sentiment`.

    data: {source: "examples.opinions:opinions", options: {num_prompts: 2000}}

Every topic is in one split only.
"""

import random
from typing import Any

from .topics import TOPICS

OPENERS = (
    "What do you think of {}?",
    "How do people feel about {}?",
    "Write a short comment about {}.",
    "Tell a friend about {} in a sentence.",
    "Describe a day with {} in a sentence.",
    "What was it like the last time you met {}?",
)


def opinions(
    seed: int, num_validation: int, num_test: int, num_prompts: int = 2000
) -> dict[str, list[dict[str, Any]]]:
    """Prompts alone. The column `topic` may be kept."""
    rng = random.Random(f"opinions-{seed}")
    topics = list(TOPICS)
    rng.shuffle(topics)
    prompts = []
    for split, count in {"test": num_test, "validation": num_validation, "train": num_prompts}.items():
        needed = len(topics) if split == "train" else -(-count // len(OPENERS))
        rows = [
            {"prompt": words.format(topic), "topic": topic, "split": split, "source": "opinions"}
            for topic in topics[:needed]
            for words in OPENERS
        ]
        if count > len(rows):
            raise ValueError(
                f"{len(rows)} prompts are left for {split}, fewer than {count}; lower the numbers"
            )
        rng.shuffle(rows)
        prompts += rows[:count]
        topics = topics[needed:]
    return {"prompts": prompts}

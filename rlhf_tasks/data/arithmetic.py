"""`data.source: arithmetic`: sums of a number from 100 to 999 and a digit, and products below 300.

Column `answer` is the right number. References are right, and so are the demonstrations of the test split.
Other demonstrations are slips in the share WRONG: the writer is off by 1, 2 or 10. Every problem is in one
split only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlhf_tasks.config import Split
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.errors import UserError

COLUMNS = ("answer",)
WRONG = 0.2
SLIPS = (-10, -2, -1, 1, 2, 10)
Row = dict[str, Any]


class Problem(NamedTuple):
    sign: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a * self.b

    @property
    def prompt(self) -> str:
        return f"{self.a}{self.sign}{self.b}="


def problems() -> Iterator[Problem]:
    """Every problem once; the digit is always the second number."""
    yield from (Problem("+", a, b) for a in range(100, 1000) for b in range(1, 10))
    yield from (Problem("*", a, b) for a in range(10, 100) for b in (2, 3))


def generate(
    seed: int, *, num_prompts: int, num_sft: int, num_validation: int, num_test: int, keep: Sequence[str] = ()
) -> dict[str, dict[Split, list[Row]]]:
    """Demonstrations and prompts by split. The first `num_sft` train prompts are also demonstrations.

    Raises:
        UserError: if there are not as many problems.
    """
    rng = random.Random(f"arithmetic-{seed}")
    every = list(problems())
    rng.shuffle(every)
    held_out = num_test + num_validation
    train = every[held_out:]
    if num_prompts > len(train):
        raise UserError(
            f"prepare.synthetic_prompt_rows={num_prompts}, and with data.num_validation={num_validation} and "
            f"data.num_test={num_test} there are {len(train)} different train problems; lower one of them"
        )
    parts: dict[Split, list[Problem]] = {
        "train": train[:num_prompts],
        "validation": every[num_test:held_out],
        "test": every[:num_test],
    }
    return {
        "sft": {
            split: [_demonstration(rng, one, split) for one in own[: num_sft if split == "train" else None]]
            for split, own in parts.items()
        },
        "prompts": {split: [_prompt(one, keep) for one in own] for split, own in parts.items()},
    }


def _demonstration(rng: random.Random, one: Problem, split: Split) -> Row:
    slips = split != "test" and rng.random() < WRONG
    answer = max(0, one.answer + rng.choice(SLIPS)) if slips else one.answer
    return {"prompt": one.prompt, "completion": str(answer), "source": "arithmetic"}


def _prompt(one: Problem, keep: Sequence[str]) -> Row:
    row: Row = {"prompt": one.prompt, "reference": str(one.answer), "source": "arithmetic"}
    return row | ({KEY: {name: getattr(one, name) for name in keep}} if keep else {})

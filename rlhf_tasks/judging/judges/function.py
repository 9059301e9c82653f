"""Functions of the user that compare two responses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.pairwise import Question, Reply
from rlhf_tasks.scoring.function import ColumnsFunction
from rlhf_tasks.scoring.protocol import read_scores


class FunctionComparer:
    """A `Comparer`: `function(prompts, a, b, **columns)` gives per pair the probability that `a` is better.

    None is a failure.

    Raises:
        UserError: as `ColumnsFunction`, and if it does not return one number from 0 to 1, or None, per pair.
    """

    def __init__(self, function: str, key: str, root: Path, columns: Collection[str] = ()) -> None:
        self._function = ColumnsFunction(function, key, root, columns, num_lists=3)

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        returned = self._function(*zip(*questions, strict=True), columns=columns)
        if isinstance(returned, Iterable):
            returned = [math.nan if x is None else x for x in returned]
        found = read_scores(self._function.name, returned, len(questions), per="pair").tolist()
        wrong = next((x for x in found if x < 0 or x > 1), None)
        if wrong is not None:
            raise UserError(
                f"{self._function.name} must return a probability or None per pair, but gave {wrong:g}"
            )
        return [Reply.failed("the function cannot tell") if math.isnan(x) else Reply(x) for x in found]

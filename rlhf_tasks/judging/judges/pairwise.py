"""Judges that compare two responses: each pair in both orders, since many models favour a place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rlhf_tasks.data.columns import NONE, Columns, take
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Comparisons


class Question(NamedTuple):
    prompt: str
    first: str
    second: str


@dataclass(frozen=True)
class Reply:
    """Probability that the response shown first is the better one; NaN, with the reason, after a failure."""

    probability: float
    failure: str = ""
    num_tokens: int = 0

    @classmethod
    def failed(cls, reason: str, num_tokens: int = 0) -> Reply:
        return cls(math.nan, reason, num_tokens)


class Comparer(Protocol):
    """A model that replies to questions."""

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        """A reply to each question, in order; `columns` are those of the questions' rows.

        Raises:
            UserError: if the model cannot reply at all, or as soon as more than `max_failures` replies have
                failed.
        """


class PairwiseJudge:
    """A judge that compares each pair in both orders.

    A preference that changes with the order is a tie. Two equal responses are a tie, and the model does not
    see them.
    """

    def __init__(self, name: str, comparer: Comparer, max_failure_share: float) -> None:
        self.name = name
        self._comparer, self._max_failure_share = comparer, max_failure_share

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        differ = [i for i in range(len(prompts)) if a[i] != b[i]]
        questions = [Question(prompts[i], *order) for i in differ for order in ((a[i], b[i]), (b[i], a[i]))]
        # Two failed replies to one pair are one failed comparison: fewer failed replies prove nothing yet.
        max_failures = 2 * self._max_failure_share * len(prompts)
        rows = take(columns, [i for i in differ for _ in range(2)])
        replies = self._comparer(questions, max_failures, rows) if questions else []
        a_first, a_second = np.full(len(prompts), np.nan), np.full(len(prompts), np.nan)
        outcomes = np.full(len(prompts), 0.5)
        failures: dict[int, str] = {}
        for i, first, second in zip(differ, replies[0::2], replies[1::2], strict=True):
            a_first[i], a_second[i] = first.probability, 1 - second.probability
            if first.failure or second.failure:
                failures[i] = first.failure or second.failure
        outcomes[differ] = statistics.both_orders(a_first[differ], a_second[differ])
        return Comparisons(
            outcomes,
            orders=(a_first, a_second),
            failures=failures,
            num_replies=len(replies),
            num_tokens=sum(reply.num_tokens for reply in replies),
        )

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return {}

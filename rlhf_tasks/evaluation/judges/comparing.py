"""Judges that are shown two answers: each pair in both orders, since many favour a place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.verdicts import Verdicts


class Question(NamedTuple):
    prompt: str
    first: str
    second: str


@dataclass(frozen=True)
class Reply:
    """Probability that the answer shown first is the better one; NaN, with the reason, after a failure."""

    probability: float
    failure: str = ""
    num_tokens: int = 0

    @classmethod
    def failed(cls, why: str, num_tokens: int = 0) -> Reply:
        return cls(math.nan, why, num_tokens)


class Comparer(Protocol):
    def __call__(self, questions: Sequence[Question], max_failures: float) -> list[Reply]:
        """A reply to each question, in order.

        Raises:
            UserError: if it cannot answer at all, or once more than `max_failures` replies have failed
                (it need not wait for the last to say so).
        """


class Comparing:
    """A judge made of comparisons in both orders.

    A verdict that turns with the order is a tie. The same two answers are a tie without being shown.
    """

    def __init__(self, name: str, comparer: Comparer, max_failure_share: float) -> None:
        self.name = name
        self._comparer, self._max_failure_share = comparer, max_failure_share

    def compare(self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        differ = [i for i in range(len(prompts)) if a[i] != b[i]]
        questions = [Question(prompts[i], *shown) for i in differ for shown in ((a[i], b[i]), (b[i], a[i]))]
        # a pair of two failed replies is one failed verdict: fewer failed replies prove nothing yet
        most = 2 * self._max_failure_share * len(prompts)
        replies = self._comparer(questions, most) if questions else []
        a_first, a_second = np.full(len(prompts), np.nan), np.full(len(prompts), np.nan)
        outcomes = np.full(len(prompts), 0.5)
        failures: dict[int, str] = {}
        for i, there, back in zip(differ, replies[0::2], replies[1::2], strict=True):
            a_first[i], a_second[i] = there.probability, 1 - back.probability
            if there.failure or back.failure:
                failures[i] = there.failure or back.failure
        outcomes[differ] = statistics.both_orders(a_first[differ], a_second[differ])
        return Verdicts(
            outcomes,
            orders=(a_first, a_second),
            failures=failures,
            num_replies=len(replies),
            num_tokens=sum(reply.num_tokens for reply in replies),
        )

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return {}

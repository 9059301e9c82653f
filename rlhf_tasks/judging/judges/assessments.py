"""What MLflow shows beside a traced reply of an llm judge: its preference, and that of people.

Both are feedback under the judge's name, with the same values: by human feedback of that name MLflow compares
a judge with people, and aligns it with them. A label is also an expectation of that name, which is the known
answer that MLflow gives to its scorers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rlhf_tasks.judging.judges.pairwise import Question, Reply
from rlhf_tasks.judging.judges.prompt_templates import LETTERS
from rlhf_tasks.tracking.events import Assessment

if TYPE_CHECKING:  # the stage ppo, which builds judges too, does not depend on labels
    from rlhf_tasks.judging.human_labels import Label

TIE = "tie"
UNNAMED = "rlhf label"
"""The source of a label that does not say who gave it."""


class Labels:
    """The labels of people by the texts of their pairs, in either order."""

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        self._known: dict[tuple[str, frozenset[str]], list[Label]] = defaultdict(list)
        for label in labels:
            self._known[label.pair.key].append(label)

    def of(self, question: Question) -> Sequence[Label]:
        """The labels of a question's two responses."""
        return self._known.get((question.prompt, frozenset((question.first, question.second))), ())


def of_judge(name: str, model: str, reply: Reply, text: str, time: int) -> Assessment:
    """The preference that a reply states, or the reason why it states none; `text` is the whole reply.

    `time` is in milliseconds since 1970. A reply of several lines is its own rationale.
    """
    probability = {} if reply.failure else {"probability_of_A": f"{reply.probability:.4g}"}
    return Assessment(
        name=name, kind="feedback", source="LLM_JUDGE", by=model, time=time,
        value=None if reply.failure else _letter(reply.probability), error=reply.failure,
        rationale=text.strip() if len(text.strip().splitlines()) > 1 else "", metadata=probability,
    )  # fmt: skip


def of_people(name: str, question: Question, labels: Sequence[Label], time: int) -> list[Assessment]:
    """Each label as feedback and as an expectation, in the order in which the question shows its pair.

    `time`, in milliseconds since 1970, stands in where a label has no time that can be read.
    """
    said: list[Assessment] = []
    for label in labels:
        if label.outcome is None:
            continue
        shows_a_first = label.pair.answer_a == question.first
        feedback = Assessment(
            name=name, kind="feedback", source="HUMAN", by=label.by or UNNAMED,
            time=_milliseconds(label.when) or time, error="", rationale="", metadata={},
            value=_letter(label.outcome if shows_a_first else 1 - label.outcome),
        )  # fmt: skip
        said += [feedback, {**feedback, "kind": "expectation"}]
    return said


def _milliseconds(when: str) -> int | None:
    """An ISO 8601 time in milliseconds since 1970; None for other text."""
    try:
        return round(datetime.fromisoformat(when).timestamp() * 1000)
    except ValueError:
        return None


def _letter(probability: float) -> str:
    """The letter of the preferred response, by the probability that the first one is better."""
    return TIE if probability == 0.5 else LETTERS[probability < 0.5]

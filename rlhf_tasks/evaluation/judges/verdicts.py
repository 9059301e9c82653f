"""What a judge is, and what it says of two sets of answers. N prompts.

Two kinds of judges stand behind one Protocol: those that give each answer a number (scoring.py), and those
that are shown two answers and name the better one (comparing.py). mixtures.py makes one of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.statistics import Floats

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Verdicts:
    """A against B on N prompts. Arrays are (N,) float64."""

    outcomes: Floats
    """1 where A wins, ½ for a tie, 0 where B wins, NaN where the judge failed."""
    scores: tuple[Floats, Floats] | None = None
    """Of A and of B, from a judge that scores."""
    orders: tuple[Floats, Floats] | None = None
    """Probability that A is better, A shown first and second, from a judge that compares; NaN where it
    failed, or was not asked since the answers are the same."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Why it failed, by number of the prompt."""
    num_replies: int = 0
    """What the verdicts cost, whether it was paid now or before."""
    num_tokens: int = 0


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def compare(self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """Verdicts on A's answers against B's, a prompt each.

        Raises:
            UserError: if it cannot judge at all, was not allowed to go on, or fails too often.
        """

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        """What else this judge measures of a set of answers, as means."""


def check_failures(judge: str, found: Verdicts, max_share: float) -> None:
    """Refuse verdicts of which too many failed.

    Raises:
        UserError: naming the judge, the share, and the most frequent reason.
    """
    count, failed = len(found.outcomes), len(found.failures)
    if failed > max_share * count or failed == count:
        raise too_many(judge, list(found.failures.values()), f"{failed} of {count} verdicts", max_share)


def too_many(judge: str, reasons: Collection[str], what: str, max_share: float) -> UserError:
    reason, times = Counter(reasons).most_common(1)[0]
    return UserError(
        f"judge {judge}: {what} failed, more than max_failure_share={max_share:g} allows; "
        f"{times} with: {reason.rstrip('.')}. Verdicts that were got from a server are kept"
    )


def shown(text: str) -> str:
    """As much of a text as fits into a message."""
    return text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")

"""What a judge is, and the outcomes of its comparisons. N prompts.

Two kinds of judges implement one Protocol: those that give each response a score (scoring.py), and those
that compare two responses and prefer one (pairwise.py). combined.py makes one judge of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.statistics import Floats

EXCERPT_CHARACTERS = 200


@dataclass(frozen=True)
class Comparisons:
    """A against B on N prompts. Arrays are (N,) float64."""

    outcomes: Floats
    """1 where A wins, ½ for a tie, 0 where B wins, NaN for a failure of the judge."""
    scores: tuple[Floats, Floats] | None = None
    """The scores of A and of B, from a judge that scores."""
    orders: tuple[Floats, Floats] | None = None
    """Probability that A is better, with A shown first and with A shown second, from a pairwise judge.

    NaN for a failure, and where both responses are the same, so that the judge does not see them."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """The reason of each failure, by the prompt's number."""
    num_replies: int = 0
    """The replies that the comparisons cost, in this run or in an earlier one; `num_tokens` likewise."""
    num_tokens: int = 0


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        """Compare A's responses with B's, one of each per prompt; `columns` are those of the prompts' rows.

        Raises:
            UserError: if the judge cannot work, reaches its budget, or fails too often.
        """

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        """Other measures that this judge has of a set of responses, as means."""


def check_failures(judge: str, comparisons: Comparisons, max_share: float) -> None:
    """Refuse comparisons of which too many failed.

    Raises:
        UserError: naming the judge, the share, and the most frequent reason.
    """
    count, failed = len(comparisons.outcomes), len(comparisons.failures)
    if failed > max_share * count or failed == count:
        reasons = list(comparisons.failures.values())
        raise too_many_failures(judge, reasons, f"{failed} of {count} comparisons", max_share)


def too_many_failures(judge: str, reasons: Collection[str], what: str, max_share: float) -> UserError:
    reason, times = Counter(reasons).most_common(1)[0]
    return UserError(
        f"judge {judge}: {what} failed, more than max_failure_share={max_share:g} allows; "
        f"{times} with: {reason.rstrip('.')}. The replies of a server are kept: run the same command again"
    )


def excerpt(text: str) -> str:
    """The beginning of a text, short enough for a message."""
    return text[:EXCERPT_CHARACTERS] + ("…" if len(text) > EXCERPT_CHARACTERS else "")

"""Labels that people gave to pairs of responses, and how far judges agree with them. No torch.

A label holds the texts themselves, so that it stays true when the models change:

    {"prompt": …, "answer_a": …, "answer_b": …, "outcome": 1 | 0.5 | 0 | null}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from rlhf_tasks.judging import rows, statistics
from rlhf_tasks.judging.results import HumanAgreement


def _number(value: Any) -> Any:
    """A CSV has texts, and empty cells."""
    return (float(value) if value.strip() else None) if isinstance(value, str) else value


class Label(rows.Row):
    """Two responses to a prompt, and which one a person prefers."""

    FORM: ClassVar[str] = (
        "a label has the texts prompt, answer_a and answer_b, and an outcome: 1 (A is better), 0.5, 0 or null"
    )
    prompt: str
    answer_a: str
    answer_b: str
    outcome: Annotated[Annotated[float, Field(ge=0, le=1, multiple_of=0.5)] | None, BeforeValidator(_number)]
    """1 where the person prefers A, 0 where the person prefers B, ½ for a tie, None for a skipped pair."""


def read(file: Path) -> list[Label]:
    """The labels of a file without the skipped pairs.

    Raises:
        UserError: if the file cannot be read, or naming the rows that are not labels.
    """
    return [label for label in rows.read_rows(file, Label).values() if label.outcome is not None]


def agreement(labels: Sequence[Label], outcomes: statistics.Floats) -> HumanAgreement | None:
    """How far a judge agrees with the labels; None where the judge failed on all of them.

    `outcomes` (N,) are the judge's on the pairs of the N labels, NaN for a failure. The agreement leaves out
    labels that are ties; a tie of the judge counts half.
    """
    people = np.array([label.outcome for label in labels], dtype=np.float64)
    both = ~np.isnan(outcomes)
    if not both.any():
        return None
    has_decision = bool((people[both] != 0.5).any())
    share = statistics.agreement(outcomes, people) if has_decision else None
    return HumanAgreement(kappa=statistics.kappa(people, outcomes), agreement=share)

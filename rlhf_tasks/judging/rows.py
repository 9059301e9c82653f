"""Files of rows that judging reads: responses made elsewhere, and labels that people gave to pairs. No torch.

A label holds the texts themselves, so that it stays true when the models change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlhf_tasks.data.readers.files import read_file
from rlhf_tasks.data.rows import Problems
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import HumanAgreement

MAX_SHOWN = 10  # problems of a file


class Row(BaseModel):
    """A form of rows. Other keys of a row are not read."""

    model_config = ConfigDict(frozen=True, strict=True)
    FORM: ClassVar[str]
    """What a row needs, for messages."""


R = TypeVar("R", bound=Row)


def read_rows(file: Path, form: type[R]) -> dict[str, R]:
    """The rows of a file of any format that `data.path` may have, by their place `FILE:LINE`.

    Raises:
        UserError: if the file cannot be read or has no row, or naming the rows that have another form.
    """
    if not file.is_file():
        raise UserError(f"{file} cannot be read: there is no such file; {form.FORM}")
    problems = Problems()
    lines = read_file(file, str(file), problems).lines
    if problems:
        raise UserError(f"{problems.report()}\n{form.FORM}")
    rows, wrong = dict[str, R](), list[str]()
    for line in lines:
        try:
            rows[line.where] = form.model_validate(line.values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            wrong.append(f"{line.where}: {f'{key}: ' if key else ''}{first['msg']}")
    if wrong:
        more = [f"… and {len(wrong) - MAX_SHOWN} more"] if len(wrong) > MAX_SHOWN else []
        raise UserError("\n".join([*wrong[:MAX_SHOWN], *more, form.FORM]))
    if not rows:
        raise UserError(f"{file} has no row; {form.FORM}")
    return rows


def _number(value: Any) -> Any:
    """A CSV has texts, and empty cells."""
    return (float(value) if value.strip() else None) if isinstance(value, str) else value


class Label(Row):
    """Two responses to a prompt, and which one a person prefers."""

    FORM: ClassVar[str] = (
        "a label has the texts prompt, answer_a and answer_b, and an outcome: 1 (A is better), 0.5, 0 or null"
    )
    prompt: str
    answer_a: str
    answer_b: str
    outcome: Annotated[Annotated[float, Field(ge=0, le=1, multiple_of=0.5)] | None, BeforeValidator(_number)]
    """1 where the person prefers A, 0 where the person prefers B, ½ for a tie, None for a skipped pair."""


def read_labels(file: Path) -> list[Label]:
    """The labels of a file without the skipped pairs.

    Raises:
        UserError: if the file cannot be read, or naming the rows that are not labels.
    """
    return [label for label in read_rows(file, Label).values() if label.outcome is not None]


def measure_agreement(labels: Sequence[Label], outcomes: statistics.Floats) -> HumanAgreement | None:
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

"""The checks of a verifier, which scores answers that are right or wrong."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhf_tasks.config.types import FiniteFloat, NonNegativeFloat, Section


class Check(Section):
    """One check of an answer against a column of the prompt's row."""

    kind: Literal["exact", "number", "regex", "json_schema"]
    """`exact`: the answer is the column's text; `number`: it is the column's number, within `tolerance`;
    `regex`: the column's regular expression matches all of it; `json_schema`: it is JSON that the column's
    schema allows."""
    column: Annotated[str, Field(min_length=1)]
    """Column of `data.columns.keep` with the right answer, the expression or the schema."""
    tolerance: NonNegativeFloat
    """Largest absolute difference from the right number; 0 for any other kind."""
    weight: FiniteFloat
    """Score of an answer that passes; one that does not gets 0."""


def _has_one_group(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"{pattern!r} has {groups} groups; give one group, the answer, and write the others as (?:…)"
        )
    return pattern


class Format(Section):
    """What must stand around the answer."""

    pattern: Annotated[str, AfterValidator(_has_one_group)]
    """Regular expression that matches the whole response; its one group is the answer. `.` matches line
    breaks too, and white space at both ends of the response does not count."""
    weight: FiniteFloat
    """Score of a response that the pattern matches, whether the answer is right or not."""

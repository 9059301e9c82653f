"""Files of rows that judging is given: labels, responses made elsewhere, rows of known right responses."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_tasks.data.files import read_file
from rlhf_tasks.data.rows import Problems
from rlhf_tasks.errors import UserError

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

"""`data.source: module:function`: a function that returns rows by role.

    def squares(seed: int, num_rows: int = 1000) -> dict[str, list[dict]]:
        return {"sft": [{"prompt": f"{n}*{n}=", "completion": f" {n * n}"} for n in range(num_rows)]}

A row has the columns of its role, as texts or messages; `source`, the place that it comes from, or else its
number; and `split`, or else stage prepare splits the rows. Its further columns may be kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_tasks.config import Data, Split
from rlhf_tasks.data.readers.readings import Line, Reading, Table
from rlhf_tasks.data.rows import ROLES, SPLITS, TEXTS
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call

KEYS_OF_DATA = "num_validation", "num_test", "max_prompt_tokens", "max_completion_tokens"
"""The keys of `data` that a function gets by its parameters' names, beside `seed` and `data.options`."""


def rows_of(function: Callable[..., Any], data: Data, seed: int) -> Any:
    """What the function of `data.source` returns.

    Raises:
        UserError: if its parameters do not fit `data.options`, or it raises an exception.
    """
    values = {"seed": seed, **{key: getattr(data, key) for key in KEYS_OF_DATA}}
    named = {key: value for key, value in values.items() if key in inspect.signature(function).parameters}
    return call(f"data.source: {data.source}", function, **{**named, **data.options})


def readings(data: Data, returned: Any) -> list[tuple[Split, Reading]]:
    """The rows that a function returned, each role and split by itself.

    Raises:
        UserError: for anything but rows by role.
    """
    name, key = data.source, f"data.source: {data.source}"
    if not isinstance(returned, Mapping) or not returned or not {*returned} <= {*ROLES}:
        raise UserError(
            f"{key} must return rows by role ({', '.join(ROLES)}), such as {{'sft': [{{'prompt': …, "
            f"'completion': …}}, …]}}, but returned {returned!r:.80}"
        )
    result = []
    for role, rows in returned.items():
        lines: dict[Split, list[Line]] = {}
        for number, row in enumerate(call(key, list, rows), start=1):
            if not isinstance(row, Mapping) or (split := row.get("split", "train")) not in SPLITS:
                raise UserError(
                    f"{key}: row {number} of {role} must be a mapping, whose split, if it has one, is one of "
                    f"{', '.join(SPLITS)}, but is {row!r:.200}"
                )
            where = row.get("source", f"{name} {role}:{number}")
            values = {column: value for column, value in row.items() if column not in ("split", "source")}
            lines.setdefault(split, []).append(Line(str(where), values))
        used = (*TEXTS[role], "completion", "messages", "tools", *data.columns.keep)
        for split, some in lines.items():
            table = Table(name, tuple(dict.fromkeys(column for line in some for column in line.values)), some)
            rows_made = [(line, line.values) for line in some]
            result.append((split, Reading(role, f"rows of {role}", table, used, rows_made.copy)))
    if not result:
        raise UserError(f"{key} returned no rows")
    return result

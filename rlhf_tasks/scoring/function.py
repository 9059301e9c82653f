"""Functions of the user, named by `module:function`: imported, inspected once, and called."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call, load_function
from rlhf_tasks.scoring.protocol import Responses, read_scores


class ColumnsFunction:
    """`module:function`, called with `num_lists` lists of texts and the columns that it takes by keyword.

    A function without further arguments gets no columns, one with `**columns` gets all of them. `key` is the
    parameter that names it, and `columns` are the names of the kept columns.

    Raises:
        UserError: as `load_function`, and if it cannot be called with the kept columns, such as for want of
            one; when it is called, if it raises an exception.
    """

    def __init__(
        self, function: str, key: str, root: Path, columns: Collection[str] = (), num_lists: int = 2
    ) -> None:
        self.name, self._function = f"{key}: function {function}", load_function(function, key, root)
        self._columns: list[str] = []
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # some built-in functions have no signature
            return
        takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        named = list(signature.parameters)[num_lists:]
        self._columns = [name for name in columns if takes_all or name in named]
        try:
            signature.bind(*[()] * num_lists, **dict.fromkeys(self._columns))
        except TypeError as error:
            raise UserError(
                f"{self.name} cannot be called with {num_lists} lists and the columns that data.columns.keep "
                f"has ({', '.join(columns) or 'none'}): {error}; keep the column, or change the argument"
            ) from None

    def __call__(self, *lists: Sequence[str], columns: Columns = NONE) -> Any:
        """What the function returns."""
        given = {name: list(columns[name]) for name in self._columns if name in columns}
        return call(self.name, self._function, *map(list, lists), **given)


class FunctionScorer:
    """`function(prompts, responses, **columns)`, called once with all rows; it returns a float for each.

    Raises:
        UserError: as `ColumnsFunction`, and if it does not return one number per response.
    """

    def __init__(self, function: str, key: str, root: Path, columns: Collection[str] = ()) -> None:
        self._function = ColumnsFunction(function, key, root, columns)

    def __call__(self, rows: Responses) -> Tensor:
        if not len(rows):
            return torch.zeros(0)
        returned = self._function(rows.prompts, rows.texts, columns=rows.columns)
        return read_scores(self._function.name, returned, len(rows))

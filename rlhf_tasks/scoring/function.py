"""Functions of the user, named by `module:function`: imported, inspected once, and called."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
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
        try:
            return self._function(*map(list, lists), **given)
        except Exception as error:  # the user's function can raise anything: one message names it
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{self.name} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            ) from error


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


def load_function(function: str, key: str, root: Path) -> Callable[..., Any]:
    """`module:function` from a file below `root`, or else from an installed module; `key` names it.

    Raises:
        UserError: if it cannot be imported or called.
    """
    module_name, _, name = function.partition(":")
    try:
        module = _import(module_name, root.resolve())
    except Exception as error:  # the user's module can raise anything: one message names the function
        raise UserError(
            f"{key}: {function} cannot be imported: {type(error).__name__}: {error} "
            f"(tried files below {root.resolve()} and installed packages)"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "has no such function" if found is None else f"holds a {type(found).__name__} of that name"
        raise UserError(f"{key}: {function}: {getattr(module, '__file__', module_name)} {what}")
    return found  # type: ignore[no-any-return]


def _import(name: str, root: Path) -> ModuleType:
    path = root.joinpath(*name.split("."))
    file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    if file is None:
        return importlib.import_module(name)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if str(root) not in sys.path:
        sys.path.append(str(root))  # the module may import its neighbors, also while it runs
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and relative imports look the module up while it runs; an installed one keeps its name.
    is_first = sys.modules.setdefault(name, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_first:
            del sys.modules[name]
        raise
    return module

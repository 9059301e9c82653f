"""Functions of the user that score responses: `module:function`, imported, inspected once, and called."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError

SLOW_SECONDS = 30.0


class TextFunction:
    """`module:function`, called with all prompts, all responses, and the columns that it names by keyword.

    A function of two arguments gets no columns. One with `**columns` gets all of them. The module is a file
    below `root`, or an installed one; `key` is the parameter that names it, and `columns` are the names of
    the kept columns.

    Raises:
        UserError: if it cannot be imported or called, or needs a column that is not kept; and later if it
            raises an exception.
    """

    def __init__(self, function: str, key: str, root: Path, columns: Collection[str] = ()) -> None:
        self.name, self._function = f"function {function}", load_function(function, key, root)
        self._columns = _wanted(self._function, f"{key}: {self.name}", columns)
        self._is_slow = False

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE) -> Any:
        """What the function returns: one number per response, if it is right."""
        given = {name: list(columns[name]) for name in self._columns if name in columns}
        start = time.monotonic()
        try:
            returned = self._function(list(prompts), list(responses), **given)
        except Exception as error:  # the user's function can raise anything: one message names it
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{self.name} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            ) from error
        self._say_if_slow(time.monotonic() - start, len(responses))
        return returned

    def _say_if_slow(self, seconds: float, count: int) -> None:
        if seconds > SLOW_SECONDS and not self._is_slow:
            self._is_slow = True
            console.say(
                f"{self.name} took {seconds:.0f} s for {count} responses, and it is called for every rollout"
            )


def _wanted(function: Callable[..., Any], title: str, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that a function takes by keyword, by its signature.

    Raises:
        UserError: if it needs a column that is not kept, or a column has the name of another argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return ()
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in own]
    lost = [p.name for p in named if p.default is p.empty and p.name not in columns]
    if lost:
        raise UserError(
            f"{title} needs the column {', '.join(lost)}, and data.columns.keep has "
            f"{', '.join(columns) or 'none'}; add it there, or give the argument a default"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_all and (clash := [p.name for p in own if p.name in columns and p.kind != p.POSITIONAL_ONLY]):
        raise UserError(
            f"{title} has an argument {', '.join(clash)}, which is also the name of a column; rename the "
            "argument"
        )
    return tuple(name for name in columns if takes_all or name in {p.name for p in named})


def load_function(function: str, key: str, root: Path) -> Callable[..., Any]:
    """`module:function` from a file below `root`, or else from an installed module; `key` names it.

    Raises:
        UserError: if it cannot be imported or called.
    """
    module_name, _, name = function.partition(":")
    try:
        module = _module(module_name, root.resolve())
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


def _module(name: str, root: Path) -> ModuleType:
    path = root.joinpath(*name.split("."))
    file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    if file is None:
        return importlib.import_module(name)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if str(root) not in sys.path:
        sys.path.append(str(root))  # the module may import its neighbours, also while it runs
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # while it runs, because dataclasses and relative imports look there; an installed module keeps its name
    is_first = sys.modules.setdefault(name, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_first:
            del sys.modules[name]
        raise
    return module

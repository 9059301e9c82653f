"""Functions of the user, named by `module:function`: imported, inspected once, and called with texts.

A function gets lists of texts by the names of its parameters:

    prompts                     the prompts
    responses or completions    the responses to them; for a pairwise judge `a` and `b`
    a column that is kept       its values
    **anything                  the kept columns that no parameter names, and `prompts` if none takes them

The singular names mean the same. Where no parameter has the name of a text that must be given, the parameters
without default that are left take it, in the order prompts, responses (or a, b); the prompts may be missing.
Parameters that have no names for a caller (`*args`, `x, /`, functions of C) get the texts by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call, load_function
from rlhf_tasks.scoring.protocol import Responses, read_scores

PROMPTS = "prompts"
RESPONSES = "responses", "completions", "response", "completion"
ONE = {PROMPTS: PROMPTS, "prompt": PROMPTS, **dict.fromkeys(RESPONSES, "responses")}
TWO = {PROMPTS: PROMPTS, "prompt": PROMPTS, "a": "a", "b": "b"}
"""The text that a parameter of this name takes."""


class ColumnsFunction:
    """`module:function`, called with prompts, responses and the kept columns as the module says.

    `key` is the parameter of params.yaml that names it, `columns` are the names of the kept columns, and
    `texts` is `ONE` or `TWO`.

    Raises:
        UserError: as `load_function`, and if its parameters cannot take the texts and columns; when it is
            called, if it raises an exception.
    """

    def __init__(
        self,
        function: str,
        key: str,
        root: Path,
        columns: Collection[str] = (),
        texts: Mapping[str, str] = ONE,
    ) -> None:
        self.name, self._function = f"{key}: function {function}", load_function(function, key, root)
        self._texts = list(dict.fromkeys(texts.values()))
        self._signature = signature = _signature(self._function)
        meanings = {**texts, **{name: name for name in columns}}
        try:
            self._by_position, self._by_name = _arguments(signature, self._texts, columns, meanings)
        except TypeError as error:
            raise UserError(
                f"{self.name}({', '.join(signature.parameters)}): {error}; a parameter gets what its name "
                f"says, of {', '.join(meanings)}. Rename it, give it a default, or keep the column "
                "(data.columns.keep)"
            ) from None

    def __call__(self, *lists: Sequence[str], columns: Columns = NONE) -> Any:
        """What the function returns for the prompts and one list of responses, or two."""
        values = {**columns, **dict(zip(self._texts, lists, strict=True))}
        by_position = [list(values[what]) for what in self._by_position]
        named = {name: list(values[what]) for name, what in self._by_name.items() if what in values}
        given = self._signature.bind_partial(*by_position, **named)  # by position where both are possible
        returned = call(self.name, self._function, *given.args, **given.kwargs)
        return call(self.name, list, returned) if isinstance(returned, Iterator) else returned


def _signature(function: Callable[..., Any]) -> Signature:
    """The parameters of a function; of a decorated one, those of the decorator's own where it has names."""
    try:
        own = inspect.signature(function, follow_wrapped=False)
        kinds = {one.kind for one in own.parameters.values()}
        if {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds:
            return inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return inspect.signature(lambda *texts: None)
    return own


def _arguments(
    signature: Signature, texts: list[str], columns: Collection[str], meanings: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """What a function gets by position, and what by name; `meanings` are the names that it may use.

    Raises:
        TypeError: if it cannot be called so.
    """
    parameters = signature.parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if any(one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL) for one in parameters):
        for what, one in zip(texts, parameters, strict=False):
            if one.kind is one.POSITIONAL_OR_KEYWORD and meanings.get(one.name, what) != what:
                raise TypeError(f"it takes texts by position, where {one.name} would get the {what}")
        free = [
            one.name for i, one in enumerate(parameters) if i >= len(texts) or one.kind is one.KEYWORD_ONLY
        ]
        takes = {name: name for name in columns if takes_all or name in free}
        signature.bind(*texts, **takes)
        return texts, takes
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    takes = {one.name: meanings[one.name] for one in named if one.name in meanings}
    left = [one.name for one in named if one.name not in meanings and one.default is one.empty]
    missing = [what for what in texts[1:] if what not in takes.values()]
    if missing and len(left) == len(missing) + 1 and PROMPTS not in takes:
        missing.insert(0, PROMPTS)
    if len(left) > len(missing):
        raise TypeError(f"nothing is left for {', '.join(left)}")
    if len(left) < len(missing):
        raise TypeError(f"it takes no {' and '.join(missing)}")
    takes |= dict(zip(left, missing, strict=True))
    if takes_all:
        takes |= {name: name for name in (PROMPTS, *columns) if name not in takes.values()}
    return [], takes


class ImportedScorer:
    """A scorer that calls a function once with all rows; it returns a float for each.

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

"""Functions of the user, named by `module:function`: imported, inspected once, and called with texts.

A function gets lists of texts by the names of its parameters:

    prompts                     the prompts
    responses or completions    the responses to them; for a pairwise judge `a` and `b`
    a column that is kept       its values
    **anything                  the kept columns that no parameter names, and `prompts` if none takes them

The singular names mean the same. Where no parameter has the name of a text that must be given, the parameters
without default that are left take it, in the order prompts, responses (or a, b); the prompts may be missing.
`*args` take all texts that are left then, and so do functions of C, whose parameters are not known.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter
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
        try:
            self._signature = inspect.signature(self._function)
        except ValueError:  # a function of C
            self._signature = inspect.signature(lambda *texts: None)
        parameters = self._signature.parameters
        meanings = {**texts, **{name: name for name in columns}}
        try:
            self._takes = _match([*parameters.values()], self._texts, columns, meanings)
        except TypeError as error:
            raise UserError(
                f"{self.name}({', '.join(parameters)}): {error}; a parameter gets what its name "
                f"says, of {', '.join(meanings)}. Rename it, give it a default, or keep the column "
                "(data.columns.keep)"
            ) from None

    def __call__(self, *lists: Sequence[str], columns: Columns = NONE) -> Any:
        """What the function returns for the prompts and one list of responses, or two."""
        values = {**columns, **dict(zip(self._texts, lists, strict=True))}
        given = self._signature.bind_partial()  # by position where both are possible
        for name, what in self._takes.items():
            lists_of = {one: list(values[one]) for one in what if one in values}
            match self._signature.parameters[name].kind:
                case Parameter.VAR_POSITIONAL:
                    given.arguments[name] = tuple(lists_of.values())
                case Parameter.VAR_KEYWORD:
                    given.arguments[name] = lists_of
                case _ if lists_of:
                    (given.arguments[name],) = lists_of.values()
        returned = call(self.name, self._function, *given.args, **given.kwargs)
        return call(self.name, list, returned) if isinstance(returned, Iterator) else returned


def _match(
    parameters: Sequence[Parameter], texts: list[str], columns: Collection[str], meanings: Mapping[str, str]
) -> dict[str, list[str]]:
    """The text or column that each parameter takes, several for `*args` and `**rest`.

    `meanings` are the names that they may have.

    Raises:
        TypeError: if something is left on either side.
    """
    star = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    rest = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
    named = [one for one in parameters if one.name not in (star, rest)]
    takes = {one.name: [meanings[one.name]] for one in named if one.name in meanings}
    left = [one for one in named if one.name not in meanings and one.default is one.empty]
    missing = [what for what in texts[1:] if [what] not in takes.values()]
    has_room = star is not None or (missing and len(left) == len(missing) + 1)
    if has_room and [PROMPTS] not in takes.values():
        missing.insert(0, PROMPTS)
    is_behind_star = star is not None and any(one.kind is one.KEYWORD_ONLY for one in left)
    if is_behind_star or len(left) > len(missing):
        raise TypeError(f"nothing is left for {', '.join(one.name for one in left)}")
    if len(left) < len(missing) and star is None:
        raise TypeError(f"it takes no {' and '.join(missing)}")
    takes |= {one.name: [what] for one, what in zip(left, missing, strict=False)}
    if star is not None:
        takes[star] = missing[len(left) :]
    if rest is not None:
        taken = {what for whats in takes.values() for what in whats}
        takes[rest] = [name for name in (PROMPTS, *columns) if name not in taken]
    return takes


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

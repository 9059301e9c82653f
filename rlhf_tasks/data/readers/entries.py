"""An entry of shapes.yaml, or of a file of the user's in that form (`data.shapes`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_tasks.config.types import Section
from rlhf_tasks.errors import UserError

NEEDS: Mapping[str, Sequence[set[str]]] = {
    "row": [{"prompt"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"}, {"messages"}],
    "rated": [{"prompt", "response", "score"}, {"prompt", "answers", "scores"}, {"prompt", "answers"}],
    "voted": [{"prompt", "first", "second", "vote"}, {"prompt", "first", "second", "strength"}],
}
"""The columns of a shape of the user's, by what it makes."""


class Known(Section):
    """The names and types of a column, or of two that belong together."""

    types: str
    names: re.Pattern[str] | list[str | list[str]] | None = None
    """A pattern of all names, a list; None: those that the table of names has."""

    def listed(self) -> Iterator[str]:
        """The names of a list."""
        for name in self.names if isinstance(self.names, list) else []:
            yield from [name] if isinstance(name, str) else name


def _as_list(spec: Any) -> list[Any]:
    alternatives = spec if isinstance(spec, list) else [spec]
    return [{"types": one} if isinstance(one, str) else one for one in alternatives]


Spec = Annotated[list[Known], BeforeValidator(_as_list)]
"""A text stands for the types of a column, and one alternative for a list of it."""


class Entry(Section):
    """A shape of the table; the comment of shapes.yaml explains its keys."""

    name: str
    columns: dict[str, Spec]
    like: str = ""
    where: Mapping[str, str] = {}
    unless: Mapping[str, Spec] = {}
    makes: str = "row"
    votes: Sequence[Sequence[str]] = ()
    also: str = ""

    def slots(self) -> set[str]:
        """Our names of its columns, `NAME?` for one that may be absent."""
        ends = ((slots.partition("?")[1], slots.rstrip("?").split(", ")) for slots in self.columns)
        return {f"{slot}{end}" for end, several in ends for slot in several}

    def problems(self) -> Iterator[str]:
        if not self.where.keys() <= self.slots():
            yield "where names no column that each table of the shape has"


def users_entries(path: str) -> list[Entry]:
    """The shapes of the user's file.

    Raises:
        UserError: naming the first that is none.
    """
    try:
        tree = YAML(typ="safe").load(Path(path))
    except (OSError, YAMLError) as error:
        raise UserError(f"data.shapes={path} cannot be read: {error}") from None
    entries = list[Entry]()
    for one in tree if isinstance(tree, list) else [tree]:
        with suppress(ValidationError):
            entry = Entry.model_validate(one)
            if entry.slots() in NEEDS.get(entry.makes, ()):
                entries.append(entry)
                continue
        ways = (f"{m}: {' or '.join(', '.join(sorted(s)) for s in sets)}" for m, sets in NEEDS.items())
        raise UserError(
            f"data.shapes={path}: {one!s:.200} is no shape; give a list of shapes with name, columns and "
            f"perhaps {', '.join([*Entry.model_fields][2:])}. By `makes`, its columns are {'; '.join(ways)}"
        )
    return entries

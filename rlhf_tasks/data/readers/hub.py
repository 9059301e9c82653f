"""`data.source: hub`: sets of the Hugging Face hub at pinned revisions, checked in the same way as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks import console
from rlhf_tasks.config import HubSet, Split
from rlhf_tasks.data.readers.files import plain_value
from rlhf_tasks.data.readers.readings import Line, Lines, RoleTable, Table
from rlhf_tasks.data.rows import Role
from rlhf_tasks.data.splits import SPLIT_NAMES
from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    import datasets


def sample(name: str, most: int) -> list[RoleTable]:
    """The first rows of each split of a set of the hub, at its newest commit; nothing else is fetched.

    Raises:
        UserError: if the set cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    tables: list[RoleTable] = []
    try:
        for part, rows in datasets.load_dataset(name, streaming=True).items():
            some = [plain_value(values) for values in rows.take(most)]
            title = f"{name}/{part}"
            lines = [Line(f"{title}:{number}", values) for number, values in enumerate(some, start=1)]
            split = SPLIT_NAMES.get(str(part).split("_")[0], "train")
            tables.append((None, split, Table(title, tuple(some[0] if some else ()), lines)))
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name} is no file or folder here, and could not be read from the hub: {type(error).__name__}: "
            f"{error}; give a path, or check that this machine reaches the hub"
        ) from error
    return tables


WORDS: Mapping[Role, set[str]] = {"sft": {"sft"}, "preferences": {"prefs", "pref", "preferences"}}
"""Words in the names of splits that say for what they are, as in `train_prefs` beside `train_sft`."""


def tables_of_set(source: HubSet, role: Role | None) -> list[tuple[Split, Table]]:
    """The tables of one set in its own splits; for a role, those of the splits that are named for it.

    Raises:
        UserError: if the set cannot be loaded, or has no known split.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded = datasets.load_dataset(source.id, name=source.name, revision=source.revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:  # the last: it is a program
        raise UserError(
            f"the set {source.id!r} (name {source.name!r}, revision {source.revision}) could not be "
            f"loaded: {type(error).__name__}: {error}\nCheck data.hub, and that this machine reaches "
            "the hub. Without the hub, fetch the set elsewhere and give its folder as `id`, or its files "
            "with `data.source: files`."
        ) from error
    words = {name: str(name).split("_") for name in loaded}
    known = {name: SPLIT_NAMES[first] for name, (first, *_) in words.items() if first in SPLIT_NAMES}
    named = {name: split for name, split in known.items() if role and {*words[name]} & WORDS.get(role, set())}
    plain = {name: split for name, split in known.items() if len(words[name]) == 1}
    known = named or plain or known
    if left := [str(name) for name in loaded if name not in known]:
        console.say(f"{source.id}: the splits {', '.join(left)} are not used{f' for {role}' if role else ''}")
    if "train" not in known.values():
        splits = ", ".join(map(repr, loaded)) or "none"
        raise UserError(f"the set {source.id!r} has no train split, only {splits}")
    if len(set(known.values())) < len(known):
        raise UserError(f"the set {source.id!r} has two names for one split: {', '.join(map(repr, known))}")
    local = Path(source.id)
    title = local.name if local.exists() else f"{source.id}@{source.revision[:8]}"
    return [(split, _table(f"{title}/{name}", loaded[name])) for name, split in known.items()]


def _table(title: str, rows: datasets.Dataset) -> Table:
    """Rows are named `TITLE:ROW`, from 1."""

    def lines() -> Iterator[Line]:
        for number, values in enumerate(rows, start=1):
            yield Line(f"{title}:{number}", plain_value(values))

    return Table(title, tuple(rows.column_names), Lines(lines, len(rows)))

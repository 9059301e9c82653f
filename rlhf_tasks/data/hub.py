"""`data.source: hub`: sets of the Hugging Face hub at pinned revisions, checked in the same way as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import Data, HubSet, HubSources, Split
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import ROLES, Corpus, Problems, Role
from rlhf_tasks.data.shapes import Line, Table
from rlhf_tasks.data.splits import SPLIT_NAMES, fill_splits
from rlhf_tasks.data.tables import assemble
from rlhf_tasks.errors import UserError


def load(
    sources: HubSources,
    data: Data,
    rendering: Rendering,
    problems: Problems,
    own: Callable[[dict[str, Any]], Any] | None = None,
    *,
    seed: int,
    sizes: Mapping[Split, int],
) -> Corpus:
    """The rows of the sets, in their own splits; a missing split is made by prompt.

    Raises:
        UserError: if a set cannot be loaded, has no known split, or lacks a column.
    """
    tables: list[tuple[Role | None, Split, Table]] = []
    for role in ROLES:
        if (source := sources.by_role.get(role)) is not None:
            tables += [(role, split, table) for split, table in _tables(source, role)]
    return fill_splits(assemble(tables, data, rendering, problems, own), seed=seed, sizes=sizes)


def sample(name: str, most: int) -> Sequence[tuple[Role | None, Split, Table]]:
    """The first rows of each split of a set of the hub, at its newest commit; nothing else is fetched.

    Raises:
        UserError: if the set cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    tables: list[tuple[Role | None, Split, Table]] = []
    try:
        for part, rows in datasets.load_dataset(name, streaming=True).items():
            some = list(rows.take(most))
            title = f"{name}/{part}"
            lines = [Line(f"{title}:{number}", values) for number, values in enumerate(some, start=1)]
            split = SPLIT_NAMES.get(str(part).split("_")[0], "train")
            tables.append((None, split, Table(title, tuple(some[0] if some else ()), lines)))
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"{name} is no file or folder here, and could not be read from the hub: {type(error).__name__}: "
            f"{error}; give a path, or check that this machine reaches the hub"
        ) from error
    return tables


WORDS: Mapping[Role, tuple[str, ...]] = {"sft": ("sft",), "preferences": ("prefs", "pref", "preferences")}
"""Words in the names of splits that say for what they are, as in `train_prefs` beside `train_sft`."""


def _tables(source: HubSet, role: Role) -> list[tuple[Split, Table]]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded = datasets.load_dataset(source.id, name=source.name, revision=source.revision)
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"the set {source.id!r} (name {source.name!r}, revision {source.revision}) could not be "
            f"loaded: {type(error).__name__}: {error}\nCheck data.hub, and that this machine reaches "
            "the hub. Without the hub, fetch the set elsewhere and give its folder as `id`, or its files "
            "with `data.source: files`."
        ) from error
    words = {name: str(name).split("_") for name in loaded}
    known = {name: SPLIT_NAMES[first] for name, (first, *_) in words.items() if first in SPLIT_NAMES}
    named = {name: split for name, split in known.items() if {*words[name]} & {*WORDS.get(role, ())}}
    plain = {name: split for name, split in known.items() if len(words[name]) == 1}
    known = named or plain or known
    if left := [str(name) for name in loaded if name not in known]:
        console.say(f"{source.id}: the splits {', '.join(left)} are not used for {role}")
    if "train" not in known.values():
        raise UserError(
            f"the set {source.id!r} has no train split, only {', '.join(map(repr, loaded)) or 'none'}"
        )
    if len(set(known.values())) < len(known):
        raise UserError(f"the set {source.id!r} has two names for one split: {', '.join(map(repr, known))}")
    return [(split, _table(source, name, loaded[name])) for name, split in known.items()]


def _table(source: HubSet, split: str, rows: object) -> Table:
    """Rows are named `SET@REVISION/SPLIT:ROW`, from 1; those of a local folder `FOLDER/SPLIT:ROW`."""
    import datasets

    assert isinstance(rows, datasets.Dataset)
    local = Path(source.id)
    title = local.name if local.exists() else f"{source.id}@{source.revision[:8]}"
    title = f"{title}/{split}"
    lines = [Line(f"{title}:{number}", values) for number, values in enumerate(rows, start=1)]
    return Table(title, tuple(rows.column_names), lines)

"""`data.source: hub`: sets of the Hugging Face hub at pinned revisions, checked in the same way as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.config import Data, HubSet, HubSources, Split
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import Corpus, Problems, Role
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
    sets: dict[Role, HubSet | None] = {"sft": sources.sft, "preferences": sources.preferences}
    for role, source in sets.items():
        if source is not None:
            tables += [(role, split, table) for split, table in _tables(source)]
    return fill_splits(assemble(tables, data, rendering, problems, own), seed=seed, sizes=sizes)


def _tables(source: HubSet) -> list[tuple[Split, Table]]:
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
    known = {name: SPLIT_NAMES[name] for name in loaded if name in SPLIT_NAMES}
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

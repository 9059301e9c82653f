"""Splits by prompt: makes the validation and test splits that a source lacks, always in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from rlhf_tasks.config import Split
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.rows import (
    CONVERSATION,
    HELD_OUT,
    ROLES,
    SPLITS,
    Corpus,
    Role,
    Row,
    evaluated_role,
    prompt_key,
)
from rlhf_tasks.errors import UserError

SPLIT_NAMES: Mapping[str, Split] = {
    "train": "train", "training": "train",
    **dict.fromkeys(("validation", "valid", "val", "eval", "dev"), "validation"),
    "test": "test",
}  # fmt: skip
"""The names of splits in files and hub sets."""


def hash_rank(seed: int, key: str) -> str:
    """A pseudo-random rank of a key, equal on every machine: sorting by it shuffles."""
    return hashlib.sha256(f"{seed}\0{key}".encode()).hexdigest()


def fill_splits(given: Corpus, *, seed: int, sizes: Mapping[Split, int]) -> Corpus:
    """Move train rows to the held-out splits that a role lacks; all rows of a prompt move together.

    `sizes` are prompts per split, at most a quarter of the role's prompts. The evaluated role is split
    first. It holds out no prompt that another role trains on and cannot move. The other roles then hold
    out the same prompts, and where possible add prompts that the evaluated role does not train on.
    """
    judged = evaluated_role(given)
    fixed: dict[Split, set[str]] = {
        split: {
            k for role, t in given.items() if role != judged and split in t for k in _keys(t.get("train", []))
        }
        for split in HELD_OUT
    }
    corpus = {judged: _fill(given[judged], seed, sizes, blocked=fixed, pinned={}, last=set())}
    pinned = {key: split for split in HELD_OUT for key in _keys(corpus[judged][split])}
    trained = _keys(corpus[judged]["train"])
    for role in given:
        if role != judged:
            none: dict[Split, set[str]] = {split: set() for split in HELD_OUT}
            corpus[role] = _fill(given[role], seed, sizes, blocked=none, pinned=pinned, last=trained)
    return {role: corpus[role] for role in ROLES if role in corpus}


def _fill(
    tables: Mapping[Split, list[Row]],
    seed: int,
    sizes: Mapping[Split, int],
    *,
    blocked: Mapping[Split, set[str]],
    pinned: Mapping[str, Split],
    last: set[str],
) -> dict[Split, list[Row]]:
    """Fill the missing splits of one role.

    Keys in `blocked` may not go to that split; keys in `pinned` must, if it is missing; keys in `last` are
    taken last.
    """
    missing = [split for split in HELD_OUT if split not in tables]
    keys = sorted(_keys(tables.get("train", [])), key=lambda key: (key in last, hash_rank(seed, key)))
    target = {key: pinned[key] for key in keys if pinned.get(key) in missing}
    quarter = len(_keys(row for rows in tables.values() for row in rows)) // 4
    for split in missing:
        free = [key for key in keys if key not in target and key not in pinned and key not in blocked[split]]
        missing_prompts = min(sizes[split], quarter) - sum(1 for held in target.values() if held == split)
        target |= dict.fromkeys(free[: max(missing_prompts, 0)], split)
    filled = {split: list(tables.get(split, [])) for split in SPLITS}
    filled["train"] = []
    for row in tables.get("train", []):
        filled[target.get(_key(row), "train")].append(row)
    return filled


def _keys(rows: Iterable[Row]) -> set[str]:
    return {_key(row) for row in rows}


def _key(row: Row) -> str:
    """The key by which rows stay together: their prompt, or that of their conversation."""
    return prompt_key(row[CONVERSATION] if CONVERSATION in row else row["prompt"])


# --------------------------------------------------------------------------------- derived roles


def complete(corpus: Corpus) -> Corpus:
    """All three roles: demonstrations from chosen answers, and prompts from demonstrations, where not given.

    Raises:
        UserError: if a split that training or judging needs has no row.
    """
    full = dict(corpus)
    if "sft" not in full:
        if "preferences" not in full:
            raise UserError(
                "the data has only prompts; add demonstrations (sft) or comparisons (preferences)"
            )
        full["sft"] = _derived(
            full["preferences"], {"prompt": "prompt", "chosen": "completion"}, per_prompt=False
        )
    if "prompts" not in full:
        full["prompts"] = _derived(
            {split: [row for row in rows if CONVERSATION not in row] for split, rows in full["sft"].items()},
            {"prompt": "prompt", "completion": "reference"},
            per_prompt=True,
        )
    full.setdefault("preferences", {split: [] for split in SPLITS})
    _refuse_empty(full)
    return {role: full[role] for role in ROLES}


def _derived(
    tables: Mapping[Split, list[Row]], names: Mapping[str, str], *, per_prompt: bool
) -> dict[Split, list[Row]]:
    """Rows with renamed columns. Of equal rows, or of equal prompts with `per_prompt`, the first is kept."""
    derived: dict[Split, list[Row]] = {}
    for split, rows in tables.items():
        kept: dict[tuple[str, ...], Row] = {}
        for row in rows:
            key = (row["prompt"],) if per_prompt else tuple(row[name] for name in names)
            same = {name: row[name] for name in ("source", KEY) if name in row}
            kept.setdefault(key, {ours: row[theirs] for theirs, ours in names.items()} | same)
        derived[split] = list(kept.values())
    return derived


def _refuse_empty(corpus: Corpus) -> None:
    needed: tuple[Role, ...] = ("sft", "prompts")
    empty = [f"{role}/{split}" for role in needed for split in SPLITS if not corpus[role][split]]
    if empty:
        raise UserError(
            f"no usable row is left for {', '.join(empty)}: give at least 4 different prompts (a "
            "quarter goes to each held-out split), or a file for each split"
        )


def cap_train(corpus: Corpus, max_rows: int | None, seed: int) -> Corpus:
    """At most `max_rows` train rows per role, drawn by hash of the prompt, in their old order."""
    if max_rows is None:
        return corpus
    capped: Corpus = {}
    for role, tables in corpus.items():
        ranked = sorted(tables["train"], key=lambda row: hash_rank(seed, _key(row)))
        kept = {id(row) for row in ranked[:max_rows]}
        capped[role] = tables | {"train": [row for row in tables["train"] if id(row) in kept]}
    return capped

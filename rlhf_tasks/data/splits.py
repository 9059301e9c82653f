"""Splits by prompt, the roles that are derived from others, and the shares of the sets of a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlhf_tasks import console
from rlhf_tasks.config import Split
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.rows import (
    CONVERSATION,
    HELD_OUT,
    ROLES,
    SET,
    SPLITS,
    Corpus,
    Role,
    Rows,
    Writer,
    digest,
    evaluated_role,
    prompt_key,
)
from rlhf_tasks.errors import UserError

SPLIT_NAMES: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "eval", "dev"), "validation"),
    "test": "test",
}
"""The names of splits in files and hub sets."""

Ranks = npt.NDArray[np.bytes_]
"""(N,): the rank of each row's prompt, or of its conversation's. Rows of one prompt have the same."""


def hash_rank(seed: int, key: str) -> bytes:
    """A pseudo-random rank of a key, equal on every machine: sorting by it shuffles."""
    return hashlib.sha256(f"{seed}\0{key}".encode()).digest()


def ranks_of(rows: Rows, seed: int) -> Ranks:
    """The ranks of rows, by which they stay together."""
    pairs = zip(rows.texts("prompt"), rows.texts(CONVERSATION), strict=True)
    firsts = (prompt if conversation is None else conversation for prompt, conversation in pairs)
    return np.array([hash_rank(seed, prompt_key(text)) for text in firsts], "S32")


def fill_splits(given: Corpus, *, seed: int, sizes: Mapping[Split, int]) -> Corpus:
    """Move train rows to the held-out splits that a role lacks; all rows of a prompt move together.

    `sizes` are prompts per split, at most a quarter of the role's prompts. The evaluated role is split
    first. It holds out no prompt that another role trains on and cannot move. The other roles then hold
    out the same prompts, and where possible add prompts that the evaluated role does not train on.
    """
    judged = evaluated_role(given)
    ranks = {
        role: {split: ranks_of(rows, seed) for split, rows in tables.items()}
        for role, tables in given.items()
    }
    others = [role for role in given if role != judged]
    fixed: dict[Split, set[bytes]] = {
        split: {k for role in others if split in given[role] for k in _distinct(ranks[role], "train")}
        for split in HELD_OUT
    }
    target = _targets(ranks[judged], sizes, blocked=fixed, pinned={}, last=set())
    corpus = {judged: _move(given[judged], ranks[judged], target)}
    pinned = dict(target)
    for split in HELD_OUT:
        pinned |= dict.fromkeys(_distinct(ranks[judged], split), split)
    trained = (_distinct(ranks[judged], "train") if others else set()) - pinned.keys()
    for role in others:
        none: dict[Split, set[bytes]] = {split: set() for split in HELD_OUT}
        target = _targets(ranks[role], sizes, blocked=none, pinned=pinned, last=trained)
        corpus[role] = _move(given[role], ranks[role], target)
    return {role: corpus[role] for role in ROLES if role in corpus}


def _distinct(ranks: Mapping[Split, Ranks], split: Split) -> set[bytes]:
    return set(np.unique(ranks[split]).tolist()) if split in ranks else set()


def _targets(
    ranks: Mapping[Split, Ranks],
    sizes: Mapping[Split, int],
    *,
    blocked: Mapping[Split, set[bytes]],
    pinned: Mapping[bytes, Split],
    last: set[bytes],
) -> dict[bytes, Split]:
    """The prompts of the train rows of one role that go to a split which it lacks.

    Prompts in `blocked` may not go to that split; those in `pinned` must, if it is missing; those in `last`
    are taken last.
    """
    missing = [split for split in HELD_OUT if split not in ranks]
    if not missing:
        return {}
    keys: list[bytes] = np.unique(ranks.get("train", np.empty(0, "S32"))).tolist()
    keys = [key for key in keys if key not in last] + [key for key in keys if key in last]
    target = {key: pinned[key] for key in keys if pinned.get(key) in missing}
    quarter = len(np.unique(np.concatenate(list(ranks.values())))) // 4
    for split in missing:
        left = min(sizes[split], quarter) - sum(held == split for held in target.values())
        for key in keys:
            if left <= 0:
                break
            if key not in target and key not in pinned and key not in blocked[split]:
                target[key] = split
                left -= 1
    return target


def _move(
    tables: Mapping[Split, Rows], ranks: Mapping[Split, Ranks], target: Mapping[bytes, Split]
) -> dict[Split, Rows]:
    """The rows by split; train rows whose prompt has a target are there."""
    none = next(iter(tables.values())).take(np.empty(0, np.int64), "train")
    train, of_train = tables.get("train", none), ranks.get("train", np.empty(0, "S32"))
    held = {split: np.isin(of_train, [k for k, to in target.items() if to == split]) for split in HELD_OUT}
    filled: dict[Split, Rows] = {"train": train.take(~(held["test"] | held["validation"]))}
    filled |= {split: tables.get(split, train.take(mask, split)) for split, mask in held.items()}
    return {split: filled[split] for split in SPLITS}


# --------------------------------------------------------------------------------- derived roles


def complete(corpus: Corpus) -> Corpus:
    """All three roles: demonstrations from chosen answers, and prompts from demonstrations, where not given.

    Of prompts alone, there are no demonstrations, and of bad answers alone neither.

    Raises:
        UserError: if a split that training or judging needs has no row.
    """
    full, lost = dict(corpus), 0
    if "sft" not in full and "preferences" in full:
        chosen = {split: rows.that_have("chosen") for split, rows in full["preferences"].items()}
        full["sft"] = _derive("sft", chosen, {"prompt": "prompt", "completion": "chosen"})
        if lost := sum(map(len, full["preferences"].values())) - sum(map(len, chosen.values())):
            console.say(f"{lost:,} bad response(s) make no demonstration, and no prompt for PPO and judges")
    if "prompts" not in full:
        full["prompts"] = _derive("prompts", full["sft"], {"prompt": "prompt", "reference": "completion"})
    needed = [role for role in ("sft", "prompts") if role in full]
    empty = [f"{role}/{split}" for role in needed for split in SPLITS if not len(full[role][split])]
    if empty:
        advice = (
            "give at least 4 different prompts (each split holds out a quarter), or a file for each split"
        )
        if any(not len(full[role]["train"]) and any(map(len, full[role].values())) for role in needed):
            advice = "all rows are held out by their file's name or their `split`; call some train, or none"
        elif lost:
            advice = f"{lost:,} bad responses make no demonstration; give good ones too, or demonstrations"
        raise UserError(f"no usable row is left for {', '.join(empty)}: {advice}")
    return {role: full[role] if role in full else Writer(role).finish(SPLITS) for role in ROLES}


def _derive(role: Role, tables: Mapping[Split, Rows], names: Mapping[str, str]) -> dict[Split, Rows]:
    """Rows of another role with renamed columns. Of equal rows the first is kept; of equal prompts as well,
    if they become PPO's, and none of an earlier turn."""
    derived: dict[Split, Rows] = {}
    keys, further = ["prompt"] if role == "prompts" else [*names.values()], ["source", SET, KEY, CONVERSATION]
    for split, rows in tables.items():
        is_new, seen = list[bool](), set[bytes]()
        for talk, *texts in zip(*map(rows.texts, [CONVERSATION, *keys]), strict=True):
            key = digest(*texts)
            is_new.append(key not in seen and not (role == "prompts" and talk is not None))
            if is_new[-1]:
                seen.add(key)
        table = rows.table.select([*names.values(), *further]).rename_columns([*names, *further])
        derived[split] = Rows(role, split, table, rows.numbers[np.array(is_new, bool)])
    return derived


def cap_train(corpus: Corpus, max_rows: int | None, seed: int) -> Corpus:
    """At most `max_rows` train rows per role, drawn by hash of the prompt, in their old order."""
    if max_rows is None:
        return corpus
    return {
        role: tables | {"train": tables["train"].take(_lowest(ranks_of(tables["train"], seed), max_rows))}
        for role, tables in corpus.items()
    }


def _lowest(ranks: Ranks, count: int) -> npt.NDArray[np.int64]:
    """The positions of the rows of the lowest ranks, ascending."""
    return np.sort(np.argsort(ranks, kind="stable")[:count])


def shuffle_heldout(corpus: Corpus, seed: int) -> Corpus:
    """The held-out rows by their ranks, so that the first are a sample of all files and sets.

    Those of a prompt or conversation stay together, in their order.
    """
    shuffled = {role: dict(tables) for role, tables in corpus.items()}
    for role, tables in corpus.items():
        for split in HELD_OUT:
            rows = tables[split]
            parts = [batch.table for batch in rows.batches()]  # `take` alone would copy the train rows too
            table = pa.concat_tables(parts or [rows.table.slice(0, 0)])
            table = table.take(np.argsort(ranks_of(rows, seed), kind="stable"))
            shuffled[role][split] = Rows(role, split, table, np.arange(len(rows)))
    return shuffled


# -------------------------------------------------------------------------------------- mixtures


def mix_train(corpus: Corpus, weights: Mapping[str, float], max_rows: int | None, seed: int) -> Corpus:
    """The train rows of each role in the shares of their sets, as many in all as before, or `max_rows`.

    A set that has fewer rows than its share has all of them as often as they fit, and some once more; one
    that has more has some left out. These some are those of the lowest hash of the prompt.
    """
    mixed = dict(corpus)
    for role, tables in corpus.items():
        train = tables["train"]
        names = np.array([*train.texts(SET)])
        present = {name: np.flatnonzero(names == name) for name in weights if np.any(names == name)}
        if len(present) < 2:
            continue
        total = len(train) if max_rows is None else min(len(train), max_rows)
        targets = shares(total, [weights[name] for name in present])
        ranks, taken = ranks_of(train, seed), list[npt.NDArray[np.int64]]()
        for rows, target in zip(present.values(), targets, strict=True):
            times, rest = divmod(target, len(rows))
            taken += [rows] * times + [rows[_lowest(ranks[rows], rest)]]
        mixed[role] = tables | {"train": train.take(np.sort(np.concatenate(taken)))}
    return cap_train(mixed, max_rows, seed)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights, with the sum `total`; largest remainders are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


def pairs_of(rows: Rows, model: str) -> Rows:
    """The pairs that train `reward`, which train the policy of stage dpo too, or `reward_heldout`.

    Each has half of the prompts, by their hashes. Prompts that differ in white space alone stay together.
    """
    first = dict[bytes, str]()  # of several such prompts
    prompts = (first.setdefault(digest(prompt_key(prompt)), prompt) for prompt in rows.texts("prompt"))
    is_optimized = np.array([bool(hashlib.sha256(one.encode()).digest()[0] % 2) for one in prompts], bool)
    return rows.take(is_optimized if model == "reward" else ~is_optimized)

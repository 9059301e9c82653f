"""Rows, which every source produces in one form, and the checks on them.

A row is a dict of its role's text columns and `source`, the place it was read from (`FILE:LINE` for the
user's files). Prompts alone have the reference None, and an unpaired label is a row of preferences in which
`rejected`, or of a bad response `chosen`, is None. Rows that give prompts may have `columns`, the kept
values by name; rows of `data.mix` have `set`, the name of their set.

Rows stand in a file of Arrow that is mapped into memory, one for each role: what splits, checks and filters
hold are row numbers. So a million rows take little memory of their own, in stage prepare and in training.

Problems are collected, so that one report names every bad row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import Split
from rlhf_tasks.data.columns import KEY, decoded, encoded
from rlhf_tasks.project import disk

Role = Literal["sft", "preferences", "prompts"]
Row = dict[str, Any]
Numbers = npt.NDArray[np.int64]

ROLES: tuple[Role, ...] = get_args(Role)
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT: tuple[Split, ...] = ("test", "validation")
TEXTS: Mapping[Role, tuple[str, ...]] = {
    "sft": ("prompt", "completion"),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt", "reference"),
}

Reason = Literal["malformed", "not_utf8", "empty", "too_long", "chosen_is_rejected", "duplicate", "leak"]
REASONS: tuple[Reason, ...] = get_args(Reason)

CONVERSATION = "conversation"
"""The key of a row that is an earlier turn of a conversation; it holds the prompt of its last turn."""
SET = "set"
"""The key of a row of `data.mix`, and the column of a table, that holds the name of its set."""

LONGEST_TOKEN = 256  # characters; the longest tokens of common vocabularies have half as many
BATCH = 8192  # rows that are Python objects at a time
BATCH_CHARACTERS = 2**26  # of texts, in rows that are written at a time
ROW_GROUP = 2**16  # rows of a Parquet row group


class RowBatch(NamedTuple):
    """Some rows that follow each other in a role and split."""

    role: Role
    split: Split
    first: int
    """The position of the first one, from 1."""
    numbers: Numbers
    table: pa.Table

    def column(self, name: str) -> list[Any]:
        return list(self.table.column(name).to_pylist())

    @property
    def rows(self) -> list[Row]:
        """The rows as dicts, without the keys that they do not have."""
        return decoded(
            {k: v for k, v in values.items() if v is not None or k in TEXTS[self.role]}
            for values in self.table.to_pylist()
        )

    def where(self, i: int) -> str:
        """The place of a row, as a report names it."""
        source: str = self.table.column("source")[i].as_py()
        return source if ":" in source else f"{source} {self.role}/{self.split}:{self.first + i}"


class Rows(Sequence[Row]):
    """Rows of one role and split: those with these numbers, ascending, of the role's table."""

    def __init__(self, role: Role, split: Split, table: pa.Table, numbers: Numbers) -> None:
        self.role, self.split, self.table, self.numbers = role, split, table, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Row]:
        for batch in self.batches():
            yield from batch.rows

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> Rows: ...
    def __getitem__(self, i: int | slice) -> Row | Rows:
        if isinstance(i, slice):
            return Rows(self.role, self.split, self.table, self.numbers[i])
        one = self.table.slice(int(self.numbers[i]), 1)  # `take` would copy the table
        return RowBatch(self.role, self.split, 1, self.numbers, one).rows[0]

    def texts(self, name: str) -> Texts:
        return Texts(self, name)

    def take(self, which: npt.NDArray[Any], split: Split | None = None) -> Rows:
        """Some of the rows, by a mask or by positions."""
        return Rows(self.role, split or self.split, self.table, self.numbers[which])

    def that_have(self, *names: str) -> Rows:
        """The rows in which none of these texts is null: `chosen`, `rejected` for pairs."""
        are_there = [self.table.column(name).is_valid().to_numpy()[self.numbers] for name in names]
        return self.take(np.logical_and.reduce(are_there))

    def batches(self) -> Iterator[RowBatch]:
        first = 1
        for start in range(0, self.table.num_rows if len(self) else 0, BATCH):
            low, high = np.searchsorted(self.numbers, (start, start + BATCH))
            numbers, table = self.numbers[low:high], self.table.slice(start, BATCH)
            if not len(numbers):
                continue
            if not np.array_equal(numbers, np.arange(start, start + table.num_rows)):
                table = table.take(numbers - start)
            yield RowBatch(self.role, self.split, first, numbers, table)
            first += len(numbers)


class Texts(Sequence[str]):
    """A column of rows, of which a text is read from the map when it is asked for."""

    def __init__(self, rows: Rows, name: str) -> None:
        self._rows, self._name, self._column = rows, name, rows.table.column(name)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        rows = self._rows
        column = rows.table.select([self._name])
        for batch in Rows(rows.role, rows.split, column, rows.numbers).batches():
            yield from batch.column(self._name)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Texts(self._rows[i], self._name)
        return self._column[int(self._rows.numbers[i])].as_py()


Corpus = dict[Role, dict[Split, Rows]]


class Writer:
    """Collects the rows of a role in a temporary file, which goes when the rows do."""

    def __init__(self, role: Role) -> None:
        self._role = role
        names = (*TEXTS[role], "source", SET, KEY, CONVERSATION)
        self._schema = pa.schema([(name, pa.string()) for name in names])
        self._file = tempfile.NamedTemporaryFile(prefix="rlhf-rows-")  # noqa: SIM115 (`finish` closes it)
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._waiting, self._characters, self._count = list[Row](), 0, 0
        self._numbers: dict[Split, list[Numbers]] = {}
        self._splits: list[Split] = []

    def add(self, split: Split, row: Row) -> None:
        self._waiting.append(encoded(row))
        self._splits.append(split)
        self._characters += sum(len(row[name] or "") for name in TEXTS[self._role])
        if len(self._waiting) == BATCH or self._characters > BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        with disk.temporary(self._file):
            self._stream.write_batch(pa.RecordBatch.from_pylist(self._waiting, self._schema))
        splits = np.array(self._splits)
        for split in set(self._splits):
            numbers = np.flatnonzero(splits == split) + self._count
            self._numbers.setdefault(split, []).append(numbers)
        self._count += len(self._waiting)
        self._waiting, self._splits, self._characters = [], [], 0

    def finish(self, splits: Iterable[Split]) -> dict[Split, Rows]:
        """The rows by split; these splits are there even if they have none."""
        self._flush()
        with disk.temporary(self._file):
            self._stream.close()
            self._file.flush()
        table = pa.ipc.open_stream(pa.memory_map(self._file.name)).read_all()
        self._file.close()
        none = np.empty(0, np.int64)
        return {
            split: Rows(self._role, split, table, np.concatenate([none, *self._numbers.get(split, [])]))
            for split in dict.fromkeys((*splits, *self._numbers))
        }


def read(file: Path, role: Role, split: Split) -> Rows:
    """The rows of Parquet, which is unpacked for it into a temporary file of Arrow."""
    with pq.ParquetFile(file) as packed, tempfile.NamedTemporaryFile(prefix="rlhf-rows-") as copy:
        with disk.temporary(copy):
            with pa.ipc.new_stream(copy, packed.schema_arrow) as stream:
                for batch in packed.iter_batches(BATCH):
                    stream.write_batch(batch)
            copy.flush()
        table = pa.ipc.open_stream(pa.memory_map(copy.name)).read_all()
    return Rows(role, split, table, np.arange(table.num_rows))


def write(rows: Rows, file: Path, names: Sequence[str] = ()) -> None:
    """Write Parquet: these columns, or else texts, source, and `set` and `columns` where there are any."""
    further = [SET, KEY] if rows.role == "prompts" else [SET]
    if not names:
        further = [name for name in further if rows.table.column(name).null_count < rows.table.num_rows]
        names = [*TEXTS[rows.role], "source", *further]
    schema = pa.schema([(name, pa.string()) for name in names])
    with pq.ParquetWriter(file, schema) as out:
        for start in range(0, max(len(rows), 1), ROW_GROUP):
            tables = [batch.table.select(names) for batch in rows[start : start + ROW_GROUP].batches()]
            group = pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()
            out.write_table(group.cast(schema))


@dataclass
class BadRow:
    """A row as it was read, its place in the source, and its faults."""

    where: str
    row: Mapping[str, Any]
    faults: list[tuple[Reason, str]] = field(default_factory=list)


class Problems:
    """All bad rows of a run, and the records that make no row."""

    MAX_SHOWN = 20

    def __init__(self) -> None:
        self._bad: dict[tuple[str, int], BadRow] = {}

    def add(self, where: str, record: Mapping[str, Any], reason: Reason, detail: str) -> None:
        """Add a fault of a record; equal ones may both be bad."""
        self._bad.setdefault(("", id(record)), BadRow(where, record)).faults.append((reason, detail))

    def add_row(self, batch: RowBatch, i: int, reason: Reason, detail: str) -> None:
        key = batch.role, int(batch.numbers[i])
        if key not in self._bad:
            row = batch._replace(table=batch.table.slice(i, 1)).rows[0]
            self._bad[key] = BadRow(batch.where(i), row)
        self._bad[key].faults.append((reason, detail))

    def numbers(self, role: Role) -> list[int]:
        """The bad rows of a role's table."""
        return [number for name, number in self._bad if name == role]

    def __len__(self) -> int:
        """Number of bad rows; one row may have several faults."""
        return len(self._bad)

    def counts(self) -> dict[Reason, int]:
        """Faults by reason, every reason present."""
        counts = Counter(reason for bad in self._bad.values() for reason, _ in bad.faults)
        return {reason: counts[reason] for reason in REASONS}

    def report(self) -> str:
        """The faults as `where: reason: detail`, by reason and in the order of the source.

        MAX_SHOWN are listed, as many of each reason; the counts are of all.
        """
        counts = {reason: count for reason, count in self.counts().items() if count}
        tally = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        lines = [f"{len(self):,} row(s) of the data cannot be used ({tally}):"]
        bads, left = self._in_order(), self.MAX_SHOWN
        for number, (reason, count) in enumerate(sorted(counts.items(), key=lambda one: one[1])):
            faults = ((bad.where, detail) for bad in bads for name, detail in bad.faults if name == reason)
            shown = [*itertools.islice(faults, max(1, left // (len(counts) - number)))]
            lines += [f"  {where}: {reason}: {detail}" for where, detail in shown]
            left -= len(shown)
            if count > len(shown):
                lines.append(f"  … and {count - len(shown):,} more: {reason}")
        return "\n".join(lines)

    def lines(self) -> Iterator[str]:
        """A JSON line per bad row, for data/quarantine/rows.jsonl."""
        for bad in self._in_order():
            faults = [{"reason": reason, "detail": detail} for reason, detail in bad.faults]
            yield json.dumps({"where": bad.where, "problems": faults, "row": dict(bad.row)}, default=str)

    def _in_order(self) -> list[BadRow]:
        def natural(bad: BadRow) -> list[tuple[int, str]]:
            parts = re.split(r"(\d+)", bad.where)
            return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]

        return sorted(self._bad.values(), key=natural)


# ------------------------------------------------------------------------------------------ views


def batches(corpus: Corpus) -> Iterator[RowBatch]:
    for tables in corpus.values():
        for rows in tables.values():
            yield from rows.batches()


def prompt_key(prompt: str) -> str:
    """The key by which prompts are compared: their text with every run of white space as one space."""
    return " ".join(prompt.split())


def evaluated_role(corpus: Container[Role]) -> Role:
    """The role whose held-out prompts judge the policy: `prompts`, or the role they are derived from."""
    roles: tuple[Role, ...] = ("prompts", "sft", "preferences")
    return next(role for role in roles if role in corpus)


def without(corpus: Corpus, problems: Problems) -> Corpus:
    """The rows without a fault."""
    good: Corpus = {}
    for role, tables in corpus.items():
        bad = problems.numbers(role)
        good[role] = {
            split: rows.take(~np.isin(rows.numbers, bad)) if bad else rows for split, rows in tables.items()
        }
    return good


def digest(*texts: str) -> bytes:
    """What equal texts have in common, in a few bytes."""
    joined = "\ud800".join(texts)  # no text of a row has this character
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# ----------------------------------------------------------------------------------------- checks


def check_texts(corpus: Corpus, eos: str, problems: Problems) -> None:
    """Reports empty texts, a chosen answer equal to the rejected one, and an answer that contains `eos`."""
    for batch in batches(corpus):
        for name in TEXTS[batch.role]:
            for i, text in enumerate(batch.column(name)):
                if text is None:
                    continue
                if not text.strip():
                    problems.add_row(batch, i, "empty", f"{name} is empty")
                elif name != "prompt" and eos in text:
                    end = f"the end-of-sequence text {eos!r}, after which nothing is generated"
                    problems.add_row(batch, i, "malformed", f"{name} contains {end}")
        if batch.role == "preferences":
            pairs = zip(batch.column("chosen"), batch.column("rejected"), strict=True)
            for i, (chosen, rejected) in enumerate(pairs):
                if None not in (chosen, rejected) and chosen.strip() == rejected.strip():
                    same = "chosen and rejected are the same text"
                    problems.add_row(batch, i, "chosen_is_rejected", same)


def check_duplicates(corpus: Corpus, problems: Problems) -> None:
    """Reports rows equal to an earlier row of their role and split; the first one is kept.

    Conversations may begin in the same way: their earlier turns are no duplicates.
    """
    for tables in corpus.values():
        for rows in tables.values():
            first: dict[bytes, int] = {}
            for batch in rows.batches():
                conversations = batch.column(CONVERSATION)
                names = [*TEXTS[batch.role], *([KEY] if batch.role == "prompts" else [])]
                for i, texts in enumerate(zip(*map(batch.column, names), strict=True)):
                    if conversations[i] is not None:
                        continue
                    key = digest(*((text or "").strip() for text in texts))
                    place = first.setdefault(key, batch.first + i)
                    if place != batch.first + i:
                        numbers = rows.numbers[place - 1 : place]
                        table = rows.table.slice(int(numbers[0]), 1)
                        where = RowBatch(batch.role, batch.split, place, numbers, table).where(0)
                        problems.add_row(batch, i, "duplicate", f"the same row as {where}")


def without_held_turns(corpus: Corpus) -> Corpus:
    """Without earlier turns of conversations whose prompt a whole row of a held-out split has; it is said.

    Two conversations may begin in the same way, and the shorter one be held out.
    """
    columns = (rows.table.column(CONVERSATION) for tables in corpus.values() for rows in tables.values())
    if all(column.null_count == len(column) for column in columns):
        return corpus
    held: dict[Split, set[bytes]] = {split: set() for split in HELD_OUT}
    for batch in batches(corpus):
        talks = batch.column(CONVERSATION)
        if batch.split != "train":
            prompts = batch.column("prompt")
            held[batch.split] |= {
                digest(prompt_key(p)) for p, t in zip(prompts, talks, strict=True) if t is None
            }
    kept, num_lost = {role: dict(tables) for role, tables in corpus.items()}, 0
    for tables in kept.values():
        for split, rows in tables.items():
            others = set[bytes]().union(*(held[other] for other in HELD_OUT if other != split))
            pairs = zip(rows.texts("prompt"), rows.texts(CONVERSATION), strict=True)
            stays = np.array([t is None or digest(prompt_key(p)) not in others for p, t in pairs], bool)
            tables[split], num_lost = rows.take(stays), num_lost + int((~stays).sum())
    if num_lost:
        console.say(f"  {num_lost:,} earlier turn(s) make no row: their prompt is held out")
    return kept


def check_leaks(corpus: Corpus, problems: Problems) -> None:
    """Reports held-out prompts that are also in a train split, and test prompts that are in validation.

    Prompts of the evaluated role must be in no train split; those of another role not in its own. The
    held-out row counts as the bad one.
    """
    judged = evaluated_role(corpus)
    held = {
        digest(prompt_key(prompt))
        for tables in corpus.values()
        for split, rows in tables.items()
        if split != "train"
        for batch in rows.batches()
        for prompt in batch.column("prompt")
    }
    seen: dict[tuple[Role, Split], dict[bytes, str]] = {}
    for batch in batches(corpus):
        places = seen.setdefault((batch.role, batch.split), {})
        for i, prompt in enumerate(batch.column("prompt")):
            key = digest(prompt_key(prompt))
            if key in held and key not in places:
                places[key] = batch.where(i)
    for batch in batches(corpus):
        if batch.split == "train":
            continue
        role, conversations = batch.role, batch.column(CONVERSATION)
        others: list[tuple[Role, Split]] = [(r, "train") for r in corpus if role in (r, judged)]
        others += [(role, "validation")] if batch.split == "test" else []
        for i, prompt in enumerate(batch.column("prompt")):
            if prompt.strip() == "" or conversations[i] is not None:
                continue
            key = digest(prompt_key(prompt))
            clash = next((other for other in others if key in seen.get(other, {})), None)
            if clash is not None:
                where = f"{clash[1]} of {clash[0]} ({seen[clash][key]})"
                problems.add_row(batch, i, "leak", f"this {batch.split} prompt is also in {where}")


# ---------------------------------------------------------------------------------------- lengths


class Lengths(NamedTuple):
    """Of the rows of a role's table, by their numbers."""

    tokens: npt.NDArray[np.int32]
    """(N, K): the tokens of a row's K texts in the order of TEXTS, EOS counted in answers; -1 for no text."""
    merged: npt.NDArray[np.bool_]
    """(N,): whether a response would merge with its prompt."""


CountTokens = Callable[[list[str], list[str]], tuple[list[int], list[int], list[bool]]]
"""`tokenizer.Counts`: prompts and responses → their tokens, and which responses merge with their prompts."""


def measure(
    corpus: Corpus, count: CountTokens, advance: Callable[[int], None] = lambda _: None
) -> dict[Role, Lengths]:
    """Token counts of every text by role. `advance` is called with the number of rows that were read."""
    lengths: dict[Role, Lengths] = {}
    for batch in batches(corpus):
        names, size = TEXTS[batch.role], corpus[batch.role][batch.split].table.num_rows
        if batch.role not in lengths:
            lengths[batch.role] = Lengths(np.full((size, len(names)), -1, np.int32), np.zeros(size, bool))
        tokens, merged = lengths[batch.role]
        prompts = batch.column("prompt")
        answers = [text for name in names[1:] for text in batch.column(name)]
        counts = count(prompts * (len(names) - 1), [text or "" for text in answers])
        has_text = np.array([text is not None for text in answers]).reshape(-1, len(prompts))
        tokens[batch.numbers, 0] = counts[0][: len(prompts)]
        tokens[batch.numbers, 1:] = np.where(has_text, np.reshape(counts[1], has_text.shape), -1).T
        merged[batch.numbers] = (has_text & np.reshape(counts[2], has_text.shape)).any(axis=0)
        advance(len(prompts))
    return lengths


def limits(role: Role, max_prompt: int, max_completion: int) -> tuple[int, ...]:
    """The maximum number of tokens of each text of a role, in the order of TEXTS."""
    return tuple(max_prompt if name == "prompt" else max_completion for name in TEXTS[role])


def check_sizes(corpus: Corpus, max_prompt: int, max_completion: int, problems: Problems) -> None:
    """Reports texts that are too long whatever the tokenizer: tokenizing one of 30 MB takes half a minute."""
    for batch in batches(corpus):
        bounds = limits(batch.role, max_prompt, max_completion)
        for name, most in zip(TEXTS[batch.role], bounds, strict=True):
            for i, text in enumerate(batch.column(name)):
                if len(text or "") > most * LONGEST_TOKEN:
                    bound = f"data.{_length_key(name)}={most} tokens"
                    detail = f"{name} has {len(text):,} characters, too many for {bound}"
                    problems.add_row(batch, i, "too_long", detail)


def check_lengths(
    corpus: Corpus, lengths: Mapping[Role, Lengths], max_prompt: int, max_completion: int, problems: Problems
) -> None:
    """Reports texts longer than data.max_prompt_tokens or data.max_completion_tokens (EOS included)."""
    for batch in batches(corpus):
        most = limits(batch.role, max_prompt, max_completion)
        tokens = lengths[batch.role].tokens[batch.numbers]
        for i, k in np.argwhere(tokens > most):
            name = TEXTS[batch.role][k]
            detail = f"{name} has {tokens[i, k]} tokens, data.{_length_key(name)} is {most[k]}"
            problems.add_row(batch, int(i), "too_long", detail)


def needed_lengths(lengths: Mapping[Role, Lengths], max_prompt: int, max_completion: int) -> list[str]:
    """The parameters that would have to be larger for all rows, with those values."""
    longest = {_length_key("prompt"): max_prompt, _length_key("completion"): max_completion}
    known = dict(longest)
    for role, (tokens, _) in lengths.items():
        for name, most in zip(TEXTS[role], tokens.max(axis=0, initial=0).tolist(), strict=True):
            longest[_length_key(name)] = max(most, longest[_length_key(name)])
    return [f"data.{key}: {most}" for key, most in longest.items() if most > known[key]]


def _length_key(name: str) -> str:
    return "max_prompt_tokens" if name == "prompt" else "max_completion_tokens"

"""Rows, which every source produces in one form, and the checks on them.

A row is a dict of its role's text columns and `source`, the place it was read from
(`FILE:LINE` for the user's files). Rows that give prompts may have `columns`, the kept values by name.
Problems are collected, so that one report names every bad row.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rlhf_tasks.config import Split

Role = Literal["sft", "preferences", "prompts"]
Row = dict[str, Any]
Corpus = dict[Role, dict[Split, list[Row]]]

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

LONGEST_TOKEN = 256  # characters; the longest tokens of common vocabularies have half as many


@dataclass
class BadRow:
    """A row as it was read, its place in the source, and its faults."""

    where: str
    row: Mapping[str, Any]
    faults: list[tuple[Reason, str]] = field(default_factory=list)


class Problems:
    """All bad rows of a run. Rows are compared by identity: equal rows may both be bad."""

    MAX_SHOWN = 20

    def __init__(self) -> None:
        self._bad: dict[int, BadRow] = {}

    def add(self, where: str, row: Mapping[str, Any], reason: Reason, detail: str) -> None:
        self._bad.setdefault(id(row), BadRow(where, row)).faults.append((reason, detail))

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return id(row) in self._bad

    def __len__(self) -> int:
        """Number of bad rows; one row may have several faults."""
        return len(self._bad)

    def counts(self) -> dict[Reason, int]:
        """Faults by reason, every reason present."""
        found = Counter(reason for bad in self._bad.values() for reason, _ in bad.faults)
        return {reason: found[reason] for reason in REASONS}

    def report(self) -> str:
        """The faults as `where: reason: detail`, by reason and in the order of the source.

        MAX_SHOWN are listed, as many of each reason; the counts are of all.
        """
        counts = {reason: count for reason, count in self.counts().items() if count}
        tally = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        lines = [f"{len(self):,} row(s) of the data cannot be used ({tally}):"]
        bads, left = self._in_order(), self.MAX_SHOWN
        for number, (reason, count) in enumerate(sorted(counts.items(), key=lambda one: one[1])):
            shown = [
                f"  {bad.where}: {reason}: {detail}"
                for bad in bads
                for found, detail in bad.faults
                if found == reason
            ][: max(1, left // (len(counts) - number))]
            left -= len(shown)
            more = [f"  … and {count - len(shown):,} more: {reason}"] if count > len(shown) else []
            lines += [*shown, *more]
        return "\n".join(lines)

    def lines(self) -> Iterator[str]:
        """A JSON line per bad row, for data/quarantine/rows.jsonl."""
        for bad in self._in_order():
            faults = [{"reason": reason, "detail": detail} for reason, detail in bad.faults]
            yield json.dumps({"where": bad.where, "problems": faults, "row": dict(bad.row)}, default=str)

    def _in_order(self) -> list[BadRow]:
        def natural(bad: BadRow) -> list[tuple[int, str]]:
            return [
                (int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", bad.where)
            ]

        return sorted(self._bad.values(), key=natural)


# ------------------------------------------------------------------------------------------ views


def every(corpus: Corpus) -> Iterator[tuple[Role, Split, str, Row]]:
    """All rows with their role, split and place, as a report names it."""
    for role, tables in corpus.items():
        for split, rows in tables.items():
            for number, row in enumerate(rows, start=1):
                where = row["source"] if ":" in row["source"] else f"{row['source']} {role}/{split}:{number}"
                yield role, split, where, row


def prompt_key(prompt: str) -> str:
    """The key by which prompts are compared: their text with every run of white space as one space."""
    return " ".join(prompt.split())


def evaluated_role(corpus: Container[Role]) -> Role:
    """The role whose held-out prompts judge the policy: `prompts`, or the role they are derived from."""
    roles: tuple[Role, ...] = ("prompts", "sft", "preferences")
    return next(role for role in roles if role in corpus)


def without(corpus: Corpus, problems: Problems) -> Corpus:
    """The rows without a fault."""
    return {
        role: {split: [row for row in rows if row not in problems] for split, rows in tables.items()}
        for role, tables in corpus.items()
    }


# ----------------------------------------------------------------------------------------- checks


def check_texts(corpus: Corpus, eos: str, problems: Problems) -> None:
    """Reports empty texts, a chosen answer equal to the rejected one, and an answer that contains `eos`."""
    for role, _, where, row in every(corpus):
        names = TEXTS[role]
        for name in names:
            if not row[name].strip():
                problems.add(where, row, "empty", f"{name} is empty")
            elif name != "prompt" and eos in row[name]:
                detail = f"{name} contains the end-of-sequence text {eos!r}, after which nothing is generated"
                problems.add(where, row, "malformed", detail)
        if role == "preferences" and row["chosen"].strip() == row["rejected"].strip():
            problems.add(where, row, "chosen_is_rejected", "chosen and rejected are the same text")


def check_duplicates(corpus: Corpus, problems: Problems) -> None:
    """Reports rows equal to an earlier row of their role and split; the first one is kept.

    Conversations may begin in the same way: their earlier turns are no duplicates.
    """
    first: dict[tuple[str, ...], str] = {}
    for role, split, where, row in every(corpus):
        if CONVERSATION in row:
            continue
        key = (role, split, *(row[name].strip() for name in TEXTS[role]))
        if key in first:
            problems.add(where, row, "duplicate", f"the same row as {first[key]}")
        else:
            first[key] = where


def check_leaks(corpus: Corpus, problems: Problems) -> None:
    """Reports held-out prompts that are also in a train split, and test prompts that are in validation.

    Prompts of the evaluated role must be in no train split; those of another role not in its own. The
    held-out row counts as the bad one.
    """
    judged = evaluated_role(corpus)
    seen: dict[tuple[Role, Split], dict[str, str]] = {}
    for role, split, where, row in every(corpus):
        seen.setdefault((role, split), {}).setdefault(prompt_key(row["prompt"]), where)
    for role, split, where, row in every(corpus):
        if split == "train" or row["prompt"].strip() == "" or CONVERSATION in row:
            continue
        trained: Sequence[Role] = [r for r in ROLES if r in corpus] if role == judged else [role]
        places: list[tuple[Role, Split]] = [(other, "train") for other in trained]
        places += [(role, "validation")] if split == "test" else []
        key = prompt_key(row["prompt"])
        for other_role, other_split in places:
            if (clash := seen.get((other_role, other_split), {}).get(key)) is not None:
                detail = f"this {split} prompt is also in {other_split} of {other_role} ({clash})"
                problems.add(where, row, "leak", detail)
                break


Lengths = dict[int, tuple[int, ...]]
"""Tokens of a row's texts in the order of TEXTS, EOS counted in answers; by the row's id()."""


Encoder = Callable[[list[str], list[str]], tuple[list[list[int]], list[list[int]], list[bool]]]
"""`tokenizer.continue_prompts` of one tokenizer: prompts and responses → their ids, and which ones merge."""


def measure(corpus: Corpus, encode: Encoder) -> tuple[Lengths, set[int]]:
    """Token counts of every text, and the id() of each row that has a response merged with its prompt."""
    answers = [(row, name) for role, _, _, row in every(corpus) for name in TEXTS[role] if name != "prompt"]
    pairs = list(dict.fromkeys((row["prompt"], row[name]) for row, name in answers))
    queries, responses, merges = encode([prompt for prompt, _ in pairs], [text for _, text in pairs])
    counts = {
        pair: (len(query), len(response), is_merged)
        for pair, query, response, is_merged in zip(pairs, queries, responses, merges, strict=True)
    }
    lengths, merged = dict[int, tuple[int, ...]](), set[int]()
    for row, name in answers:
        of_prompt, of_answer, is_merged = counts[row["prompt"], row[name]]
        lengths[id(row)] = (*lengths.get(id(row), (of_prompt,)), of_answer)
        merged |= {id(row)} if is_merged else set()
    return lengths, merged


def limits(role: Role, max_prompt: int, max_completion: int) -> tuple[int, ...]:
    """The maximum number of tokens of each text of a role, in the order of TEXTS."""
    return tuple(max_prompt if name == "prompt" else max_completion for name in TEXTS[role])


def check_sizes(corpus: Corpus, max_prompt: int, max_completion: int, problems: Problems) -> None:
    """Reports texts that are too long whatever the tokenizer: tokenizing one of 30 MB takes half a minute."""
    for role, _, where, row in every(corpus):
        for name, most in zip(TEXTS[role], limits(role, max_prompt, max_completion), strict=True):
            if len(row[name]) > most * LONGEST_TOKEN:
                key = _length_key(name)
                detail = f"{name} has {len(row[name]):,} characters, too many for data.{key}={most} tokens"
                problems.add(where, row, "too_long", detail)


def check_lengths(
    corpus: Corpus, lengths: Lengths, max_prompt: int, max_completion: int, problems: Problems
) -> None:
    """Reports texts longer than data.max_prompt_tokens or data.max_completion_tokens (EOS included)."""
    for role, _, where, row in every(corpus):
        bounds = zip(TEXTS[role], lengths[id(row)], limits(role, max_prompt, max_completion), strict=True)
        for name, tokens, most in bounds:
            if tokens > most:
                detail = f"{name} has {tokens} tokens, data.{_length_key(name)} is {most}"
                problems.add(where, row, "too_long", detail)


def _length_key(name: str) -> str:
    return "max_prompt_tokens" if name == "prompt" else "max_completion_tokens"

"""Rows of records whose shape is known: what the entries of shapes.yaml name under `makes`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rlhf_tasks.config import Data, Split
from rlhf_tasks.data.chat import Message, Unusable, message
from rlhf_tasks.data.readers import cells
from rlhf_tasks.data.readers.cells import ANSWER_TEXTS, NAMES, RATINGS, TABLE, dialogue
from rlhf_tasks.data.readers.entries import NEEDS, Entry
from rlhf_tasks.data.rows import Role, digest
from rlhf_tasks.data.splits import SPLIT_NAMES
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call

Values = Mapping[str, Any]
Row = dict[str, Any]
SAMPLE = 1000  # rows by which the type of a column is known
PAIRED = {
    "best_worst": "the best and the worst answer",
    "best_each": "the best and each other answer",
    "adjacent": "answers that follow each other",
    "all": "every two answers",
}


class Line(NamedTuple):
    """One record and its place, `FILE:LINE`."""

    where: str
    values: Values


@dataclass(frozen=True)
class Lines:
    """The lines of a table, read anew each time: of a large file only a few are in memory."""

    read: Callable[[], Iterator[Line]]
    count: int

    def __iter__(self) -> Iterator[Line]:
        return self.read()

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Table:
    """One file, or one split of a set, as it was read."""

    name: str
    columns: tuple[str, ...]
    lines: Lines | Sequence[Line]

    def with_values(self, columns: tuple[str, ...], change: Callable[[Values], Row]) -> Table:
        """The same with further or other values of each record."""

        def lines() -> Iterator[Line]:
            return (Line(where, {**values, **change(values)}) for where, values in self.lines)

        return Table(self.name, columns, Lines(lines, len(self.lines)))


RoleTable = tuple[Role | None, Split, Table]
"""A table with the role and the split that its name gives; None: its shape decides the role."""


@dataclass(frozen=True)
class Reading:
    """A table in our columns."""

    role: Role
    rule: str
    """Which column goes where, for people."""
    table: Table
    """The table as it was read."""
    used: tuple[str, ...] = ()
    """The columns of the table that are read."""
    made: Callable[[], Iterable[tuple[Line, Any]]] = tuple
    """Each record and what it makes: a row, why it makes none as text, or its fault."""


class LeftOut(Exception):
    """A record that is right and makes no row, and why."""


class Rated(NamedTuple):
    """An answer of one record to a prompt that others answer too."""

    key: str
    prompt: Any
    rating: float | None
    answer: Any


NO_ENTRY = Entry(name="", columns={})


@dataclass
class Match:
    """A table that has the columns of a shape."""

    table: Table
    kinds: Mapping[str, str]
    """The types of its columns."""
    data: Data
    chat: bool
    alike: Sequence[Table]
    """The tables of the same columns, this one too."""
    entry: Entry = NO_ENTRY
    columns: dict[str, str] = field(default_factory=dict)
    """The column of each name of ours."""
    endings: Sequence[str] = ()
    """Those of the names of two answers."""
    sample: Sequence[Line] = ()
    """The first lines."""
    prompt: str | None = None
    """The column of a prompt, texts or messages, if a name or what stands beside it tells one."""

    def __post_init__(self) -> None:
        if not self.sample:
            self.sample = list(itertools.islice(self.table.lines, SAMPLE))
            self.prompt = self._prompt()

    def texts(self, name: str) -> list[Any]:
        """What the first lines say in a column."""
        return [value for line in self.sample if (value := line.values.get(name)) not in (None, "", [])]

    def _prompt(self) -> str | None:
        beside = [name for name, others in TABLE["asked"].items() if not self.kinds.keys().isdisjoint(others)]
        for name in (self.data.columns.prompt, *NAMES["prompt"], *beside):
            if self.kinds.get(name) in ("text", "messages"):
                return str(name)
        for name in (name for name, kind in self.kinds.items() if kind == "messages"):
            talks = [talk for line in self.sample if (talk := line.values.get(name))]
            if all(isinstance(talk, list) and cells.role(talk[-1]) == "user" for talk in talks):
                return name  # every conversation ends with the user's message
        return None

    @property
    def role(self) -> Role:
        if self.entry.makes in ("row", "solution", "conversation") and "rejected" not in self.columns:
            return "sft" if {"completion", "messages"} & self.columns.keys() else "prompts"
        is_sft = self.entry.makes == "labelled" and self.data.format == "good_answers"
        return "sft" if is_sft else "preferences"

    # ------------------------------------------------------------------------------------- the prompt

    def asked(self, values: Values) -> Any:
        """The whole prompt of a record: text or messages, an input below it, a system message before it."""
        text = values[self.columns.get("prompt", "prompt")]
        if isinstance(text, Mapping):
            if lost := [key for key, value in text.items() if cells.kind(value) in ("messages", "objects")]:
                raise Unusable("malformed", f"the object that is the prompt holds {', '.join(lost)} too")
            text = next(text[key] for key in cells.QUESTIONS if isinstance(text.get(key), str))
        text = self.turns(text)
        if self.context and (below := str(values.get(self.context) or "")).strip():
            text = self.with_context(text, below)
        if self.has_history:
            before = cells.messages_before(values.get("history"))
            text = [{"role": "user", "content": text}] if isinstance(text, str) else text
            start = 1 if text and cells.role(text[0]) == "system" else 0
            text = [*text[:start], *before, *text[start:]]
        system = self.system_before(text, values)
        if isinstance(text, str) and not self.chat:
            return f"{system}\n\n{text}" if system else text
        if isinstance(text, str) and self.system is not None:
            text = [{"role": "user", "content": text}]
        return [{"role": "system", "content": system}, *text] if system else text

    def with_context(self, text: Any, below: str) -> Any:
        """A prompt with what stands below it: at the end of its text, or of its last message, the user's."""
        if isinstance(text, str):
            end = cells.ANSWER_BEGINS.search(text)
            assert end is not None
            return f"{text[: end.start()]}\n{below}{end[0]}"
        last = message("the prompt", len(text) - 1, text[-1]) if text else {}
        if last.get("role") != "user":
            raise Unusable(
                "malformed",
                f"{self.context} stands beside a prompt that does not end with the user's message",
            )
        return [*text[:-1], last | {"content": f"{last['content']}\n{below}"}]

    def turns(self, text: Any) -> Any:
        """A prompt as it is, or as messages where texts are marked dialogues."""
        if not isinstance(text, str) or not self.is_dialogue:
            return text
        return dialogue(text) or [{"role": "user", "content": text}]

    def with_system(self, turns: Any, values: Values) -> Any:
        """A conversation with the system message of its record, if this has one."""
        system = self.system_before(turns, values) if isinstance(turns, list) else None
        return [{"role": "system", "content": system}, *turns] if system else turns

    def system_before(self, talk: Any, values: Values) -> str | None:
        """The system message of a record's column, unless the conversation or text begins with it.

        Raises:
            Unusable: if the conversation begins with another system message.
        """
        system = values.get(self.system) if self.system else None
        if not isinstance(system, str) or not system.strip():
            return None
        turns = dialogue(talk) if isinstance(talk, str) else talk
        if not turns and isinstance(talk, str):
            return None if talk.lstrip().startswith(f"{system.strip()}\n") else system
        if not isinstance(turns, list) or not turns or cells.role(turns[0]) != "system":
            return system
        first = message("the conversation", 0, turns[0])["content"]
        if first.split() != system.split():
            both = f"{self.system} is {system!r:.60}, and the conversation begins with the system message"
            raise Unusable("malformed", f"{both} {first!r:.60}: give one of them, or the same text in both")
        return None

    @cached_property
    def is_dialogue(self) -> bool:
        """Whether prompts, or answers of pairs without one, are marked dialogues for a chat template."""
        name = self.columns.get("prompt", self.data.columns.chosen)
        texts = (line.values.get(name) for table in self.alike for line in table.lines)
        return self.chat and any(isinstance(text, str) and dialogue(text) for text in texts)

    def strange_labels(self, name: str) -> Iterator[tuple[Line, Any]]:
        """The labels in a column that call their answer neither good nor bad."""
        for line in self.table.lines:
            label = line.values.get(name)
            if label not in (None, "") and label == label and cells.flag(label) is None:  # NaN is none
                yield line, label

    @cached_property
    def has_history(self) -> bool:
        """Whether `history` holds the turns before the prompt, as (question, answer) each."""
        if "history" not in self.kinds or self.columns.get("prompt") == "history":
            return False
        return any(cells.messages_before(line.values.get("history")) for line in self.table.lines)

    @cached_property
    def context(self) -> str | None:
        """The column of what stands below the prompt."""
        named = self.data.columns
        taken = *self.columns.values(), named.completion, named.chosen, named.rejected
        names = (name for name in NAMES["context"] if name not in taken)
        return next((name for name in names if self.kinds.get(name) in ("text", "number")), None)

    @cached_property
    def system(self) -> str | None:
        """The column of a system message."""
        names = (name for name in NAMES["system"] if self.kinds.get(name) == "text")
        return self.data.columns.system or next(names, None)

    @property
    def beside(self) -> list[str]:
        """The columns that are read beside those of the shape."""
        first, chosen = (self.kinds.get(self.columns.get(name, "")) for name in ("first", "chosen"))
        is_parted = "prompt" not in self.columns and chosen and (self.chat or chosen == "messages")
        if is_parted or first == "messages" or {"messages", "talk"} & self.columns.keys():
            return [self.system] if self.system else []
        if "prompt" not in self.columns or self.entry.makes == "solution":
            return []
        names = self.context, self.system, "history" if self.has_history else None
        return [name for name in names if name]

    # -------------------------------------------------------------------------------------- the pairs

    @cached_property
    def verdicts(self) -> list[str]:
        """The columns that may say that a pair is none."""
        if self.entry.makes == "tree":
            return []
        named = self.data.columns
        sides = named.prompt, named.chosen, named.rejected, named.completion
        return [name for name in self.kinds if cells.VERDICT.fullmatch(name.casefold()) and name not in sides]

    def unchosen(self, values: Values) -> str | None:
        """Why a pair of a record is none: a tie, or nobody chose a side."""
        reasons = (cells.unchosen(name, values.get(name)) for name in self.verdicts)
        return next(filter(None, reasons), None)

    def keys_of(self, name: str) -> tuple[str | None, str | None, str | None]:
        """The keys of the text and the rating in the objects of a column, and the prompt that they hold."""
        items: list[Any] = next(value for value in self.texts(name) if cells.kind(value) == "objects")
        text = next((key for key in ANSWER_TEXTS if isinstance(items[0].get(key), str)), None)
        rating = next((key for key in RATINGS if any(key in item for item in items)), None)
        return text, rating, question(items[0])

    @property
    def paired(self) -> str:
        """The rule by which rated answers make pairs."""
        return self.data.pairs or ("best_each" if self.entry.makes == "tree" else "best_worst")

    def pairs(self, prompt: Any, rated: Sequence[tuple[float, Any]]) -> list[Row]:
        """The pairs of answers by their rating, a higher one first.

        Raises:
            LeftOut: if no two of them differ by more than `data.margin`.
        """
        if len(rated) < 2:
            raise LeftOut("its prompt has one answer only" if rated else "it has no rating")
        order = sorted(rated, key=lambda one: -one[0])
        last = min(order, key=lambda one: one[0])
        pairs = {
            "best_worst": [(order[0], last)],
            "best_each": [(order[0], other) for other in order[1:]],
            "adjacent": list(itertools.pairwise(order)),
            "all": list(itertools.combinations(order, 2)),
        }[self.paired]
        rows = [_pair(prompt, a[1], b[1]) for a, b in pairs if a[0] - b[0] > self.data.margin]
        if not rows:
            scores = f" ({rated[0][0]:g} and {rated[1][0]:g})" if len(rated) == 2 else ""
            is_equal = order[0][0] == last[0]
            why = "all scores are equal" if is_equal else f"no scores differ by over {self.data.margin}"
            raise LeftOut(f"{why}{scores}")
        return rows

    def check(self) -> None:
        """Check that the table says all that its rows need.

        Raises:
            UserError: if `data.format` has to say what labels mean, or if votes name no answer.
        """
        columns, lines, name = self.columns, self.table.lines, self.table.name
        formats = "good_answers", "label_pairs", "unpaired_labels"
        if self.entry.makes == "labelled" and self.data.format not in formats:
            label = columns["label"]
            labels = [cells.flag(line.values.get(label)) for line in lines]
            raise UserError(
                f"{name}: the column {label!r} marks {labels.count(False)} of {len(labels)} rows as false, "
                "so these single answers are neither demonstrations nor pairs. Set data.format to "
                "label_pairs (a good and a bad answer to a prompt become a pair), unpaired_labels (each is "
                "good or bad by itself, for dpo.loss: kto), good_answers (those that are true are "
                f"demonstrations), or demonstrations (all, and {label!r} says something else)"
            )
        if "vote" in columns and not self.entry.votes:
            judged = (converted(preference, self, line) for line in lines if not self.unchosen(line.values))
            if strange := [one for one in judged if isinstance(one, Unusable)]:
                needed = {slot: name for slot, name in columns.items() if slot in NEEDS["voted"][0]}
                raise UserError(
                    f"{name}: {strange[0]}, as in {len(strange)} row(s); write the column as "
                    f"{' or '.join(self.endings[:2])} (or tie), or write shapes.yaml with what its values "
                    f"mean, and set data.shapes: shapes.yaml\n{as_entry(self, needed)}"
                )

    def reading(self) -> Reading:
        """What the table is read as."""
        below = f" and {self.context} below it" if self.context in self.beside else ""
        parts = [f"{ours} = {name}{below if ours == 'prompt' else ''}" for ours, name in self.columns.items()]
        rule, used = f"{self.entry.name}: {', '.join(parts)}", [*self.columns.values(), *self.beside]
        if self.entry.makes in ("rated", "tree"):
            rule += f"; {PAIRED[self.paired]} to a prompt (data.pairs)"
        if self.role == "preferences" and (beside := [name for name in self.verdicts if name not in used]):
            rule += f"; left out: what {' or '.join(beside)} calls a tie or unchosen"
            used += beside
        has_splits = any(split_of(line.values) for line in self.sample)
        more = (*self.data.columns.keep, *(["split"] if has_splits else []), "tools")
        used += [name for name in dict.fromkeys(more) if name not in used]
        return Reading(self.role, rule, self.table, tuple(used), lambda: with_kept(self._rows(), self.data))

    def _rows(self) -> Iterator[tuple[Line, Any]]:
        maker, has_verdicts = MAKERS[self.entry.makes], self.role == "preferences" and bool(self.verdicts)
        groups, seen = dict[str, list[tuple[Line, Rated]]](), set[bytes]()
        for line in self.by_id.values() if self.entry.makes == "tree" else self.table.lines:
            made = (has_verdicts and self.unchosen(line.values)) or converted(maker, self, line)
            if isinstance(made, Rated):
                groups.setdefault(made.key, []).append((line, made))
            elif isinstance(made, list):
                yield from ((line, row) for row in made)
            elif made is not None:
                if isinstance(made, dict) and self.entry.makes == "voted":
                    key = digest(repr(made))
                    made = "the same pair as an earlier row, by another judge" if key in seen else made
                    seen.add(key)
                yield line, made
        for group in groups.values():
            answers = [(one.rating, one.answer) for _, one in group if one.rating is not None]
            try:
                rows = self.pairs(group[0][1].prompt, answers)
            except LeftOut as reason:
                yield from ((line, str(reason)) for line, _ in group)
                continue
            yield from ((group[0][0], row) for row in rows)
            yield from ((line, "it has no rating") for line, one in group if one.rating is None)

    @cached_property
    def keys(self) -> tuple[str | None, str | None]:
        """The keys of the text and the rating in the objects that are answers."""
        return self.keys_of(self.columns["answers"])[:2]

    @cached_property
    def voted(self) -> Sequence[Sequence[str]]:
        """What a vote may say for the first and for the second answer."""
        ends = zip(("first", "second"), self.endings or ("", ""), strict=False)
        return self.entry.votes or [called(self.columns[slot], end) for slot, end in ends]

    @cached_property
    def by_id(self) -> dict[str, Line]:
        """The messages of a tree."""
        lines = [*self.table.lines]
        return {line.values["message_id"] if is_message(line.values) else line.where: line for line in lines}

    @cached_property
    def has_lists(self) -> bool:
        """Whether prompt and answers are lists of turns as JSON in texts, as the Chatbot Arena's are."""
        names = self.columns["first"], self.columns["second"], self.columns.get("prompt", "None")
        given = [texts for line in self.sample if all(texts := [line.values.get(name) for name in names])]
        in_lists = sum(None not in map(cells.turns_in_text, texts) for texts in given)
        return "first won" in self.columns and 2 * in_lists > len(given)


def split_of(values: Values) -> Split | None:
    """The split that a row names in the column `split`: valid1 and test_prefs are known too."""
    name = values.get("split")
    return SPLIT_NAMES.get(re.split(r"[-_\d]", name.casefold())[0]) if isinstance(name, str) else None


def with_kept(rows: Iterable[tuple[Line, Any]], data: Data) -> Iterator[tuple[Line, Any]]:
    """Rows with the columns of their records that `data.columns.keep` names, and `tools`."""
    for line, row in rows:
        if isinstance(row, dict):
            names = (*data.columns.keep, *(["tools"] if line.values.get("tools") else []))
            row = {name: line.values[name] for name in names if name in line.values} | row
        yield line, row


def as_entry(match: Match, columns: Mapping[str, str]) -> str:
    """A shape of these columns, as it stands in a file of shapes."""
    makes = "rated" if "scores" in columns else "voted" if "vote" in columns else "row"
    lines = [f"  - name: shape of {match.table.name}", f"    makes: {makes}"]
    lines += ["    votes: [[what means the first], [what means the second]]"] if makes == "voted" else []
    types = {slot: "any" if slot == "vote" else match.kinds[name] for slot, name in columns.items()}
    names = (
        f"      {slot}: {{names: [{json.dumps(columns[slot])}], types: {types[slot]}}}" for slot in columns
    )
    return "\n".join([*lines, "    columns:", *names])


def by_function(table: Table, data: Data, function: Callable[[Row], Any]) -> Reading:
    """The rows of a function of the user's: a record goes in, a row, several or None come out."""
    path = str(data.format)

    def made() -> Iterator[tuple[Line, Any]]:
        for line in table.lines:
            name = f"{line.where}: data.format: {path}"
            returned = call(name, function, dict(line.values))
            # a generator runs, and may fail, when it is read
            is_one = not isinstance(returned, list | tuple | Iterator)
            several = [returned] if is_one else call(name, list, returned)
            if not several:
                yield line, f"{path} returns no row"
            for row in several:
                try:
                    yield line, f"{path} returns None" if row is None else dict(row)
                except (TypeError, ValueError):
                    raise UserError(
                        f"{name} must return a row, such as {{'prompt': …, 'completion': …}}, several of "
                        f"them, or None, but gave {row!r:.80}"
                    ) from None

    names, rows = peek(made())  # a function that counts or pays is called once for a record
    is_sft = not {"completion", "messages"}.isdisjoint(names)
    role: Role = "preferences" if "chosen" in names else "sft" if is_sft else "prompts"
    return Reading(role, f"by {path}", table, table.columns, lambda: with_kept(rows, data))


def peek(pairs: Iterable[tuple[Line, Any]]) -> tuple[tuple[str, ...], Iterator[tuple[Line, Any]]]:
    """The columns of the first rows, and all that is made."""
    rest, head, rows = iter(pairs), list[tuple[Line, Any]](), list[Row]()
    for line, row in rest:
        head.append((line, row))
        if isinstance(row, dict):
            rows.append(row)
        if len(rows) == SAMPLE:
            break
    return tuple(dict.fromkeys(name for row in rows for name in row)), itertools.chain(head, rest)


def converted(maker: Callable[[Match, Values], Any], match: Match, line: Line) -> Any:
    """What `maker` makes of a record; why it makes no row, as text; or its fault."""
    try:
        return maker(match, line.values)
    except LeftOut as reason:
        return str(reason)
    except Unusable as fault:
        return fault
    except KeyError as missing:
        return Unusable("malformed", f"has no {missing}")
    except (AttributeError, TypeError, ValueError, IndexError, StopIteration) as error:
        what = str(error) or type(error).__name__  # a value of another type than in the other rows
        return Unusable("malformed", f"has values of another type: {what}")


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# ------------------------------------------------------------------------------------------- `makes`


def row(match: Match, values: Values) -> Row:
    """The columns of the shape under our names."""
    made = {ours: values[name] for ours, name in match.columns.items()}
    if "prompt" in made:
        made["prompt"] = asked = match.asked(values)
        if len(made) == 1 and isinstance(asked, list) and asked and cells.role(asked[-1]) == "assistant":
            name = match.columns["prompt"]
            raise Unusable("malformed", f"{name} ends with the assistant's message, so it is no prompt")
    return made


def solution(match: Match, values: Values) -> Row:
    """The same without what stands beside the prompt; a reference gives the answer that follows ####."""
    made = {ours: values[name] for ours, name in match.columns.items()}
    if "reference" in made:
        final = cells.FINAL.search(str(made["reference"]))
        if final is None:
            raise Unusable("malformed", f"{match.columns['reference']} has no line that begins with ####")
        made["answer"] = final[1].replace(",", "")
    return made


def parted(match: Match, values: Values) -> Row:
    """Two conversations, messages or marked texts, whose common start is the prompt."""
    sides = [values[match.columns[side]] for side in ("chosen", "rejected")]
    if all(isinstance(side, list) for side in sides):
        chosen, rejected = (match.with_system(side, values) for side in sides)
        return {"chosen": chosen, "rejected": rejected}
    texts = [str(side) for side in sides]
    turns = [dialogue(text) for text in texts]
    if not all(turns):
        raise Unusable("malformed", "has no prompt, and its answers are no dialogues")
    if match.chat:
        chosen, rejected = (match.with_system(side, values) for side in turns)
        return {"chosen": chosen, "rejected": rejected}
    return _pair(*cells.cut_dialogues(*texts))


def conversation(match: Match, values: Values) -> Row:
    """Messages, of which the last is the completion, or `chosen` beside another last one, `rejected`."""
    turns = match.with_system(values[match.columns["messages"]], values)
    if "rejected" in match.columns:
        other = {"role": "assistant", "content": values[match.columns["rejected"]]}
        return {"chosen": turns, "rejected": [*turns[:-1], other]}
    if isinstance(turns[-1], Mapping) and turns[-1].get("weight") == 0:
        raise LeftOut("its last message has weight 0")
    rated = [any(turn.get(key) is not None for key in RATINGS) for turn in turns[-2:]]
    if rated == [True, True] and cells.role(turns[-1]) == cells.role(turns[-2]):
        raise Unusable("malformed", "its last messages are rated answers to one prompt, no conversation")
    return {"messages": turns}


def labelled(match: Match, values: Values) -> Row | Rated:
    """An answer that a label calls good or bad."""
    label = values[match.columns["label"]]
    is_good, is_unpaired = cells.flag(label), match.data.format == "unpaired_labels"
    if (is_unpaired and is_good is None) or (match.data.format == "good_answers" and not is_good):
        raise LeftOut(f"{match.columns['label']} is {'null' if is_good is None else 'false'}")
    if "talk" in match.columns:
        talk = match.with_system(values[match.columns["talk"]], values)
        prompt, answer = talk[:-1], talk[-1:]
    else:
        prompt, answer = match.asked(values), values[match.columns["completion"]]
    if match.data.format == "good_answers":
        return {"prompt": prompt, "completion": answer}
    if is_unpaired:  # one side of a pair is null; an answer that is null is an empty one
        return _pair(prompt, answer or "", None) if is_good else _pair(prompt, None, answer or "")
    return Rated(repr(prompt), prompt, None if is_good is None else float(is_good), answer)


def rated(match: Match, values: Values) -> list[Row] | Rated:
    """An answer and its score, or a list of them; a lower rank is better."""
    columns = match.columns
    if "score" in columns:
        number, prompt = cells.number(values[columns["score"]]), match.asked(values)
        number = -number if number and columns["score"] == "rank" else number
        return Rated(repr(prompt), prompt, number, values[columns["response"]])
    if "scores" in columns:
        by: str | None = columns["scores"]
        texts, numbers = values[columns["answers"]], values[columns["scores"]]
        if len(texts) != len(numbers) or not all(isinstance(text, str) for text in texts):
            fault = f"{columns['answers']} and {columns['scores']} are no texts with a number each"
            raise Unusable("malformed", fault)
        items, prompt = list(zip(texts, map(cells.number, numbers), strict=True)), match.asked(values)
    else:
        answers, (text, by) = values.get(columns["answers"]) or [], match.keys
        holds = answers and "prompt" not in columns
        prompt = match.turns(question(answers[0])) if holds else match.asked(values)
        answers = [one for one in answers if cells.number(one.get(by)) is not None]
        items = [(one[text], cells.number(one[by])) for one in answers]
    sign = -1 if str(by).startswith("rank") else 1
    return match.pairs(prompt, [(sign * number, text) for text, number in items if number is not None])


def question(item: Values) -> str | None:
    """The prompt that an answer holds itself."""
    asked = next((item[key] for key in NAMES["prompt"] if key in item), None)
    if isinstance(asked, Mapping):
        asked = next((asked[key] for key in ("full_text", "text", "content") if key in asked), None)
    return asked if isinstance(asked, str) else None


def called(column: str, ending: str) -> list[str]:
    """What a vote or a flag may call an answer: its letter or number, its column, or its model."""
    name = ending.strip("_").casefold()
    kinds = "model", "response", "answer", "output", "completion", "assistant", "chat", "summary"
    return [name, column.casefold(), *(f"{kind}_{name}" for kind in kinds)]


def preference(match: Match, values: Values) -> float:
    """Above zero where the first of two answers was chosen, below where the second was.

    Raises:
        LeftOut: for a tie.
        Unusable: for a vote that names none of them.
    """
    columns, least = match.columns, 0.0
    if vote := columns.get("vote"):
        value, (first, second) = values[vote], match.voted
        if value in (None, ""):
            raise LeftOut(f"{vote} is empty")
        if why := cells.unchosen(vote, name := cells.word(value).strip()):
            raise LeftOut(why)
        if name not in (*first, *second):
            raise Unusable("malformed", f"{vote} is {value!r}, which names none of the two answers")
        return 1.0 if name in first else -1.0
    if "strength" in columns:
        difference = -float(values[columns["strength"]] or 0)
    else:
        kind = "score" if "first score" in columns else "won"
        names = columns[f"first {kind}"], columns[f"second {kind}"]
        read: Callable[[Any], float | None] = cells.number if kind == "score" else cells.flag
        one, other = (read(values[name]) for name in names)
        if one is None or other is None or (kind == "won" and one and other):
            fault = "or {} is no finite number" if kind == "score" else "and {} name no winner and no tie"
            raise Unusable("malformed", f"{names[0]} {fault.format(names[1])}")
        difference, least = float(one) - float(other), match.data.margin if kind == "score" else 0.0
    if not abs(difference) > least:
        raise LeftOut(f"a tie: the scores differ by {abs(difference):g}" if least else "a tie")
    return difference


def only_text(name: str, value: Any) -> str:
    """The text of a list of turns with one. Later prompts of several would hold other answers."""
    turns = cells.turns_in_text(value or "[]")
    if turns is None:
        raise Unusable("malformed", f"{name} is no list of turns, as it is in other rows")
    if len(turns) > 1:
        raise LeftOut(f"{len(turns)} turns: the first answers differ, so the later prompts differ")
    if not turns or turns[0] is None:
        raise LeftOut(f"{name} has no text")
    return str(turns[0])


def voted(match: Match, values: Values) -> Row:
    """Two answers, of which one was chosen; of conversations, their start is the prompt."""
    better = preference(match, values) > 0
    names = match.columns["first"], match.columns["second"]
    if match.has_lists:
        listed = (*names, match.columns.get("prompt", "None"))
        values = {**values, **{name: only_text(name, values[name]) for name in listed}}
    chosen, rejected = (values[name] for name in (names if better else names[::-1]))
    if isinstance(chosen, list) and not cells.is_answer(chosen):
        if turn := int(values.get("turn") or 0):
            chosen, rejected = (
                side[: 2 * turn + (cells.role(side[0]) == "system")] for side in (chosen, rejected)
            )
        if chosen[:-1] != rejected[:-1]:
            where = f"turn {turn}: " if turn else ""
            raise LeftOut(f"{where}the first answers differ, so the prompts differ")
        chosen, rejected = (match.with_system(side, values) for side in (chosen, rejected))
        return {"chosen": chosen, "rejected": rejected}
    return _pair(match.asked(values), chosen, rejected)


def is_message(values: Values) -> bool:
    return all(isinstance(values.get(key), str) for key in ("message_id", "text", "role"))


def tree(match: Match, values: Values) -> Rated | None:
    """A message; the answers to it are rated by their rank, and its prompt is the path from the root."""
    if not is_message(values):
        raise Unusable("malformed", "has no message_id, text or role")
    parent, by_id = str(values.get("parent_id")), match.by_id
    if values["role"] != "assistant":
        return None
    if values.get("deleted"):
        raise LeftOut("it is deleted")
    if parent not in by_id:
        raise LeftOut("the message that it answers is not here")
    path, at = list[Message](), by_id.get(parent)
    while at is not None and len(path) <= len(by_id):
        role = "assistant" if at.values["role"] == "assistant" else "user"
        path.append({"role": role, "content": at.values["text"]})
        at = by_id.get(str(at.values.get("parent_id")))
    if at is not None:
        raise Unusable("malformed", f"the parents of {parent} form a circle")
    rank = cells.number(values.get("rank"))
    prompt = path[::-1] if match.chat or len(path) > 1 else path[0]["content"]
    return Rated(parent, prompt, None if rank is None else -rank, values["text"])


def summaries(match: Match, values: Values) -> Row:
    """A post or an article, two summaries and the choice."""
    info, texts = values["info"], [summary["text"] for summary in values["summaries"]]
    if info.get("post") is None:
        prompt = f"Article: {info.get('article')}\n\nTL;DR:"
    else:
        title = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}"
        prompt = f"{title}\n\nPOST: {info['post']}\n\nTL;DR:"
    return _pair(prompt, texts[int(values["choice"])], texts[1 - int(values["choice"])])


MAKERS: Mapping[str, Callable[[Match, Values], Any]] = {
    one.__name__: one
    for one in (row, solution, parted, conversation, labelled, rated, voted, tree, summaries)
}

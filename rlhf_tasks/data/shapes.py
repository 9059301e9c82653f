"""Recognizes the shape of a table by its columns and their types, and reads it as our columns.

    prompt, completion          demonstrations; also instruction, input, output and their synonyms
    messages                    a conversation: lists of {role, content} or {from, value}, under any one name
    chosen, rejected            pairs: texts, messages, or dialogues as marked text
    two answers and a vote      response_0, response_1, better_response_id; scores of both; a winner
    a list of rated answers     ranks or scores in one row
    a rated answer per row      the answers of a prompt are in several rows
    a message per row           a tree by parent_id, with ranks
    prompt, completion, label   single answers marked good or bad: refused, unless `data.format` says how
    question, answer with ####  demonstrations, and prompts with the right answer

The rule is said, and so is each column that it does not use and each row that it leaves out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data.chat import Message, Unusable
from rlhf_tasks.data.rows import Role
from rlhf_tasks.data.splits import SPLIT_NAMES
from rlhf_tasks.errors import UserError

Values = Mapping[str, Any]
Row = dict[str, Any]

PROMPTS = ("prompt", "instruction", "question", "query", "history", "problem", "post")
CONTEXTS = ("input", "context")
ANSWERS = ("completion", "output", "response", "answer", "target", "reference")
STEMS = ("response", "answer", "human_ref", "completion", "output", "summary", "conversation", "chat")
SUFFIXES = (("_0", "_1"), ("_1", "_2"), ("_a", "_b"), ("_A", "_B"), ("0", "1"), ("1", "2"), ("A", "B"))
VOTES = ("better_response_id", "winner", "choice", "preference", "chosen_id")
SCORES = ("overall_score", "score", "rating", "helpfulness")
TEXTS_OF_ANSWERS = ("response", "answer", "text", "completion", "output", "content")
LABELS = ("label", "labels", "is_good", "thumbs_up", "desirable")
MARKS = {"human": "user", "user": "user", "assistant": "assistant", "system": "system"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant|System): ?")
EXTRA_ID = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
FINAL = re.compile(r"^####\s*(\S.*?)\s*$", re.MULTILINE)
SAMPLE = 1000  # rows by which the type of a column is known
MOST_LISTED = 5


@dataclass(frozen=True)
class Line:
    """One record and its place, `FILE:LINE`."""

    where: str
    values: Values


@dataclass(frozen=True)
class Table:
    """One file, or one split of a set, as it was read."""

    name: str
    columns: tuple[str, ...]
    lines: list[Line]


@dataclass
class Reading:
    """A table in our columns, with what was made of it."""

    role: Role
    rule: str
    """Which column goes where, for people."""
    table: Table
    used: tuple[str, ...]
    splits: Mapping[int, Split] = field(default_factory=dict)
    """The split of a line, by its position, where a column names it."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """The place of each row that makes no row here, and why."""
    bad: list[tuple[Line, Unusable]] = field(default_factory=list)
    """Records that are no rows, and their faults."""


class LeftOut(Exception):
    """A record that is right and makes no row, and why."""


# ------------------------------------------------------------------------------------- types of columns


def kinds_of(table: Table, named: Iterable[str] = ()) -> dict[str, str]:
    """The type that most values of each column have, by its first rows; empty columns are left out.

    The types: text, messages, objects (a list of them), list, object, number, flag (true or false). A column
    that is `named` is text where it is nothing that can be read, so that its rows are refused one by one.
    """
    found: dict[str, str] = {}
    for name in table.columns:
        values = (line.values.get(name) for line in table.lines[:SAMPLE])
        kinds = Counter(_kind(value) for value in values if value is not None)
        del kinds["nothing"]
        if kinds:
            kind = kinds.most_common(1)[0][0]
            found[name] = "text" if name in named and kind not in ("text", "messages") else kind
    return found


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    if not isinstance(value, list) or not value:
        return "nothing"
    if all(isinstance(item, Mapping) for item in value):
        keys = set(value[0])
        return "messages" if {"role", "content"} <= keys or {"from", "value"} <= keys else "objects"
    return "list"


def dialogue(text: str) -> list[Message] | None:
    """The turns of a text in which marks begin them; None if it is no such text.

    The marks are `Human:` and `Assistant:` after an empty line (Anthropic's hh-rlhf), or `<extra_id_1>User`
    (HelpSteer2). A last turn without text is a generation prompt and is left out.
    """
    if found := EXTRA_ID.split(text)[1:]:
        first = EXTRA_ID.split(text)[0]
        turns = [("User", first), *zip(found[::2], found[1::2], strict=True)]
    elif text.startswith(("\n\nHuman:", "Human:", "\n\nSystem:")):
        parts = TURN.split(text)[1:]
        turns = list(zip(parts[::2], parts[1::2], strict=True))
        if turns and not turns[-1][1].strip():
            turns.pop()
    else:
        return None
    return [{"role": MARKS[mark.lower()], "content": content} for mark, content in turns]


# --------------------------------------------------------------------------------------------- reading


def read(
    tables: Sequence[tuple[Role | None, Split, Table]],
    data: Data,
    *,
    chat: bool,
    own: Callable[[Row], Any] | None = None,
) -> list[tuple[Split, Reading]]:
    """The readings of tables: one of each, or one for each role that it gives.

    Args:
        tables: With the role that a file's name gives; None: the shape decides.
        chat: Whether the model has a chat template; without one a dialogue in marked text stays text.
        own: The function that `data.format` names.

    Raises:
        UserError: naming each that has no known shape, one that `data.format` must decide, or another role.
    """
    found, faults = list[tuple[Split, Reading]](), list[str]()
    named = (data.columns.prompt, data.columns.completion, data.columns.chosen, data.columns.rejected)
    for role, split, table in tables:
        alike = [other for _, _, other in tables if other.columns == table.columns]
        shape = _Shape(table, kinds_of(table, named), data, chat, alike)
        try:
            readings = [Reading("sft", "no rows", table, table.columns)]
            if table.lines:
                readings = shape.by_function(own) if own is not None else shape.readings(role)
            found += [(split, _as_role(reading, role)) for reading in readings]
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))
    return found


def _as_role(reading: Reading, role: Role | None) -> Reading:
    """The reading in the role that the file's name gives: demonstrations serve as prompts with references."""
    fits = role in (None, reading.role) or (role, reading.role) == ("prompts", "sft")
    if fits or not reading.table.lines:
        return replace(reading, role=role or reading.role)
    raise UserError(
        f"{reading.table.name} is {role} by its name, and holds {reading.rule}; rename it, or name its "
        "columns in data.columns"
    )


@dataclass
class _Shape:
    """A table with the types of its columns, and what a rule needs to read it."""

    table: Table
    kinds: Mapping[str, str]
    data: Data
    chat: bool
    alike: Sequence[Table]
    """The tables of the same columns, this one too."""

    def readings(self, role: Role | None) -> list[Reading]:
        """The readings by the first rule that fits; with a role, the first that gives it."""
        found = [reading for kind in _KINDS for reading in kind(self)]
        allowed = {role, "sft"} if role == "prompts" else {role}
        found = [one for one in found if one.role in allowed] or found[:1] if role else found
        if not found:
            has = ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items()) or "none"
            raise UserError(
                f"{self.table.name} has no known shape; its columns are {has}. Name them in data.columns "
                "(prompt, completion, chosen, rejected), or give data.format: my_module:rows, a function "
                "that gets a record and returns a row"
            )
        has_two = role is None and found[0].rule.startswith("question and answer")
        return found[: 2 if has_two else 1]

    @property
    def columns(self) -> Columns:
        return self.data.columns

    def first(self, names: Iterable[str], kind: str = "text") -> str | None:
        """The first of these columns that has the type."""
        return next((name for name in names if self.kinds.get(name) == kind), None)

    def prompt(self) -> str | None:
        """The column of the prompt: texts or messages."""
        names = (self.columns.prompt, *PROMPTS)
        return next((name for name in names if self.kinds.get(name) in ("text", "messages")), None)

    def given(self, text: Any) -> Any:
        """A prompt or answer as it is, or as messages where its text is a marked dialogue."""
        if not isinstance(text, str) or not self.is_dialogue:
            return text
        return dialogue(text) or [{"role": "user", "content": text}]

    @cached_property
    def is_dialogue(self) -> bool:
        """Whether prompts, or answers of pairs without one, are marked dialogues for a chat template."""
        name = self.prompt() or self.columns.chosen
        texts = (line.values.get(name) for table in self.alike for line in table.lines)
        return self.chat and any(isinstance(text, str) and dialogue(text) for text in texts)

    def with_system(self, prompt: Any, values: Values) -> Any:
        """The prompt after the system message of its row."""
        name = self.columns.system or ("system" if self.kinds.get("system") == "text" else None)
        system = values.get(name) if name else None
        if name is None:
            return prompt
        has_text = isinstance(system, str) and bool(system.strip())
        if not self.chat:
            return f"{system}\n\n{prompt}" if has_text and isinstance(prompt, str) else prompt
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{"role": "system", "content": system}, *turns] if has_text else turns

    def rows(
        self, role: Role, rule: str, used: Iterable[str | None], convert: Callable[[Values], Row]
    ) -> list[Reading]:
        """The reading that converts each record; one that raises LeftOut is left out and named."""
        return self.reading(
            role, rule, used, ((line, _converted(convert, line)) for line in self.table.lines)
        )

    def reading(
        self, role: Role, rule: str, used: Iterable[str | None], made: Iterable[tuple[Line, Any]]
    ) -> list[Reading]:
        lines, left_out = list[Line](), list[tuple[str, str]]()
        splits, bad = dict[int, Split](), list[tuple[Line, Unusable]]()
        keep = tuple(dict.fromkeys(name.split(".")[0] for name in self.columns.keep))
        for line, row in made:
            if isinstance(row, str):
                left_out.append((line.where, row))
                continue
            if isinstance(row, Unusable):
                bad.append((line, row))
                continue
            if (named := _split(line.values)) is not None:
                splits[len(lines)] = named
            kept = {name: line.values[name] for name in keep if name in line.values}
            tools = {"tools": line.values["tools"]} if line.values.get("tools") else {}
            lines.append(Line(line.where, kept | tools | row))
        names = dict.fromkeys(name for line in lines for name in line.values)
        extra = ("split",) if splits else ()
        table = Table(self.table.name, tuple(names), lines)
        taken = (*(name for name in used if name), *keep, *extra, "tools")
        return [Reading(role, rule, table, taken, splits, left_out, bad)]

    def by_function(self, own: Callable[[Row], Any]) -> list[Reading]:
        """The rows of a function of the user's: a record goes in, a row, several or None come out."""
        path, made = str(self.data.format), list[tuple[Line, Any]]()
        for line in self.table.lines:
            try:
                rows = own(dict(line.values))
            except Exception as error:  # the user's function can raise anything
                raise UserError(f"{line.where}: {path} failed: {type(error).__name__}: {error}") from error
            several = rows if isinstance(rows, list) else [rows]
            made += [(line, f"{path} returns None" if row is None else dict(row)) for row in several]
        names = {name for _, row in made if isinstance(row, dict) for name in row}
        role: Role = "preferences" if "chosen" in names else "sft" if names - {"prompt"} else "prompts"
        return self.reading(role, f"by {path}", self.table.columns, made)


def _converted(convert: Callable[[Values], Row], line: Line) -> Row | str | Unusable:
    try:
        return convert(line.values)
    except LeftOut as reason:
        return str(reason)
    except Unusable as fault:
        return fault
    except KeyError as missing:
        return Unusable("malformed", f"has no {missing}")
    except (TypeError, ValueError, IndexError) as error:  # a value of another type than in the other rows
        return Unusable("malformed", f"has values of another type: {error}")


def _split(values: Values) -> Split | None:
    """The split that a row names in the column `split`."""
    name = values.get("split")
    return SPLIT_NAMES.get(re.sub(r"\d+$", "", name)) if isinstance(name, str) else None


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _ordered(
    rated: Sequence[tuple[float, Any]], data: Data, default: str = "best_worst"
) -> list[tuple[Any, Any]]:
    """(chosen, rejected) of answers by their rating, a higher one first, by the rule of `data.pairs`.

    Raises:
        LeftOut: if no two of them differ by more than `data.margin`.
    """
    if len(rated) < 2:
        raise LeftOut("one response only")
    order = sorted(rated, key=lambda one: -one[0])
    last = min(order, key=lambda one: one[0])
    pairs = {
        "best_worst": [(order[0], last)],
        "best_each": [(order[0], other) for other in order[1:]],
        "adjacent": list(itertools.pairwise(order)),
        "all": [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]],
    }[data.pairs or default]
    found = [(a[1], b[1]) for a, b in pairs if a[0] - b[0] > data.margin]
    if not found:
        equal = (
            "all scores are equal" if order[0][0] == last[0] else f"no scores differ by over {data.margin}"
        )
        raise LeftOut(equal)
    return found


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


# ----------------------------------------------------------------------------------------------- rules


def _unpaired(shape: _Shape) -> list[Reading]:
    """Answers marked good or bad: never demonstrations unless somebody says so."""
    prompt, answer = shape.prompt(), shape.first((shape.columns.completion, *ANSWERS))
    answer = answer or shape.first((shape.columns.completion, *ANSWERS), "messages")
    named = next((name for name in LABELS if name in shape.kinds), None)
    label = named or next((name for name, kind in shape.kinds.items() if kind == "flag"), None)
    if prompt is None or answer is None or label is None or shape.data.format == "demonstrations":
        return []
    values = [line.values.get(label) for line in shape.table.lines]
    if not all(value in (True, False, None) for value in values):
        return []
    used = (prompt, answer, label)
    match shape.data.format:
        case "good_answers":

            def good(values: Values) -> Row:
                if not values[label]:
                    raise LeftOut(f"{label} is false")
                return {"prompt": values[prompt], "completion": values[answer]}

            return shape.rows("sft", f"the answers whose {label} is true", used, good)
        case "label_pairs":
            return shape.reading(
                "preferences", f"pairs of a good and a bad answer by {label}", used,
                _by_prompt(shape, prompt, lambda values: (float(bool(values[label])), values[answer])),
            )  # fmt: skip
    bad = sum(value is False or value == 0 for value in values)
    raise UserError(
        f"{shape.table.name}: the column {label!r} marks {bad} of {len(values)} rows as false, so these "
        "single answers are neither demonstrations nor pairs. Set data.format to label_pairs (a good and a "
        "bad answer to a prompt become a pair), good_answers (those that are true are demonstrations), or "
        f"demonstrations (all of them are, and {label!r} says something else)"
    )


def _by_prompt(
    shape: _Shape, prompt: str, rated: Callable[[Values], tuple[float | None, Any]]
) -> Iterator[tuple[Line, Any]]:
    """Pairs of the rated answers that several rows give to a prompt, at the place of its first row."""
    groups: dict[str, list[Line]] = {}
    for line in shape.table.lines:
        groups.setdefault(repr(line.values[prompt]), []).append(line)
    for lines in groups.values():
        found = [
            (score, answer) for line in lines for score, answer in [rated(line.values)] if score is not None
        ]
        try:
            pairs = _ordered(found, shape.data)
        except LeftOut as reason:
            scores = " and ".join(f"{score:g}" for score, _ in found)
            why = "its prompt has one answer only" if len(found) < 2 else f"{reason} ({scores})"
            yield from ((line, why) for line in lines)
            continue
        given = shape.given(lines[0].values[prompt])
        yield from ((lines[0], _pair(given, chosen, rejected)) for chosen, rejected in pairs)


def _pairs(shape: _Shape) -> list[Reading]:
    """chosen and rejected, with a prompt or with the start that both have."""
    chosen, rejected = shape.columns.chosen, shape.columns.rejected
    if {shape.kinds.get(chosen), shape.kinds.get(rejected)} - {"text", "messages"}:
        return []
    prompt = (
        shape.prompt() if shape.kinds[chosen] != "messages" or shape.columns.prompt in shape.kinds else None
    )

    def convert(values: Values) -> Row:
        sides = [shape.given(values[name]) for name in (chosen, rejected)]
        if prompt is None and not all(isinstance(side, list) for side in sides):
            turns = [dialogue(str(side)) for side in sides]
            if not all(turns):
                raise Unusable("malformed", "has no prompt, and its answers are no dialogues")
            return _cut(*map(str, sides))
        row = {"chosen": sides[0], "rejected": sides[1]}
        return (
            row
            if prompt is None
            else row | {"prompt": shape.with_system(shape.given(values[prompt]), values)}
        )

    texts = [str(line.values[chosen]) for line in shape.table.lines[:SAMPLE] if line.values.get(chosen)]
    if prompt is None and shape.kinds[chosen] == "text" and not all(dialogue(text) for text in texts):
        return []
    start = "the start that both have" if prompt is None else prompt
    rule = f"pairs: prompt = {start}, chosen = {chosen}, rejected = {rejected}"
    return shape.rows("preferences", rule, (prompt, chosen, rejected, "system", "messages"), convert)


def _cut(chosen: str, rejected: str) -> Row:
    """Two marked dialogues as texts: the prompt ends after the last `Assistant:` that both share."""
    ends = [match.end() - (match[0][-1] == " ") for match in TURN.finditer(chosen) if match[1] == "Assistant"]
    end = max((end for end in ends if rejected.startswith(chosen[:end])), default=0)
    return _pair(chosen[:end], chosen[end:], rejected[end:])


def _voted(shape: _Shape) -> list[Reading]:
    """Two answers in columns of their own, and a vote or a score for each."""
    found = next(
        (
            (stem + a, stem + b, a, b)
            for stem in STEMS
            for a, b in SUFFIXES
            if shape.kinds.get(stem + a) in ("text", "messages")
            and shape.kinds.get(stem + b) == shape.kinds[stem + a]
        ),
        None,
    )
    if found is None:
        return []
    first, second, a, b = found
    asked = shape.data.format if shape.data.format in shape.kinds else None
    vote = asked or next((name for name in VOTES if name in shape.kinds), None)
    is_shp = first == "human_ref_A" and "labels" in shape.kinds
    scores = next((s for s in SCORES if shape.kinds.get(s + a) == shape.kinds.get(s + b) == "number"), None)
    prompt = shape.prompt() or next(
        (name for name in PROMPTS if shape.kinds.get(name) == "object" and _text_of(shape, name)), None
    )
    if vote is None and not is_shp and scores is None:
        return []
    seen: set[str] = set()

    def is_first(values: Values) -> bool:
        if is_shp:
            return values["labels"] in (1, True)
        if vote is not None:
            return _is_first(values[vote], vote, a, b)
        one, two = (float(values[f"{scores}{suffix}"]) for suffix in (a, b))
        if abs(one - two) <= shape.data.margin:
            raise LeftOut(
                f"a tie: both scores are {one:g}" if one == two else f"the scores are {one:g} and {two:g}"
            )
        return one > two

    def convert(values: Values) -> Row:
        better = is_first(values)
        chosen, rejected = (values[name] for name in ((first, second) if better else (second, first)))
        asked = "" if prompt is None else values[prompt]
        if isinstance(asked, Mapping):
            asked = asked[_text_of(shape, str(prompt))]
        if isinstance(chosen, list):
            turn = int(values.get("turn") or 1)
            chosen, rejected = chosen[: 2 * turn], rejected[: 2 * turn]
            if chosen[:-1] != rejected[:-1]:
                raise LeftOut(f"turn {turn}: the first answers differ, so the prompts differ")
            row = {"chosen": chosen, "rejected": rejected}
        else:
            row = _pair(shape.given(asked), chosen, rejected)
        if repr(row) in seen:
            raise LeftOut("the same pair as an earlier row, by another judge")
        seen.add(repr(row))
        return row

    by = "labels (1: A is chosen)" if is_shp else vote or f"{scores}{a} and {scores}{b}"
    used = (prompt, first, second, vote, "labels" if is_shp else None, "turn")
    used = (*used, *((scores + a, scores + b) if scores and not vote else ()))
    return shape.rows(
        "preferences", f"pairs of {first} and {second} by {by}, prompt = {prompt}", used, convert
    )


def _is_first(value: Any, vote: str, a: str, b: str) -> bool:
    """Whether a vote is for the first answer: its number, its letter, or the name that ends with it.

    Raises:
        LeftOut: for a tie.
        Unusable: for another value.
    """
    number = _number(value)
    names = [suffix.strip("_").lower() for suffix in (a, b)]
    if number is not None and not isinstance(value, str):
        name = str(int(number))
    else:
        name = str(value).lower().rpartition("_")[2] if "tie" not in str(value).lower() else "tie"
    if name == "tie":
        raise LeftOut("a tie")
    if name in names:
        return name == names[0]
    raise Unusable("malformed", f"{vote} is {value!r}, which names none of the two answers")


def _text_of(shape: _Shape, column: str) -> str | None:
    """The key of the text in a column of objects, such as question.full_text."""
    value = shape.table.lines[0].values.get(column) or {}
    return next(
        (key for key in ("full_text", "text", "content", *PROMPTS) if isinstance(value.get(key), str)), None
    )


def _better_of_two(shape: _Shape) -> list[Reading]:
    """response_j was rated better than response_k (stack-exchange-paired)."""
    prompt = shape.prompt()
    if prompt is None or {shape.kinds.get("response_j"), shape.kinds.get("response_k")} != {"text"}:
        return []
    rule = f"pairs: prompt = {prompt}, chosen = response_j, rejected = response_k"
    return shape.rows(
        "preferences", rule, (prompt, "response_j", "response_k"),
        lambda values: _pair(shape.given(values[prompt]), values["response_j"], values["response_k"]),
    )  # fmt: skip


def _summaries(shape: _Shape) -> list[Reading]:
    """OpenAI's comparisons of summaries: a post, two summaries and the choice."""
    if [shape.kinds.get(name) for name in ("info", "summaries", "choice")] != ["object", "objects", "number"]:
        return []

    def convert(values: Values) -> Row:
        info, texts = values["info"], [summary["text"] for summary in values["summaries"]]
        if info.get("post") is None:
            prompt = f"Article: {info.get('article')}\n\nTL;DR:"
        else:
            title = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}"
            prompt = f"{title}\n\nPOST: {info['post']}\n\nTL;DR:"
        return _pair(prompt, texts[int(values["choice"])], texts[1 - int(values["choice"])])

    rule = "pairs: prompt = subreddit, title and post of info, chosen = summaries[choice]"
    return shape.rows("preferences", rule, ("info", "summaries", "choice"), convert)


def _rated_list(shape: _Shape) -> list[Reading]:
    """A list of answers with a rank or a score each."""
    for name, kind in shape.kinds.items():
        if kind != "objects":
            continue
        items = next((v for line in shape.table.lines if (v := line.values.get(name))), list[Any]([{}]))
        keys: set[str] = set().union(*items)
        text = next((key for key in TEXTS_OF_ANSWERS if isinstance(items[0].get(key), str)), None)
        rating = next((key for key in ("rank", *SCORES) if key in keys), None)
        if text is None or rating is None:
            continue
        asked = shape.prompt() or (name if _question(items[0]) else None)
        if asked is None:
            continue
        return shape.reading(
            "preferences", f"pairs of {name} by {rating}, prompt = {asked}", (name, asked),
            _from_list(shape, name, text, rating, asked),
        )  # fmt: skip
    return []


def _question(item: Values) -> str | None:
    """The prompt that an answer holds itself."""
    asked = next((item[key] for key in PROMPTS if key in item), None)
    if isinstance(asked, Mapping):
        asked = next((asked[key] for key in ("full_text", "text", "content") if key in asked), None)
    return asked if isinstance(asked, str) else None


def _from_list(shape: _Shape, name: str, text: str, rating: str, asked: str) -> Iterator[tuple[Line, Any]]:
    sign = -1 if rating == "rank" else 1
    for line in shape.table.lines:
        items = line.values.get(name) or []
        prompt = _question(items[0]) if asked == name and items else line.values.get(asked)
        rated = [(sign * n, one[text]) for one in items if (n := _number(one.get(rating))) is not None]
        try:
            if len(rated) == 2 and rated[0][0] == rated[1][0]:
                raise LeftOut(f"a tie: both scores are {rated[0][0]:g}")
            pairs = _ordered(rated, shape.data)
        except LeftOut as reason:
            yield line, str(reason)
            continue
        yield from ((line, _pair(shape.given(prompt), *pair)) for pair in pairs)


def _rated_rows(shape: _Shape) -> list[Reading]:
    """An answer and its score per row; those to one prompt become pairs."""
    prompt, answer = shape.prompt(), shape.first(("response", "answer", "completion", "output"))
    score = next((s for s in (shape.data.format or "", *SCORES) if shape.kinds.get(s) == "number"), None)
    if prompt is None or answer is None or score is None:
        return []
    asked = [line.values.get(prompt) for line in shape.table.lines]
    if len(set(map(repr, asked))) == len(asked):
        return []  # one answer to each prompt: the score is a property of a demonstration
    made = _by_prompt(shape, prompt, lambda values: (_number(values[score]), values[answer]))
    rule = f"pairs of the rows that have the same {prompt}, by {score}"
    return shape.reading("preferences", rule, (prompt, answer, score), made)


def _tree(shape: _Shape) -> list[Reading]:
    """A message per row, with its parent: ranked answers to the same message become pairs."""
    if [shape.kinds.get(name) for name in ("message_id", "parent_id", "text", "role")] != ["text"] * 4:
        return []

    def made() -> Iterator[tuple[Line, Any]]:
        by_id = {line.values["message_id"]: line for line in shape.table.lines}
        answers: dict[str, list[Line]] = {}
        for line in shape.table.lines:
            parent = str(line.values.get("parent_id"))
            if parent in by_id and line.values["role"] == "assistant":
                answers.setdefault(parent, []).append(line)
        for parent, lines in answers.items():
            path, at = [], by_id.get(parent)
            while at is not None:
                role = "user" if at.values["role"] == "prompter" else "assistant"
                path.append({"role": role, "content": at.values["text"]})
                at = by_id.get(at.values.get("parent_id"))
            rated = [
                (-n, line.values["text"])
                for line in lines
                if (n := _number(line.values.get("rank"))) is not None
            ]
            if len(rated) < 2:
                few = (
                    "the only answer of its message has no rank"
                    if not rated
                    else "the only ranked answer of its message"
                )
                yield from ((line, few) for line in lines)
                continue
            prompt = path[::-1] if shape.chat or len(path) > 1 else path[0]["content"]
            yield from ((lines[0], _pair(prompt, *pair)) for pair in _ordered(rated, shape.data, "best_each"))

    rule = "pairs of the ranked answers to the same message, prompt = the path from the root"
    return shape.reading("preferences", rule, ("message_id", "parent_id", "text", "role", "rank"), made())


def _solutions(shape: _Shape) -> list[Reading]:
    """Solutions whose last line is #### and the answer: demonstrations, and prompts with the answer."""
    prompt, answer = shape.first(PROMPTS), shape.first(ANSWERS)
    if prompt is None or answer is None or _is_named(shape):
        return []
    texts = [str(line.values.get(answer)) for line in shape.table.lines[:SAMPLE]]
    if not all(FINAL.search(text) for text in texts):
        return []

    def right(values: Values) -> Row:
        found = FINAL.search(str(values[answer]))
        if found is None:
            raise Unusable("malformed", f"{answer} has no line that begins with ####")
        return {"prompt": values[prompt], "answer": found[1].replace(",", ""), "reference": values[answer]}

    rule = f"question and answer: prompt = {prompt}, completion = {answer}"
    used = (prompt, answer)
    return [
        *shape.rows("sft", rule, used, lambda v: {"prompt": v[prompt], "completion": v[answer]}),
        *shape.rows("prompts", f"{rule}; the column answer = what follows ####", used, right),
    ]


def _is_named(shape: _Shape) -> bool:
    """Whether data.columns names the columns of demonstrations."""
    names = (shape.columns.prompt, shape.columns.completion)
    return names != (Columns().prompt, Columns().completion) and set(names) <= set(shape.kinds)


def _instructions(shape: _Shape) -> list[Reading]:
    """A prompt, perhaps with an input below it, and the answer."""
    prompt, answer = shape.prompt(), None
    names = (shape.columns.completion, *ANSWERS)
    answer = shape.first(names) or shape.first(names, "messages")
    if prompt is None or answer is None:
        return []
    context = shape.first(CONTEXTS)

    def convert(values: Values) -> Row:
        asked = values[prompt]
        if context and isinstance(asked, str) and str(values.get(context) or "").strip():
            asked = f"{asked}\n{values[context]}"
        return {"prompt": shape.with_system(shape.given(asked), values), "completion": values[answer]}

    below = f" and {context} below it" if context else ""
    rule = f"demonstrations: prompt = {prompt}{below}, completion = {answer}"
    return shape.rows("sft", rule, (prompt, context, answer, "system"), convert)


def _conversations(shape: _Shape) -> list[Reading]:
    """A conversation per row: its last message is the completion."""
    names = [
        name for name, kind in shape.kinds.items() if kind == "messages" and name != shape.columns.prompt
    ]
    name = "messages" if "messages" in names else names[0] if len(names) == 1 else None
    if name is None:
        return []

    def convert(values: Values) -> Row:
        turns = values[name]
        if isinstance(values.get("system"), str) and values["system"].strip() and isinstance(turns, list):
            turns = [{"role": "system", "content": values["system"]}, *turns]
        return {"messages": turns}

    rule = f"demonstrations: prompt = all of {name} but its last message, completion = the last"
    return shape.rows("sft", rule, (name, "system"), convert)


def _prompts(shape: _Shape) -> list[Reading]:
    """Prompts alone."""
    prompt = shape.prompt()
    if prompt is None:
        return []
    rule = f"prompts: prompt = {prompt}"
    return shape.rows("prompts", rule, (prompt,), lambda v: {"prompt": shape.given(v[prompt])})


_KINDS: Sequence[Callable[[_Shape], list[Reading]]] = (
    _pairs, _unpaired, _summaries, _voted, _better_of_two, _rated_list, _tree, _rated_rows, _solutions,
    _instructions, _conversations, _prompts,
)  # fmt: skip
FORMATS: tuple[str, ...] = ("demonstrations", "good_answers", "label_pairs")
PairRule = Literal["best_worst", "best_each", "adjacent", "all"]

"""Recognizes the shape of a table by its columns and their types, and reads it as our columns.

    prompt, completion          demonstrations; also instruction, input, output and their synonyms
    messages                    a conversation: lists of {role, content} or {from, value}, under any one name
    chosen, rejected            pairs: texts, messages, or dialogues as marked text
    two answers and a vote      response_0, response_1, better_response_id; scores or flags of both; a winner
    a list of rated answers     ranks or scores in one row: of objects, or beside a list of texts
    a rated answer per row      ranks or scores; the answers of a prompt are in several rows
    a message per row           a tree by parent_id, with ranks
    prompt, completion, label   single answers marked good or bad: refused, unless `data.format` says how
    question, answer with ####  demonstrations, and prompts with the right answer

The rule is said, and so is each column that it does not use and each row that it leaves out.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data.chat import CALL, OTHER_NAMES, WHAT, WHO, Message, Unusable, message
from rlhf_tasks.data.rows import Role, digest
from rlhf_tasks.data.splits import SPLIT_NAMES
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call

Values = Mapping[str, Any]
Row = dict[str, Any]

PROMPTS = ("prompt", "instruction", "question", "query", "history", "problem", "post", "inputs")
CONTEXTS = ("input", "context")
ANSWERS = (
    "completion",
    "output",
    "response",
    "solution",
    "answer",
    "target",
    "reference",
    "targets",
    "assistant",
)
ASKED_BY = {"input": (*ANSWERS, "preferred_output", "chosen"), "user": ("assistant",)}
"""Columns that are the prompt if a table has no other, and has the answer beside them."""
SIDES = (
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
)
"""Columns that are chosen and rejected if a table has none of these names; in the last, of StackExchange,
response_j was rated better."""
TALKS = ("messages", "conversations", "conversation", "dialogue", "dialog")
TURNS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("prompt", "response"))
"""The keys of a list of objects that holds a conversation, question and answer in each."""
STEMS = ("response", "answer", "human_ref", "completion", "output", "summary", "conversation", "chat")
SUFFIXES = (("_0", "_1"), ("_1", "_2"), ("_a", "_b"), ("_A", "_B"), ("0", "1"), ("1", "2"), ("A", "B"))
SYSTEMS = ("system", "system_prompt")
TEXTS = {
    *PROMPTS,
    *CONTEXTS,
    *ANSWERS,
    *SYSTEMS,
    *itertools.chain(*SIDES),
    *(f"{stem}{suffix}".casefold() for stem in STEMS for two in SUFFIXES for suffix in two),
}
"""The columns that rules read as text, or as messages: a prompt or an answer may be JSON itself."""
VOTES = ("better_response_id", "winner", "choice", "preference", "chosen_id")
SIGNED = ("overall_preference", "preference_strength")
"""HelpSteer: −3, the first answer is much better, to 3, the second is."""
SCORES = ("overall_score", "fine-grained_score", "score", "rating", "helpfulness", "pm_score", "reward")
RATINGS = ("rank", *SCORES)
LISTED_ANSWERS = ("response", "answer", "completion", "output")
TEXTS_OF_ANSWERS = ("response", "answer", "text", "completion", "output", "content")
LABELS = ("label", "labels", "feedback", "correct", "is_correct", "is_good", "thumbs_up", "desirable")
GOOD = ("true", "1", "good", "chosen", "positive", "thumbs_up", "thumbs up", "up", "desirable")
BAD = ("false", "0", "-1", "bad", "rejected", "negative", "thumbs_down", "thumbs down", "down", "undesirable")
LIKE_ANSWERS = re.compile(
    r"(.*_)?(chosen|reject|response|answer|solution|generation|completion|label|output|preference|winner"
    r"|summary|choices|options)",
    re.IGNORECASE,
)
FORMATS = ("demonstrations", "good_answers", "label_pairs")
"""The words that `data.format` knows; else it names a column, or a function."""
THIRD = {"_0": "_2", "_1": "_3", "_a": "_c", "_A": "_C", "0": "2", "1": "3", "A": "C"}
"""The suffix of a third answer, by that of the first."""
ROLES = {*OTHER_NAMES.values(), CALL, "developer"}
MARKS = {"human": "user", "user": "user", "assistant": "assistant", "system": "system"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant|System): ?")
TEXT_KEYS = ("full_text", "text", "content", *PROMPTS)
"""The keys of the text in an object that is a prompt."""
EXTRA_ID = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
VERDICT = re.compile(
    r"((overall|final|human|annotation|record|response|review|pair|winner|is)[_-])?(status|verdict|winner"
    r"|vote|choice|preference|preferred|outcome|result|decision|label|chosen_by|tie|tied)|preference_strength"
)
"""Columns beside a pair that may say that neither side was chosen, such as Argilla's `status`."""
TIE = re.compile(r"tie( .*)?|tied|both( are)?( ?(good|bad)| equal.*)?|draw|equal|same")
UNCHOSEN = re.compile(
    r"neither|nobody|no (one|winner|preference|choice|votes?|majority|agreement|consensus)|not chosen"
    r"|un(chosen|decided|resolved|labell?ed|annotated|rated|judged)|inconclusive|abstain(ed)?|pending|draft"
    r"|discarded|skipped|invalid"
)
FINAL = re.compile(r"^####\s*(\S.*?)\s*$", re.MULTILINE)
SAMPLE = 1000  # rows by which the type of a column is known
MOST_NAMED = 40  # columns in a message


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


def _unfolded(table: Table, named: Sequence[str]) -> Table:
    """The table with conversations in other forms as lists of messages.

    They are JSON in a text, as in the cells of a CSV file; a list of objects with question and answer each;
    texts by turns (LIMA); one message (LLaMA-Factory); or an object with messages (OpenAI).
    """
    shown = list(itertools.islice(table.lines, SAMPLE))

    def all_are(name: str, turned: Callable[[Any], Any]) -> bool:
        values = [value for line in shown if (value := line.values.get(name)) not in (None, "", [])]
        return bool(values) and all(turned(value) is not None for value in values)

    changed: dict[str, Callable[[Any], Any]] = {}
    for name in table.columns:
        forms: list[Callable[[Any], Any]] = [_from_json, _from_turns, _from_object]
        known = name.strip().casefold()
        if known in PROMPTS or name == named[0]:
            forms[0] = _prompt_from_json
        elif known in ANSWERS or name == named[1]:
            forms[0] = _answer_from_json
        elif known in TEXTS or name in named:
            forms[0] = _talk_from_json
        if name in TALKS:
            forms.append(_from_texts)
        if convert := next((one for one in forms if all_are(name, one)), None):
            changed[name] = convert
    if not changed:
        return table

    def lines() -> Iterator[Line]:
        for line in table.lines:
            turned = {name: _or_same(convert, line.values.get(name)) for name, convert in changed.items()}
            yield Line(line.where, {**line.values, **turned})

    return Table(table.name, table.columns, Lines(lines, len(table.lines)))


def _or_same(convert: Callable[[Any], Any], value: Any) -> Any:
    """The converted value; one that is of another form stays, so that its row is refused by name."""
    found = convert(value)
    return value if found is None else found


def _from_json(value: Any) -> Any:
    """The list or object that a text is as JSON; None for any other value."""
    return _or_same(_from_turns, _loaded(value))


def _talk_from_json(value: Any) -> list[Any] | None:
    """The messages that a text is as JSON; None for any other value, such as an answer that is JSON."""
    found = _loaded(value)
    items = found if isinstance(found, list) else _from_object(found) or []
    return items if _kind(items) == "messages" and any(_role(item) in ROLES for item in items) else None


def _prompt_from_json(value: Any) -> Any:
    """What `_talk_from_json` gives, or an object with the text of a prompt and beside it only numbers."""
    found = _loaded(value)
    if not isinstance(found, Mapping):
        return _talk_from_json(value)
    texts = [key for key, item in found.items() if isinstance(item, str | list | Mapping)]
    has_text = isinstance(found.get("full_text"), str) or texts in (["text"], ["content"])
    return found if has_text else _talk_from_json(value)


def _answer_from_json(value: Any) -> list[Any] | None:
    """What `_talk_from_json` gives where the assistant begins, or a list of rated answers."""
    talk, items = _talk_from_json(value), _loaded(value)
    if talk is not None and _is_answer(talk):
        return talk
    if _kind(items) not in ("messages", "objects") or not all(
        {*TEXTS_OF_ANSWERS} & {*item} for item in items
    ):
        return None
    return list(items) if any({*RATINGS} & {*item} for item in items) else None


def _loaded(value: Any) -> Any:
    """The list of objects or the object that a text is as JSON; None for any other value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[{", '{"')):
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _from_turns(value: Any) -> list[Message] | None:
    """The messages of a list with a question and an answer in each object; None for any other value."""
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        return None
    keys = next((two for two in TURNS if all({*two} <= turn.keys() for turn in value)), ())
    texts = [turn[key] for turn in value for key in keys]
    return _by_turns(texts) if texts and all(isinstance(text, str) for text in texts) else None


def _from_object(value: Any) -> list[Any] | None:
    """A message as a list of one; {"messages": …} without tools as that list; None for any other value."""
    if not isinstance(value, Mapping):
        return None
    holds_more = any(
        _kind(part) in ("messages", "objects")
        for key, part in value.items()
        if key not in (*WHAT, "tool_calls")
    )
    if _kind([value]) == "messages" and not holds_more:  # the replies of a tree, say
        return [value]
    return (
        value["messages"] if _kind(value.get("messages")) == "messages" and not value.get("tools") else None
    )


def _from_texts(value: Any) -> list[Message] | None:
    """The messages of texts by the user and the assistant in turn; None for any other value."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return None
    return _by_turns(value)


def _by_turns(texts: Iterable[str]) -> list[Message]:
    """The messages of texts by the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


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
        values = (line.values.get(name) for line in itertools.islice(table.lines, SAMPLE))
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
        return "nothing" if isinstance(value, list) else type(value).__name__
    if all(isinstance(item, Mapping) for item in value):
        keys = set(value[0])
        is_talk = {"role", "content"} <= keys or {"from", "value"} <= keys
        if not is_talk and keys & {*WHO} and keys & {*WHAT}:  # else rated answers, or sources
            is_talk = all(_role(item) in ROLES and not {*RATINGS} & item.keys() for item in value)
        return "messages" if is_talk else "objects"
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
    columns = {name for *_, table in tables for name in table.columns}
    if data.format is not None and own is None and data.format not in (*FORMATS, *columns):
        raise UserError(
            f"data.format={data.format} is no column of the data; give a column with a vote or score, "
            f"{', '.join(FORMATS)}, or module:function"
        )
    named = (data.columns.prompt, data.columns.completion, data.columns.chosen, data.columns.rejected)
    for role, split, given in _joined(tables):
        table = given if own is not None else _unfolded(given, named)
        alike = [other for _, _, other in tables if {*other.columns} == {*table.columns}]
        shape = _Shape(table, kinds_of(table, named), data, chat, alike)
        try:
            readings = [Reading("sft", "no rows", table, table.columns)]
            if len(table.lines):
                readings = shape.by_function(own) if own is not None else shape.readings(role)
            found += [(split, _as_role(reading, role)) for reading in readings]
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))
    return found


def _joined(
    tables: Sequence[tuple[Role | None, Split, Table]],
) -> list[tuple[Role | None, Split, Table]]:
    """Tables of one role, split and set of columns as one: the answers to a prompt may be in several."""
    groups: dict[tuple[Any, ...], list[Table]] = {}
    for role, split, table in tables:
        groups.setdefault((role, split, frozenset(table.columns)), []).append(table)
    return [(role, split, _as_one(some)) for (role, split, _), some in groups.items()]


def _as_one(tables: Sequence[Table]) -> Table:
    first, *others = tables
    if not others:
        return first
    lines = Lines(
        lambda: itertools.chain.from_iterable(table.lines for table in tables),
        sum(len(table.lines) for table in tables),
    )
    return Table(f"{first.name} and {len(others)} more", first.columns, lines)


def _as_role(reading: Reading, role: Role | None) -> Reading:
    """The reading in the role that the file's name gives: demonstrations serve as prompts with references."""
    fits = role in (None, reading.role) or (role, reading.role) == ("prompts", "sft")
    if fits or not len(reading.table.lines):
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
        found = self.found() or self.in_lower_case().found()
        allowed = {role, "sft"} if role == "prompts" else {role}
        found = [one for one in found if one.role in allowed] or found[:1] if role else found
        if not found:
            named = [f"{name} ({kind})" for name, kind in self.kinds.items()]
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            has = f"{', '.join(named[:MOST_NAMED])}{more}" if named else "none"
            raise UserError(
                f"{self.table.name} has no known shape; its columns are {has}. Name them in data.columns "
                "(prompt, completion, chosen, rejected; keep: columns beside prompts alone), or give "
                "data.format: a column with a vote or score, or my_module:rows, a function that gets a "
                "record and returns a row. A file that holds no rows must not be in the folder"
            )
        has_two = role is None and found[0].rule.startswith("question and answer")
        found = found[: 2 if has_two else 1]
        for reading in found:
            if twice := [name for name, count in Counter(reading.used).items() if count > 1]:
                raise UserError(
                    f"{self.table.name} would be read as {reading.rule}: {twice[0]!r} in two roles; name the "
                    "column of each in data.columns (prompt, completion, chosen, rejected, system)"
                )
        return found

    def found(self) -> list[Reading]:
        """The readings by all rules that fit, the first one first."""
        return [reading for kind in _KINDS for reading in kind(self)]

    def in_lower_case(self) -> _Shape:
        """The same with headers in lower case, as of `Question,Answer`; records keep the given keys too."""
        names = {name: name.strip().casefold() for name in self.table.columns}
        if len({*names.values()}) < len(names):
            return self

        def lines() -> Iterator[Line]:
            for line in self.table.lines:
                lowered = {names.get(name, name): value for name, value in line.values.items()}
                yield Line(line.where, {**line.values, **lowered})

        table = Table(self.table.name, tuple(names.values()), Lines(lines, len(self.table.lines)))
        kinds = {names[name]: kind for name, kind in self.kinds.items()}
        return replace(self, table=table, kinds=kinds, alike=[table])

    @property
    def columns(self) -> Columns:
        return self.data.columns

    @cached_property
    def sample(self) -> list[Line]:
        """The first lines."""
        return list(itertools.islice(self.table.lines, SAMPLE))

    def first(self, names: Iterable[str], kind: str = "text") -> str | None:
        """The first of these columns that has the type."""
        return next((name for name in names if self.kinds.get(name) == kind), None)

    def is_number(self, name: str) -> bool:
        """Whether most values of a column are numbers, which are texts in a CSV file."""
        values = [value for line in self.sample if (value := line.values.get(name)) not in (None, "")]
        return 2 * sum(_number(value) is not None for value in values) > len(values)

    def is_flag(self, name: str) -> bool:
        """Whether a column says yes or no in all rows that say anything: as true, 1 or 1.0."""
        values = [value for line in self.sample if (value := line.values.get(name)) not in (None, "")]
        return bool(values) and all(_flag(value) is not None for value in values)

    @cached_property
    def prompt(self) -> str | None:
        """The column of the prompt: texts or messages."""
        names = (self.columns.prompt, *(name for name in PROMPTS if name != "history"), "history")
        known = next((name for name in names if self.kinds.get(name) in ("text", "messages")), None)
        beside = (
            name
            for name, answers in ASKED_BY.items()
            if self.kinds.get(name) in ("text", "messages") and not {*answers}.isdisjoint(self.kinds)
        )
        unanswered = (name for name, kind in self.kinds.items() if kind == "messages" and self.asks(name))
        return known or next(beside, None) or next(unanswered, None)

    def asks(self, name: str) -> bool:
        """Whether every conversation of a column ends with the user's message."""
        talks = [talk for line in self.sample if (talk := line.values.get(name))]
        return all(isinstance(talk, list) and _role(talk[-1]) == "user" for talk in talks)

    def given(self, text: Any) -> Any:
        """A prompt or answer as it is, or as messages where its text is a marked dialogue."""
        if not isinstance(text, str) or not self.is_dialogue:
            return text
        return dialogue(text) or [{"role": "user", "content": text}]

    @cached_property
    def is_dialogue(self) -> bool:
        """Whether prompts, or answers of pairs without one, are marked dialogues for a chat template."""
        name = self.prompt or self.columns.chosen
        texts = (line.values.get(name) for table in self.alike for line in table.lines)
        return self.chat and any(isinstance(text, str) and dialogue(text) for text in texts)

    def asked(self, values: Values, prompt: str | None = None) -> Any:
        """The whole prompt of a record: text or messages, an input below it, a system message before it."""
        text = values[prompt or self.prompt or "prompt"]
        if isinstance(text, Mapping):
            if lost := [key for key, value in text.items() if _kind(value) in ("messages", "objects")]:
                raise Unusable("malformed", f"the object that is the prompt holds {', '.join(lost)} too")
            text = next(text[key] for key in TEXT_KEYS if isinstance(text.get(key), str))
        below = self.context and values.get(self.context)
        if isinstance(text, str) and below is not None and str(below or "").strip():
            text = f"{text}\n{below}"
        text = self.given(text)
        if self.has_history and isinstance(text, str):
            text = [*_before(values.get("history")), {"role": "user", "content": text}]
        system = self.system_before(text, values)
        if isinstance(text, str) and not self.chat:
            return f"{system}\n\n{text}" if system else text
        if isinstance(text, str) and self.system is not None:
            text = [{"role": "user", "content": text}]
        return [{"role": "system", "content": system}, *text] if system else text

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
        if not isinstance(turns, list) or not turns or _role(turns[0]) != "system":
            return system
        first = message("the conversation", 0, turns[0])["content"]
        if first.split() != system.split():
            both = f"{self.system} is {system!r:.60}, and the conversation begins with the system message"
            raise Unusable("malformed", f"{both} {first!r:.60}: give one of them, or the same text in both")
        return None

    @cached_property
    def has_history(self) -> bool:
        """Whether `history` holds the turns before the prompt, as (question, answer) each."""
        if "history" not in self.kinds or self.prompt == "history":
            return False
        return any(_before(line.values.get("history")) for line in self.table.lines)

    @cached_property
    def context(self) -> str | None:
        """The column of what stands below the prompt."""
        named = (self.prompt, self.columns.completion, self.columns.chosen, self.columns.rejected)
        names = (name for name in CONTEXTS if name not in named)
        return next((name for name in names if self.kinds.get(name) in ("text", "number")), None)

    @cached_property
    def system(self) -> str | None:
        """The column of a system message."""
        return self.columns.system or self.first(SYSTEMS)

    @property
    def beside(self) -> tuple[str | None, ...]:
        """The columns that `asked` reads beside the prompt: a rule that calls it uses them."""
        return self.context, self.system, "history" if self.has_history else None

    @property
    def has_sides(self) -> bool:
        """Whether columns are called after the two sides of a pair, which are no demonstrations."""
        return any(name.startswith(("chosen", "reject")) for name in self.kinds)

    def answers_unread(self, *used: str | None) -> bool:
        """Whether a column that no rule has read looks like an answer: then this is another shape."""
        return any(LIKE_ANSWERS.match(name) for name, kind in self.kinds.items() if name not in used)

    def unchosen(self, values: Values) -> str | None:
        """Why a pair of a record is none, by the columns beside it: a tie, or nobody chose a side."""
        return next((why for name in self.verdicts if (why := _unchosen(name, values.get(name)))), None)

    @cached_property
    def verdicts(self) -> list[str]:
        """The columns that `unchosen` reads."""
        sides = self.columns.prompt, self.columns.chosen, self.columns.rejected, self.columns.completion
        return [name for name in self.kinds if VERDICT.fullmatch(name.casefold()) and name not in sides]

    def rows(
        self, role: Role, rule: str, used: Iterable[str | None], convert: Callable[[Values], Row]
    ) -> list[Reading]:
        """The reading that converts each record; one that raises LeftOut is left out and named."""

        def made() -> Iterator[tuple[Line, Any]]:
            for line in self.table.lines:
                why = self.unchosen(line.values) if role == "preferences" else None
                yield line, why or _converted(convert, line)

        return self.reading(role, rule, used, made)

    def reading(
        self,
        role: Role,
        rule: str,
        used: Iterable[str | None],
        made: Callable[[], Iterable[tuple[Line, Any]]],
    ) -> list[Reading]:
        keep = tuple(dict.fromkeys(name.split(".")[0] for name in self.columns.keep))

        def rows() -> Iterator[tuple[Line, Any]]:
            for line, row in made():
                if not isinstance(row, dict):
                    yield line, row
                    continue
                names = (*keep, "tools") if line.values.get("tools") else keep
                yield line, {name: line.values[name] for name in names if name in line.values} | row

        extra = ("split",) if any(split_of(line.values) for line in self.sample) else ()
        taken = [name for name in used if name]
        if role == "preferences" and (beside := [name for name in self.verdicts if name not in taken]):
            rule = f"{rule}; left out: what {' or '.join(beside)} calls a tie or unchosen"
            taken += beside
        taken += [name for name in dict.fromkeys((*keep, *extra, "tools")) if name not in taken]
        return [Reading(role, rule, self.table, tuple(taken), rows)]

    def by_function(self, own: Callable[[Row], Any]) -> list[Reading]:
        """The rows of a function of the user's: a record goes in, a row, several or None come out."""
        path = str(self.data.format)

        def made() -> Iterator[tuple[Line, Any]]:
            for line in self.table.lines:
                name = f"{line.where}: data.format: {path}"
                returned = call(name, own, dict(line.values))
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

        some = (row for _, row in made() if isinstance(row, dict))
        names = {name for row in itertools.islice(some, SAMPLE) for name in row}
        role: Role = "preferences" if "chosen" in names else "sft" if names - {"prompt"} else "prompts"
        return self.reading(role, f"by {path}", self.table.columns, made)


def _converted(convert: Callable[[Values], Any], line: Line) -> Any:
    """What `convert` makes of a record; why it makes no row, as text; or its fault."""
    try:
        return convert(line.values)
    except LeftOut as reason:
        return str(reason)
    except Unusable as fault:
        return fault
    except KeyError as missing:
        return Unusable("malformed", f"has no {missing}")
    except (
        AttributeError,
        TypeError,
        ValueError,
        IndexError,
        StopIteration,
    ) as error:  # a value of another type than in the other rows
        what = str(error) or type(error).__name__
        return Unusable("malformed", f"has values of another type: {what}")


def split_of(values: Values) -> Split | None:
    """The split that a row names in the column `split`: valid1 and test_prefs are known too."""
    name = values.get("split")
    return SPLIT_NAMES.get(re.split(r"[-_\d]", name.casefold())[0]) if isinstance(name, str) else None


def _before(history: Any) -> list[Message]:
    """The messages of a list of (question, answer); empty for any other value."""
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in history
    ):
        return []
    return _by_turns(itertools.chain.from_iterable(history))


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


PAIRED = {
    "best_worst": "the best and the worst answer",
    "best_each": "the best and each other answer",
    "adjacent": "answers that follow each other",
    "all": "every two answers",
}


def _paired(data: Data, default: str = "best_worst") -> str:
    """Which answers to a prompt make pairs, for people."""
    return f"{PAIRED[data.pairs or default]} to a prompt (data.pairs)"


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


def _is_good(value: Any) -> bool | None:
    """Whether a label says good; None for one that says nothing."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).casefold()
    return True if text in GOOD else False if text in BAD else None


def _flag(value: Any) -> bool | None:
    """`_is_good` of a number too that is a text, as `1.0` in a CSV file."""
    number = _number(value)
    return _is_good(value if number is None else number)


def _unchosen(name: str, value: Any) -> str | None:
    """Why a verdict is for neither side: a word, a flag of a tie, a strength of 0; None if it is not."""
    said = " ".join(re.split(r"[\W_]+", value.casefold())).strip() if isinstance(value, str) else ""
    known = name.casefold()
    is_tie = _number(value) == 0 if known in SIGNED else known.endswith(("tie", "tied")) and _flag(value)
    if is_tie or TIE.fullmatch(said):
        return "a tie"
    is_nobody = said == "none" and not known.endswith(("status", "label"))
    return f"{name} is {value!r}" if is_nobody or UNCHOSEN.fullmatch(said) else None


def _unpaired(shape: _Shape) -> list[Reading]:
    """Answers marked good or bad: never demonstrations unless somebody says so."""
    prompt, answer = shape.prompt, shape.first((shape.columns.completion, *ANSWERS))
    answer = answer or shape.first((shape.columns.completion, *ANSWERS), "messages")
    talk = shape.first(shape.kinds, "messages") if answer is None else None
    flags = (name for name, kind in shape.kinds.items() if kind == "flag")
    named = [name for name in LABELS if name in shape.kinds and name not in (prompt, answer)]
    label = next(iter((*named, *(flags if talk is None else ()))), None)
    if label is None or (talk is None and None in (prompt, answer)) or shape.data.format == "demonstrations":
        return []
    if shape.data.format in shape.kinds and _rated_rows(shape):
        return []
    labels = [_is_good(line.values.get(label)) for line in shape.table.lines]
    if any(
        good is None and line.values.get(label) is not None
        for good, line in zip(labels, shape.table.lines, strict=True)
    ):
        return []
    used = (prompt, answer, talk, label, *(shape.beside if talk is None else ()))

    def parts(values: Values) -> tuple[Any, Any]:
        if talk is not None:
            return values[talk][:-1], values[talk][-1:]
        return shape.asked(values), values[str(answer)]

    def good(values: Values) -> Row:
        if not _is_good(values[label]):
            raise LeftOut(f"{label} is {'null' if values[label] is None else 'false'}")
        asked, given = parts(values)
        return {"prompt": asked, "completion": given}

    def rated(values: Values) -> tuple[Any, float | None, Any]:
        asked, given = parts(values)
        is_good = _is_good(values[label])
        return asked, None if is_good is None else float(is_good), given

    match shape.data.format:
        case "good_answers":
            return shape.rows("sft", f"the answers whose {label} is true", used, good)
        case "label_pairs":
            rule = f"pairs of a good and a bad answer by {label}"
            return shape.reading("preferences", rule, used, lambda: _by_prompt(shape, rated))
    raise UserError(
        f"{shape.table.name}: the column {label!r} marks {labels.count(False)} of {len(labels)} rows as "
        "false, so these single answers are neither demonstrations nor pairs. Set data.format to label_pairs "
        "(a good and a bad answer to a prompt become a pair), good_answers (those that are true are "
        f"demonstrations), or demonstrations (all of them are, and {label!r} says something else)"
    )


def _by_prompt(
    shape: _Shape, rated: Callable[[Values], tuple[Any, float | None, Any]]
) -> Iterator[tuple[Line, Any]]:
    """Pairs of the answers that several rows give to a prompt, at the place of its first row.

    `rated` gives prompt, rating and answer of a record.
    """
    groups: dict[str, list[tuple[Line, Any]]] = {}
    for line in shape.table.lines:
        made = shape.unchosen(line.values) or _converted(rated, line)
        if isinstance(made, tuple):
            groups.setdefault(repr(made[0]), []).append((line, made))
        else:
            yield line, made
    for group in groups.values():
        found = [(score, answer) for _, (_, score, answer) in group if score is not None]
        try:
            pairs = _ordered(found, shape.data)
        except LeftOut as reason:
            scores = " and ".join(f"{score:g}" for score, _ in found)
            why = "its prompt has one answer only" if len(found) < 2 else f"{reason} ({scores})"
            yield from ((line, why) for line, _ in group)
            continue
        first, (asked, *_) = group[0]
        yield from ((first, _pair(asked, chosen, rejected)) for chosen, rejected in pairs)
        yield from ((line, "it has no rating") for line, (_, score, _) in group if score is None)


def _pairs(shape: _Shape) -> list[Reading]:
    """chosen and rejected, with a prompt or with the start that both have."""
    named = ((shape.columns.chosen, shape.columns.rejected), *SIDES)
    sides = next((two for two in named if {*two} <= shape.kinds.keys()), named[0])
    if {shape.kinds.get(side) for side in sides} - {"text", "messages"}:
        return []
    chosen, rejected = sides
    prompt, answers = shape.prompt, (line.values.get(chosen) for line in shape.sample)
    if shape.kinds[chosen] == "messages" and shape.columns.prompt not in shape.kinds:
        answers_only = all(_is_answer(answer) for answer in answers)
        prompt = (prompt or shape.first(TALKS, "messages")) if answers_only else None

    def convert(values: Values) -> Row:
        sides = values[chosen], values[rejected]
        if prompt is not None:
            return _pair(shape.asked(values, prompt), *sides)
        if all(isinstance(side, list) for side in sides):
            return {"chosen": sides[0], "rejected": sides[1]}
        turns = [dialogue(str(side)) for side in sides]
        if not all(turns):
            raise Unusable("malformed", "has no prompt, and its answers are no dialogues")
        return {"chosen": turns[0], "rejected": turns[1]} if shape.chat else _cut(*map(str, sides))

    texts = [str(line.values[chosen]) for line in shape.sample if line.values.get(chosen)]
    if prompt is None and shape.kinds[chosen] == "text" and not all(dialogue(text) for text in texts):
        return []
    start = "the start that both have" if prompt is None else prompt
    rule = f"pairs: prompt = {start}, chosen = {chosen}, rejected = {rejected}"
    beside = shape.beside if prompt is not None else ()
    return shape.rows("preferences", rule, (prompt, chosen, rejected, *beside), convert)


def _is_answer(value: Any) -> bool:
    """Whether messages begin with one that is not the user's or the system's."""
    return isinstance(value, list) and bool(value) and _role(value[0]) not in ("", "user", "system")


def _role(turn: Any) -> str:
    """Whose message it is, as chat templates call it; empty for what is none."""
    who = (turn[key] for key in WHO if key in turn) if isinstance(turn, Mapping) else ()
    role = str(next(iter(who), "")).casefold()
    return OTHER_NAMES.get(role, role)


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
    if first.removesuffix(a) + THIRD[a] in shape.kinds:
        return []  # of three answers a pair would be a guess
    asked = shape.data.format if shape.data.format in shape.kinds else None
    vote = asked or next((name for name in VOTES if name in shape.kinds), None)
    signed = next(filter(shape.is_number, SIGNED), None)
    called = zip(_names(first, a), _names(second, b), strict=True)
    each = ((f"winner_{one}", f"winner_{two}") for one, two in called)
    flags = next((two for two in each if all(map(shape.is_flag, two))), ())
    is_shp = first == "human_ref_A" and "labels" in shape.kinds
    scores = next((s for s in SCORES if shape.is_number(s + a) and shape.is_number(s + b)), None)
    prompt = shape.prompt or next(
        (name for name in PROMPTS if shape.kinds.get(name) == "object" and _text_of(shape, name)), None
    )
    one_by_one = (f"{scores}{a}", f"{scores}{b}") if scores else flags
    rated_by = ("labels",) if is_shp else (vote,) if vote else (signed,) if signed else one_by_one
    if not rated_by:
        return []
    if prompt is None and signed is not None and shape.kinds.get("context") == "messages":
        prompt = "context"

    def is_first(values: Values) -> bool:
        if is_shp:
            return _is_first(values["labels"], "labels", ("1", "true"), ("0", "false"))
        if vote is not None:
            return _is_first(values[vote], vote, _names(first, a), _names(second, b))
        if rated_by == flags:
            wins = [_flag(values[name]) for name in flags]
            if None in wins or all(wins):
                raise Unusable("malformed", f"{' and '.join(flags)} name no winner and no tie")
            return _is_first("tie" if not any(wins) else int(bool(wins[0])), flags[0], ("1",), ("0",))
        if signed is not None:
            strength = float(values[signed] or 0)
            return _is_first((strength < 0) - (strength > 0) or "tie", signed, ("1",), ("-1",))
        one, two = (_number(values[f"{scores}{suffix}"]) for suffix in (a, b))
        if one is None or two is None:
            raise Unusable("malformed", f"{scores}{a} or {scores}{b} is no finite number")
        if abs(one - two) <= shape.data.margin:
            raise LeftOut(
                f"a tie: both scores are {one:g}" if one == two else f"the scores are {one:g} and {two:g}"
            )
        return one > two

    judged = (_converted(is_first, line) for line in shape.table.lines if not shape.unchosen(line.values))
    strange = [one for one in judged if isinstance(one, Unusable)]
    if vote is not None and strange:
        raise UserError(
            f"{shape.table.name}: {strange[0]}, as in {len(strange)} row(s); write the column as {a} or {b} "
            "(or tie), or give data.format: my_module:rows, a function that gets a record and returns a row"
        )

    texts = (str(prompt), first, second)
    given = [own for line in shape.sample if all(own := [line.values.get(name) for name in texts])]
    in_lists = sum(None not in map(_turns, own) for own in given)
    has_turns = bool(flags) and 2 * in_lists > len(given)

    def convert(values: Values) -> Row:
        better = is_first(values)
        if has_turns:
            values = {**values, **{name: _only_turn(name, values[name]) for name in texts}}
        chosen, rejected = (values[name] for name in ((first, second) if better else (second, first)))
        if isinstance(chosen, list):
            turn = int(values.get("turn") or 1)
            chosen, rejected = chosen[: 2 * turn], rejected[: 2 * turn]
            if chosen[:-1] != rejected[:-1]:
                raise LeftOut(f"turn {turn}: the first answers differ, so the prompts differ")
            return {"chosen": chosen, "rejected": rejected}
        return _pair(shape.asked(values, prompt), chosen, rejected)

    def made() -> Iterator[tuple[Line, Any]]:
        seen = set[bytes]()
        for line in shape.table.lines:
            row = shape.unchosen(line.values) or _converted(convert, line)
            if isinstance(row, dict):
                key = digest(repr(row))
                row = "the same pair as an earlier row, by another judge" if key in seen else row
                seen.add(key)
            yield line, row

    by = "labels (1: A is chosen)" if is_shp else " and ".join(rated_by)
    beside = shape.beside if shape.kinds[first] == "text" else ()
    used = (
        prompt,
        first,
        second,
        *rated_by,
        *(("winner_tie",) if rated_by == flags else ()),
        "turn",
        *beside,
    )
    rule = f"pairs of {first} and {second} by {by}, prompt = {prompt}"
    return shape.reading("preferences", rule, used, made)


def _names(column: str, suffix: str) -> tuple[str, ...]:
    """What a vote may call an answer: its letter or number, its column, or its model."""
    name = suffix.strip("_").casefold()
    kinds = ("model", "response", "answer", "output", "completion", "assistant", "chat", "summary")
    return (name, column.casefold(), *(f"{kind}_{name}" for kind in kinds))


def _is_first(value: Any, vote: str, first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a vote is for the first answer.

    Raises:
        LeftOut: for a tie.
        Unusable: for another value.
    """
    name = str(int(value) if isinstance(value, float) and value.is_integer() else value).casefold().strip()
    if value in (None, ""):
        raise LeftOut(f"{vote} is empty")
    if why := _unchosen(vote, name):
        raise LeftOut(why)
    if name in first or name in second:
        return name in first
    raise Unusable("malformed", f"{vote} is {value!r}, which names none of the two answers")


def _turns(value: Any) -> list[Any] | None:
    """The texts and nulls of a list that is JSON in a text (the Chatbot Arena's); None for another value."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or not all(isinstance(text, str | None) for text in found):
        return None
    return found


def _only_turn(name: str, value: Any) -> str:
    """The text of `_turns` where there is one.

    Raises:
        LeftOut: for several turns, because later prompts hold other answers, and for null.
        Unusable: if the value is no such list.
    """
    found = _turns(value or "[]")
    if found is None:
        raise Unusable("malformed", f"{name} is no list of turns, as it is in other rows")
    if len(found) > 1:
        raise LeftOut(f"{len(found)} turns: the first answers differ, so the later prompts differ")
    if not found or found[0] is None:
        raise LeftOut(f"{name} has no text")
    return str(found[0])


def _text_of(shape: _Shape, column: str) -> bool:
    """Whether a column of objects has a text, such as question.full_text."""
    values = (line.values.get(column) for line in shape.table.lines)
    first = next((value for value in values if isinstance(value, Mapping)), {})
    return any(isinstance(first.get(key), str) for key in TEXT_KEYS)


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


Rated = tuple[Any, list[tuple[float, Any]]]
"""The prompt of a record, and (score, answer) of each answer that has one; a rank is a score below zero."""


def _rated_objects(shape: _Shape) -> list[Reading]:
    """A list of objects, each an answer with a rank or a score."""
    found = next(_objects(shape), None)
    if found is None:
        return []
    name, text, rating, asked = found

    def rated(values: Values) -> Rated:
        sign, items = -1 if rating == "rank" else 1, values.get(name) or []
        prompt = shape.given(_question(items[0])) if asked == name and items else shape.asked(values)
        return prompt, [(sign * n, one[text]) for one in items if (n := _number(one.get(rating))) is not None]

    rule = f"pairs of {name} by {rating}, {_paired(shape.data)}; prompt = {asked}"
    used = (name,) if asked == name else (name, asked, *shape.beside)
    return shape.reading("preferences", rule, used, lambda: _from_list(shape, rated))


def _objects(shape: _Shape) -> Iterator[tuple[str, str, str, str]]:
    """The columns of rated objects: name, the keys of text and rating, and the column of the prompt."""
    for name in (name for name, kind in shape.kinds.items() if kind == "objects"):
        given: Iterable[Any] = (line.values.get(name) for line in shape.sample)
        items = next(value for value in given if _kind(value) == "objects")
        text = next((key for key in TEXTS_OF_ANSWERS if isinstance(items[0].get(key), str)), None)
        rating = next((key for key in RATINGS if any(key in item for item in items)), None)
        asked = shape.prompt or (name if _question(items[0]) else None)
        if text is not None and rating is not None and asked is not None:
            yield name, text, rating, asked


def _question(item: Values) -> str | None:
    """The prompt that an answer holds itself."""
    asked = next((item[key] for key in PROMPTS if key in item), None)
    if isinstance(asked, Mapping):
        asked = next((asked[key] for key in ("full_text", "text", "content") if key in asked), None)
    return asked if isinstance(asked, str) else None


def _rated_texts(shape: _Shape) -> list[Reading]:
    """A list of answers beside a list of their ranks or scores."""
    lists = [name for name, kind in shape.kinds.items() if kind == "list"]
    answers = next((name for name in lists if name.removesuffix("s") in LISTED_ANSWERS), None)
    ratings = ("rank", "ranks", *SCORES, *(f"{name}s" for name in SCORES))
    rating = next((name for name in lists if name in ratings), None)
    has_another = shape.first((shape.columns.completion, *ANSWERS)) or "messages" in shape.kinds.values()
    if answers is None or rating is None or shape.prompt is None or has_another:
        return []
    given = [some for line in shape.sample if isinstance(some := line.values.get(answers), list)]
    if not all(isinstance(text, str) for some in given for text in some):
        return []

    def rated(values: Values) -> Rated:
        sign, texts, numbers = -1 if rating.startswith("rank") else 1, values[answers], values[rating]
        if len(texts) != len(numbers) or not all(isinstance(text, str) for text in texts):
            raise Unusable("malformed", f"{answers} and {rating} are no texts with a number each")
        both = zip(texts, numbers, strict=True)
        return shape.asked(values), [(sign * n, text) for text, x in both if (n := _number(x)) is not None]

    rule = f"pairs of {answers} by {rating}, {_paired(shape.data)}; prompt = {shape.prompt}"
    used = (answers, rating, shape.prompt, *shape.beside)
    return shape.reading("preferences", rule, used, lambda: _from_list(shape, rated))


def _from_list(shape: _Shape, rated_of: Callable[[Values], Rated]) -> Iterator[tuple[Line, Any]]:
    """The pairs of each record, whose prompt and rated answers `rated_of` gives."""

    def pairs(values: Values) -> list[Row]:
        prompt, rated = rated_of(values)
        if len(rated) == 2 and rated[0][0] == rated[1][0]:
            raise LeftOut(f"a tie: both scores are {rated[0][0]:g}")
        return [_pair(prompt, *pair) for pair in _ordered(rated, shape.data)]

    for line in shape.table.lines:
        made = shape.unchosen(line.values) or _converted(pairs, line)
        yield from ((line, row) for row in made) if isinstance(made, list) else [(line, made)]


def _rated_rows(shape: _Shape) -> list[Reading]:
    """An answer and its rank or score per row; those to one prompt become pairs."""
    prompt, answer = shape.prompt, shape.first((shape.columns.completion, *LISTED_ANSWERS))
    rating = next(filter(shape.is_number, (shape.data.format or "", *RATINGS)), None)
    if prompt is None or answer is None or rating is None:
        return []
    asked = [repr(_converted(shape.asked, line)) for line in shape.table.lines]
    if len(set(asked)) == len(asked):
        return []  # one answer to each prompt: the score is a property of a demonstration

    def rated(values: Values) -> tuple[Any, float | None, Any]:
        number = _number(values[rating])
        return shape.asked(values), -number if number and rating == "rank" else number, values[answer]

    rule = f"pairs of the rows that have the same {prompt}, by {rating}, {_paired(shape.data)}"
    used = (prompt, answer, rating, *shape.beside)
    return shape.reading("preferences", rule, used, lambda: _by_prompt(shape, rated))


def _tree(shape: _Shape) -> list[Reading]:
    """A message per row, with its parent: ranked answers to the same message become pairs."""
    if [shape.kinds.get(name) for name in ("message_id", "parent_id", "text", "role")] != ["text"] * 4:
        return []

    def made() -> Iterator[tuple[Line, Any]]:
        by_id, answers = dict[str, Line](), dict[str, list[Line]]()
        for line in shape.table.lines:
            if all(isinstance(line.values.get(key), str) for key in ("message_id", "text", "role")):
                by_id[line.values["message_id"]] = line
            else:
                yield line, Unusable("malformed", "has no message_id, text or role")
        for line in by_id.values():
            parent = line.values.get("parent_id")
            if line.values["role"] != "assistant":
                continue
            if line.values.get("deleted"):
                yield line, "it is deleted"
            elif parent in by_id:
                answers.setdefault(str(parent), []).append(line)
            else:
                yield line, "the message that it answers is not here"
        for parent, lines in answers.items():
            path, at = list[Message](), by_id.get(parent)
            while at is not None and len(path) <= len(by_id):
                role = "assistant" if at.values["role"] == "assistant" else "user"
                path.append({"role": role, "content": at.values["text"]})
                at = by_id.get(str(at.values.get("parent_id")))
            if at is not None:
                loop = Unusable("malformed", f"the parents of {parent} form a circle")
                yield from ((line, loop) for line in lines)
                continue
            ranks = [(_number(line.values.get("rank")), line.values["text"]) for line in lines]
            rated = [(-rank, text) for rank, text in ranks if rank is not None]
            try:
                if len(rated) < 2:
                    few = "has no rank" if not rated else "is alone"
                    raise LeftOut(f"the only answer of its message {few}")
                pairs = _ordered(rated, shape.data, "best_each")
            except LeftOut as reason:
                yield from ((line, str(reason)) for line in lines)
                continue
            prompt = path[::-1] if shape.chat or len(path) > 1 else path[0]["content"]
            yield from ((lines[0], _pair(prompt, *pair)) for pair in pairs)

    which = _paired(shape.data, "best_each")
    rule = f"pairs of the ranked answers to a message, {which}; prompt = the path from the root"
    return shape.reading(
        "preferences", rule, ("message_id", "parent_id", "text", "role", "rank", "deleted"), made
    )


def _solutions(shape: _Shape) -> list[Reading]:
    """Solutions whose last line is #### and the answer: demonstrations, and prompts with the answer."""
    prompt, answer = shape.first(PROMPTS), shape.first(ANSWERS)
    if prompt is None or answer is None or _is_named(shape):
        return []
    texts = [str(line.values.get(answer)) for line in shape.sample]
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
    prompt, names = shape.prompt, (shape.columns.completion, *ANSWERS)
    answer = shape.first(names) or shape.first(names, "messages")
    if prompt is None or answer is None or shape.has_sides:
        return []
    below = f" and {shape.context} below it" if shape.context else ""
    rule = f"demonstrations: prompt = {prompt}{below}, completion = {answer}"

    def convert(values: Values) -> Row:
        return {"prompt": shape.asked(values), "completion": values[answer]}

    return shape.rows("sft", rule, (prompt, answer, *shape.beside), convert)


def _conversations(shape: _Shape) -> list[Reading]:
    """A conversation per row: its last message is the completion."""
    own = (shape.columns.prompt, shape.prompt)
    names = [name for name, kind in shape.kinds.items() if kind == "messages" and name not in own]
    alone = names[0] if len(names) == 1 else None
    name = next((known for known in TALKS if known in names), alone)
    rejected = shape.first(("rejected_response",))
    if name is None or (rejected is None and shape.has_sides):
        return []

    def convert(values: Values) -> Row:
        turns = values[name]
        if isinstance(turns, list) and (system := shape.system_before(turns, values)):
            turns = [{"role": "system", "content": system}, *turns]
        if rejected is None:
            if isinstance(turns[-1], Mapping) and turns[-1].get("weight") == 0:
                raise LeftOut("its last message has weight 0")
            rated = [any(turn.get(key) is not None for key in RATINGS) for turn in turns[-2:]]
            if rated == [True, True] and _role(turns[-1]) == _role(turns[-2]):
                raise Unusable(
                    "malformed", "its last messages are rated answers to one prompt, no conversation"
                )
            return {"messages": turns}
        return {
            "chosen": turns,
            "rejected": [*turns[:-1], {"role": "assistant", "content": values[rejected]}],
        }

    if rejected is not None:  # ms-swift
        rule = f"pairs: chosen = the last message of {name}, rejected = {rejected}"
        return shape.rows("preferences", rule, (name, rejected, shape.system), convert)

    rule = f"demonstrations: prompt = all of {name} but its last message, completion = the last"
    return shape.rows("sft", rule, (name, shape.system), convert)


def _prompts(shape: _Shape) -> list[Reading]:
    """Prompts alone."""
    prompt = shape.prompt
    if prompt is None or shape.answers_unread(prompt, *shape.columns.keep, "answer"):
        return []

    def convert(values: Values) -> Row:
        asked = shape.asked(values)
        if isinstance(asked, list) and asked and _role(asked[-1]) == "assistant":
            raise Unusable("malformed", f"{prompt} ends with the assistant's message, so it is no prompt")
        return {"prompt": asked}

    return shape.rows("prompts", f"prompts: prompt = {prompt}", (prompt, *shape.beside), convert)


_KINDS: Sequence[Callable[[_Shape], list[Reading]]] = (
    _pairs,
    _unpaired,
    _summaries,
    _voted,
    _rated_objects,
    _rated_texts,
    _tree,
    _rated_rows,
    _solutions,
    _instructions,
    _conversations,
    _prompts,
)

"""Recognizes the shape of a table by its columns and their types: the interpreter of shapes.yaml.

`read` tries the shapes of the user's file (`data.shapes`), then those of the table, in their order; the first
that fits is read. What is read how is said, and so is each column that is not used, and each row left out.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data.readers import cells, readings
from rlhf_tasks.data.readers.cells import BAD, GOOD, NAMES, TABLE, dialogue
from rlhf_tasks.data.readers.entries import Entry, Spec, users_entries
from rlhf_tasks.data.readers.readings import SAMPLE, Lines, Match, Reading, RoleTable, Row, Table
from rlhf_tasks.data.rows import Role
from rlhf_tasks.errors import UserError

LABEL_FORMATS = "good_answers", "label_pairs", "unpaired_labels"
FORMATS = ("demonstrations", *LABEL_FORMATS)
"""The words that `data.format` knows; else it names a column, or a function."""
FURTHER_TEXTS = {
    *(name for slot in ("context", "system") for name in NAMES[slot]),
    *(name for two in NAMES["chosen, rejected"] for name in two),
    *(
        f"{name}{end}".casefold()
        for name in NAMES["first, second"]
        for ends in TABLE["endings"]
        for end in ends[:2]
    ),
}
"""Further columns that are read as text, which may be JSON itself."""
LIKE_ANSWERS = TABLE["shapes"][-1]["unless"]["answer"]["names"]
TYPES = ("text", "messages", "objects", "list", "object", "number", "flag")
FREE = ("label", "first won, second won?")
"""They are other columns than those of the shape: a prompt that data.columns names may be called label."""
MOST_NAMED = 40  # columns in a message
PYTHON = re.compile(r"\s*\[\s*\{'\w+': ")
"""A list of dictionaries by `str`, as pandas writes it into a CSV file."""


def read(
    tables: Sequence[RoleTable], data: Data, *, chat: bool, own: Callable[[Row], Any] | None = None
) -> list[tuple[Split, Reading]]:
    """The readings of tables: one of each, or one for each role that it gives.

    Args:
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
    users = [] if data.shapes is None else users_entries(data.shapes)
    entries = [*users, *map(Entry.model_validate, TABLE["shapes"])]
    for role, split, given in _joined(tables):
        table = given if own is not None else _unfolded(given, data, users)
        try:
            several = [Reading("sft", "no rows", table, table.columns)]
            if own is not None and len(table.lines):
                several = [readings.by_function(table, data, own)]
            elif len(table.lines):
                alike = [other for _, _, other in tables if {*other.columns} == {*table.columns}]
                several = _readings(Match(table, _kinds_of(table, data), data, chat, alike), entries, role)
            found += [(split, _as_role(reading, role)) for reading in several]
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))
    return found


def _joined(tables: Sequence[RoleTable]) -> Iterator[RoleTable]:
    """Tables of one role, split and set of columns as one: the answers to a prompt may be in several."""
    groups: dict[tuple[Any, ...], list[Table]] = {}
    for role, split, table in tables:
        groups.setdefault((role, split, frozenset(table.columns)), []).append(table)
    for (role, split, _), (first, *more) in groups.items():
        parts = [table.lines for table in (first, *more)]
        lines = Lines(partial(itertools.chain.from_iterable, parts), sum(map(len, parts)))
        title = f"{first.name} and {len(more)} more" if more else first.name
        yield role, split, Table(title, first.columns, lines)


def _as_role(reading: Reading, role: Role | None) -> Reading:
    """The reading in the role that the file's name gives: demonstrations serve as prompts with references."""
    fits = role in (None, reading.role) or (role, reading.role) == ("prompts", "sft")
    if fits or not len(reading.table.lines):
        return replace(reading, role=role or reading.role)
    raise UserError(
        f"{reading.table.name} is {role} by its name, and holds {reading.rule}; rename it, or name its "
        "columns in data.columns"
    )


def _unfolded(table: Table, data: Data, users: Sequence[Entry]) -> Table:
    """The table with conversations in other forms as lists of messages."""
    columns = data.columns
    named = {
        "prompt": {columns.prompt},
        "completion": {columns.completion},
        "text": {columns.chosen, columns.rejected},
    }
    for slot, spec in (item for entry in users for item in entry.columns.items()):
        named[slot if slot in named else "text"].update(name for one in spec for name in one.listed())
    slots: dict[str, str] = {}
    for name in table.columns:
        known = name.strip().casefold()
        slots[name] = next(
            (one for one in named if known in (NAMES.get(one) or FURTHER_TEXTS) or name in named[one]), ""
        )

    def unfold(name: str, value: Any) -> Any:
        is_talk = isinstance(value, list) and name in NAMES["messages"]
        return cells.unfold(value, "messages" if is_talk else slots[name])

    shown, changed = list(itertools.islice(table.lines, SAMPLE)), list[str]()
    for name in table.columns:
        values = [value for line in shown if (value := line.values.get(name)) not in (None, "", [])]
        if values and all(isinstance(value, str) and PYTHON.match(value) for value in values):
            raise UserError(
                f"{table.name}: the column {name!r} holds lists as Python writes them ({values[0]:.60}), "
                "which is no JSON; write the file by to_json(orient='records', lines=True)"
            )
        if values and all(unfold(name, value) is not None for value in values):
            changed.append(name)

    def change(values: Mapping[str, Any]) -> dict[str, Any]:
        turned = {name: unfold(name, values.get(name)) for name in changed}
        return {name: values.get(name) if value is None else value for name, value in turned.items()}

    return table.with_values(table.columns, change) if changed else table


def _kinds_of(table: Table, data: Data) -> dict[str, str]:
    """The type that most values of each column have, by its first rows; empty columns are left out.

    Of a column that is empty there, the first value says it.
    What data.columns names is text where it is nothing that can be read: so its rows are refused one by one.
    """
    columns, kinds = data.columns, dict[str, str]()
    for name in table.columns:
        values = (line.values.get(name) for line in itertools.islice(table.lines, SAMPLE))
        counts = Counter(cells.kind(value) for value in values if value is not None and value != [])
        if counts:
            kinds[name] = counts.most_common(1)[0][0]
    late = [name for name in table.columns if name not in kinds]
    for line in itertools.islice(table.lines, SAMPLE, None) if late else ():
        found = [name for name in late if line.values.get(name) not in (None, [])]
        kinds.update((name, cells.kind(line.values[name])) for name in found)
        late = [name for name in late if name not in found]
        if not late:
            break
    for name in kinds.keys() & {columns.prompt, columns.completion, columns.chosen, columns.rejected}:
        kinds[name] = kinds[name] if kinds[name] in ("text", "messages") else "text"
    return kinds


def _readings(table: Match, entries: Sequence[Entry], role: Role | None) -> list[Reading]:
    """The reading by the first shape that fits and what is read beside it; with a role, the first of it."""
    found = _matches(table, entries) or _matches(_in_lower_case(table), entries)
    if not found:
        raise UserError(_refusal(table))
    allowed = {role, "sft"} if role == "prompts" else {role}
    match = next((one for one in found if one.role in allowed), found[0])
    also = [one for one in found if role is None and match is found[0] and one.entry.also == match.entry.name]
    several = [one.reading() for one in (match, *also)]
    if match.role == "sft" and role is None:
        _check_format(table, match, entries)
    for reading in several:
        if twice := [name for name, count in Counter(reading.used).items() if count > 1]:
            raise UserError(
                f"{reading.table.name} would be read as {reading.rule}: {twice[0]!r} in two roles; name the "
                "column of each in data.columns (prompt, completion, chosen, rejected, system)"
            )
    return several


def _check_format(table: Match, match: Match, entries: Sequence[Entry]) -> None:
    """Check that demonstrations are what `data.format` says, and no answers whose label or vote is not read.

    Raises:
        UserError: naming the label that is neither good nor bad, or what is missing.
    """
    word, name = table.data.format, table.table.name
    as_it_is = f"would be read as {match.entry.name}, all of them; data.format={word}"
    if word in table.kinds and word not in match.columns.values():
        raise UserError(f"{name} {as_it_is} is a column without a vote or score for two answers to a prompt")
    if word not in LABEL_FORMATS or match.entry.makes == "labelled":
        return
    for entry in (one.model_copy(update={"where": {}}) for one in entries if one.makes == "labelled"):
        if like := fit(table, entry):
            line, label = next(like.strange_labels(like.columns["label"]))
            raise UserError(
                f"{name} {as_it_is} wants labels, and {like.columns['label']} is {label!r} in {line.where}; "
                f"give {' or '.join(GOOD[:3])}, {' or '.join(BAD[:3])} and the like, or nothing"
            )
    raise UserError(
        f"{name} {as_it_is} wants a column of labels: {', '.join(NAMES['label'][:4])} or the like, or any of "
        "true and false. If these are demonstrations beside labels, call their file sft.jsonl"
    )


def _matches(table: Match, entries: Sequence[Entry]) -> list[Match]:
    """The first shape that fits of each role, in their order.

    Raises:
        UserError: if `data.format` has to say what labels mean, or if votes name no answer.
    """
    found: dict[Role, Match] = {}
    for entry in entries:
        match = fit(table, entry)
        if match is None or (match.role in found and entry.makes != "labelled"):
            continue
        if entry.makes == "labelled":
            by_score = (other for other in entries if "score" in other.columns)
            is_rated = table.data.format in table.kinds and any(fit(table, other) for other in by_score)
            if is_rated or table.data.format == "demonstrations":
                continue
        match.check()
        found.setdefault(match.role, match)
    return list(found.values())


def fit(table: Match, entry: Entry) -> Match | None:
    """The columns of a shape, if a table has them."""
    match = replace(table, entry=entry, columns={}, endings=())
    for slots, spec in sorted(entry.columns.items(), key=lambda one: one[0].endswith("?")):
        taken = (*match.columns.values(), match.prompt) if slots in FREE else ()
        names = find(match, slots.rstrip("?"), spec, taken)
        if not names and not slots.endswith("?"):
            return None
        match.columns |= zip(slots.rstrip("?").split(", "), names, strict=False)
    if any(find(match, slot, spec) for slot, spec in entry.unless.items()):
        return None
    return match if all(is_of(match, match.columns[slot], one) for slot, one in entry.where.items()) else None


def find(match: Match, slots: str, spec: Spec, taken: Collection[str | None] = ()) -> Sequence[str]:
    """The columns of one name or two names of ours, none of them `taken`; empty where the table has none."""
    for alternative in spec:
        types = alternative.types.split(" | ")
        for two, ends in _candidates(match, slots, alternative.names):
            is_type = (any(is_of(match, name, one) for one in types) for name in two[:2])
            if any(name in taken for name in two) or not all(is_type):
                continue
            if slots == "first, second":
                match.endings = ends
                if two[2:] and two[2] in match.kinds:
                    return ()  # of three answers a pair would be a guess
            return two[:2]
    return ()


def _candidates(match: Match, slots: str, names: Any) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """The columns that may be meant, those that params.yaml names first, and the endings of their names."""
    columns, vote = match.data.columns, match.data.format
    if names is None and slots == "prompt":
        yield from [([match.prompt], ())] if match.prompt else []
    elif isinstance(names, re.Pattern):
        yield from (([name], ()) for name in match.kinds if names.fullmatch(name))
    else:
        named: dict[str, Any] = {
            **dict.fromkeys(("completion", "response"), columns.completion),
            **dict.fromkeys(("vote", "score"), vote),
            "chosen, rejected": [columns.chosen, columns.rejected],
        }
        for name in names or [*filter(None, [named.get(slots)]), *NAMES.get(slots, [slots])]:
            if isinstance(name, list) or ", " not in slots:
                yield name if isinstance(name, list) else [name], ()
            elif "{}" in name and match.endings:
                both = [
                    readings.called(match.columns[s], e)
                    for s, e in zip(("first", "second"), match.endings, strict=False)
                ]
                yield from (([name.format(one) for one in two], ()) for two in zip(*both, strict=True))
            else:
                for ends in [match.endings] if match.endings else TABLE["endings"]:
                    yield [f"{name}{end}" for end in ends], ends


def is_of(match: Match, name: str, kind: str) -> bool:
    """Whether a column has a type of `cells.kind`, or one of these."""
    data, kinds, texts = match.data, match.kinds, match.texts(name)
    has_talks = kinds.get(name) == "messages"
    match kind:
        case "any":
            return name in kinds
        case "another":  # neither the prompt nor kept
            return name not in (match.prompt, *data.columns.keep)
        case "numbers":  # most are, perhaps as texts, as in a CSV file
            return 2 * sum(cells.number(value) is not None for value in texts) > len(texts)
        case "yes or no":  # also as 1 or 1.0
            return bool(texts) and all(cells.flag(value) is not None for value in texts)
        case "good or bad":  # true, false or null, also as words
            return next(match.strange_labels(name), None) is None
        case "conversation":  # messages that are not the prompt
            return has_talks and name not in (data.columns.prompt, match.prompt)
        case "the only conversation":
            return [name] == [one for one in kinds if is_of(match, one, "conversation")]
        case "conversations":  # messages, or texts whose turns have marks
            return has_talks or all(dialogue(str(text)) for text in texts)
        case "replies":  # messages that begin with the assistant's
            return has_talks and all(cells.is_answer(line.values.get(name)) for line in match.sample)
        case "answers":  # texts or replies, or any messages whose prompt data.columns names
            is_named = match.columns["prompt"] == data.columns.prompt
            return is_named or kinds[name] == "text" or is_of(match, name, "replies")
        case "object with a text":
            values = (line.values.get(name) for line in match.table.lines)
            first = next((value for value in values if isinstance(value, Mapping)), {})
            return kinds.get(name) == "object" and any(isinstance(first.get(k), str) for k in cells.QUESTIONS)
        case "rated answers":  # objects with a text and a rank or score
            return kinds.get(name) == "objects" and None not in match.keys_of(name)[:2]
        case "rated answers to a question":  # which they hold
            return is_of(match, name, "rated answers") and match.keys_of(name)[2] is not None
        case "lists of texts":
            lists = (value for value in texts if isinstance(value, list))
            return all(isinstance(text, str) for text in itertools.chain.from_iterable(lists))
        case "solutions":  # texts with a line that begins with ####; not if data.columns names both columns
            two = data.columns.prompt, data.columns.completion
            is_named = two != (Columns().prompt, Columns().completion) and {*two} <= kinds.keys()
            return not is_named and all(cells.FINAL.search(str(v.values.get(name))) for v in match.sample)
        case "repeated":  # by several rows, as most of its values are
            asked = (repr(readings.converted(Match.asked, match, line)) for line in match.table.lines)
            counts = Counter(asked).values()
            return 2 * sum(count for count in counts if count > 1) >= sum(counts)
    if kind not in TYPES:
        known = f"{', '.join(TYPES)}, any, numbers, or another one of rlhf_tasks/data/readers/shapes.yaml"
        raise UserError(f"data.shapes: {match.entry.name} has the type {kind!r}; give {known}")
    return kinds.get(name) == kind


def _in_lower_case(match: Match) -> Match:
    """The same with headers in lower case, as of `Question,Answer`; records keep the given keys too."""
    table, names = match.table, {name: name.strip().casefold() for name in match.table.columns}
    if len({*names.values()}) < len(names):
        return match
    lowered = table.with_values(
        tuple(names.values()), lambda values: {names.get(name, name): value for name, value in values.items()}
    )
    kinds = {names[name]: kind for name, kind in match.kinds.items()}
    own = match.data.columns
    given = own.model_dump(exclude={"keep"}, exclude_none=True)
    low = own.model_copy(update={ours: name.strip().casefold() for ours, name in given.items()})
    return Match(lowered, kinds, match.data.model_copy(update={"columns": low}), match.chat, [lowered])


def _refusal(match: Match) -> str:
    """That no shape fits, and a shape to begin with."""
    named = [f"{name} ({kind})" for name, kind in match.kinds.items()]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    texts = [
        name for name, kind in match.kinds.items() if kind in ("text", "messages") and name != match.prompt
    ]
    lists = [name for name, kind in match.kinds.items() if kind == "list"]
    answers = [name for name in texts if re.fullmatch(LIKE_ANSWERS, name)] or texts[not match.prompt :]
    prompt = match.prompt or next((name for name in texts if name not in answers), None)
    two = [name for name in answers if name not in match.verdicts]
    if len(lists) > 1:
        ours = {"answers": lists[0], "scores": lists[1]}
    elif match.verdicts and len(two) == 2:
        ours = {"first": two[0], "second": two[1], "vote": match.verdicts[0]}
    else:
        ours = dict(zip(("chosen", "rejected") if answers[1:] else ("completion",), answers, strict=False))
    columns = {"prompt": prompt, **ours}
    has = f"{', '.join(named[:MOST_NAMED]) or 'none'}{more}"
    return (
        f"{match.table.name} has no known shape; its columns are {has}. Name them in data.columns (prompt, "
        "completion, chosen, rejected; keep: columns beside prompts alone), or give data.format: a column "
        "with a vote or score, or my_module:rows, a function that gets a record and returns a row. A file "
        "that holds no rows must not be in the folder. Or write shapes.yaml with what is what, which may "
        "begin so, and set data.shapes: shapes.yaml\n"
        + readings.as_entry(match, {slot: name for slot, name in columns.items() if name})
    )

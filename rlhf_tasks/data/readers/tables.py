"""Converts the user's columns to ours: maps names, renders `messages`, and reports unusable values.

The supported conventions: plain `prompt`/`completion` and `prompt`/`chosen`/`rejected`; the same as lists
of `{role, content}` messages, also beside a prompt as text; comparisons of whole conversations, whose common
start is the prompt; and a `messages` column, whose last turn is the completion. A column `tools` goes to the
chat template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rlhf_tasks import console
from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data.chat import (
    LEADING_BLANK,
    LONE_SURROGATE,
    Message,
    Rendering,
    Unmarked,
    Unusable,
    common_start,
    message,
    plain_row,
    render_turns,
    tools_of,
)
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.columns import fault as value_fault
from rlhf_tasks.data.readers import shapes
from rlhf_tasks.data.readers.readings import Reading, RoleTable, peek, split_of
from rlhf_tasks.data.rows import (
    BATCH,
    CONVERSATION,
    SET,
    TEXTS,
    Corpus,
    Problems,
    Role,
    Row,
    Writer,
    evaluated_role,
)
from rlhf_tasks.errors import UserError

HAVE_REFERENCES = {"reference", "completion", "messages"}
"""The columns of prompts that are not alone."""
MOST_NAMED = 3  # files or places in a line of the console


class Part(NamedTuple):
    """Tables that the same settings read: all of the data, or a set of `data.mix`."""

    tables: Sequence[RoleTable]
    data: Data
    own: Callable[[dict[str, Any]], Any] | None = None
    """The function that `data.format` names."""
    name: str | None = None
    """The name of the set."""
    readings: Sequence[tuple[Split, Reading]] = ()
    """In place of tables: the rows of a function in `data.source`."""


def check_columns(parts: Sequence[Part]) -> None:
    """Check that tables have the columns of `data.columns`; a default need not be there.

    Raises:
        UserError: naming those that no table has, which its shape might read from other columns.
    """
    has = dict.fromkeys(name for part in parts for *_, table in part.tables for name in table.columns)
    if not has or any(part.own is not None for part in parts):  # a function reads what it likes
        return
    given = parts[0].data.columns.model_dump(exclude={"keep"}, exclude_defaults=True, exclude_none=True)
    if lost := [f"{ours}: {name!r}" for ours, name in given.items() if name not in has]:
        raise UserError(
            f"data.columns names what no table has ({', '.join(lost)}); the columns are "
            f"{', '.join(map(repr, has))}"
        )


def assemble(
    parts: Sequence[Part], rendering: Rendering, problems: Problems, plain: Counter[str] | None = None
) -> Corpus:
    """All tables as rows; bad lines go to `problems`, and what is read how, or not, is said.

    Tables of one role and split are joined in their order. Prompts alone have the reference None. What plain
    prompts became is counted in `plain`, by `Rendering.plain_kind`.

    Raises:
        UserError: naming every table whose shape is not known, or that lacks a column.
    """
    known = [
        (part, split, reading, *peek(reading.made()))
        for part in parts
        for split, reading in part.readings
        or shapes.read(part.tables, part.data, chat=rendering.renders_plain, own=part.own)
    ]
    for part in parts:
        _say_use([reading for owner, _, reading, *_ in known if owner is part])
    known = [one for one in known if len(one[2].table.lines)] or known  # an empty file has no role
    judged = evaluated_role({reading.role for _, _, reading, *_ in known}) if known else None
    faults = [
        fault
        for part, _, reading, names, _ in known
        if reading.role == judged and (fault := _missing_kept(reading, names, part.data.columns)) is not None
    ]
    prompts = {
        reading.table.name: bool(HAVE_REFERENCES & {*names})
        for _, _, reading, names, _ in known
        if reading.role == "prompts" and names
    }
    if {*prompts.values()} == {False, True}:
        alone = ", ".join(name for name, has_answers in prompts.items() if not has_answers)
        faults.append(f"{alone}: prompts alone, and other prompts have references: give all or none of them")
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))

    plain = Counter() if plain is None else plain
    writers, given = dict[Role, Writer](), dict[Role, list[Split]]()
    left_out, labels = dict[str, list[str]](), Counter[str]()
    total = sum(len(reading.table.lines) for _, _, reading, *_ in known)
    with console.progress("reading", total, unit="records", least=BATCH) as meter:
        for part, split, reading, names, made in known:
            writer = writers.setdefault(reading.role, Writer(reading.role))
            given.setdefault(reading.role, []).append(split)
            keep = part.data.columns.keep if reading.role == judged else ()
            own: Row = {} if part.name is None else {SET: part.name}
            sources = {name: name for name in TEXTS[reading.role]}
            if reading.role == "prompts" and "reference" not in names:
                sources["reference"] = "completion"
                if not HAVE_REFERENCES & {*names}:
                    del sources["reference"]
                    own |= {"reference": None}
            number = 0
            for number, (line, row) in enumerate(made, start=1):
                if number % BATCH == 0:
                    meter.advance(BATCH)
                if isinstance(row, str):
                    left_out.setdefault(row, []).append(line.where)
                elif isinstance(row, Unusable):
                    problems.add(line.where, line.values, row.reason, row.detail)
                else:
                    names_split = "split" in row if part.own else "split" in reading.used
                    values = row if part.own and names_split else line.values
                    place = split_of(values)
                    try:
                        if place is None and names_split and (named := values.get("split")):
                            raise Unusable("malformed", f"split is {named!r}; give train, validation or test")
                        further = own | ({KEY: _select(row, keep)} if keep else {})
                        null_side = _null_side(row, sources, part.data)
                        present = {ours: theirs for ours, theirs in sources.items() if ours != null_side}
                        turns = _render(row, present, rendering, reading)
                    except Unusable as fault:
                        problems.add(line.where, row, fault.reason, fault.detail)
                        continue
                    if null_side is not None:
                        labels[null_side] += 1
                        further |= {null_side: None}
                    if all(isinstance(row.get(name), str) for name in present.values()):
                        plain[rendering.plain_kind(row["prompt"])] += 1
                    for turn in turns:
                        writer.add(place or split, {**turn, "source": line.where, **further})
            meter.advance(number % BATCH)
    for why, places in left_out.items():
        more = ", …" if len(places) > MOST_NAMED else ""
        console.say(f"  {len(places)} row(s) make no row: {why} ({', '.join(places[:MOST_NAMED])}{more})")
    if labels:
        good, bad = labels["rejected"], labels["chosen"]
        console.say(f"  unpaired labels: {good:,} good and {bad:,} bad; dpo.loss: kto alone learns from both")
    say_plain(plain, rendering)
    return {role: writer.finish(given[role]) for role, writer in writers.items()}


def say_plain(plain: Mapping[str, int], rendering: Rendering) -> None:
    """Say what became of plain prompts, where the tokenizer has a chat template."""
    whose = f"the chat template of {rendering.tokenizer}"
    said = {
        "turns": f"become a user's turn in {whose} (data.chat: never leaves them as they are)",
        "marked": f"hold {' or '.join(rendering.marks)} of {whose} already, and stay as they are",
        "plain": f"stay as they are, without {whose}",
    }
    for kind, count in plain.items() if rendering.chat is not None else ():
        console.say(f"  {count:,} plain prompt(s) {said[kind]}")


def _say_use(readings: Sequence[Reading]) -> None:
    """What was read how, and what was not used, by file; equal lines once."""
    said = dict[str, list[str]]()
    for reading in readings:
        unused = [name for name in reading.table.columns if name not in reading.used]
        text = reading.rule + (f"; not used: {', '.join(unused)}" if unused else "")
        said.setdefault(text, []).append(reading.table.name)
    for text, repeated in said.items():
        names = [*dict.fromkeys(repeated)]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        console.say(f"{', '.join(names[:MOST_NAMED])}{more}: {text}")


def _missing_kept(reading: Reading, names: Sequence[str], columns: Columns) -> str | None:
    """Why the prompts of a table lack a column of `data.columns.keep`, or None."""
    lost = ", ".join(repr(name) for name in columns.keep if name not in names)
    if not lost or not names:
        return None
    has = ", ".join(map(repr, reading.table.columns))
    return f"{reading.table.name}: no column {lost}, which data.columns.keep names; it has {has}"


def _select(values: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    for name in keep:
        if name not in values:
            raise Unusable("malformed", f"has no {name!r}, which data.columns.keep names; give null for none")
        if (fault := value_fault(values[name])) is not None:
            raise Unusable("malformed", f"{name!r} cannot be kept: {fault}")
    return {name: values[name] for name in keep}


def _null_side(row: Row, names: Mapping[str, str], data: Data) -> str | None:
    """The side of a pair that is null beside an unpaired label; None for a pair, and if both are null."""
    is_unpaired = data.format == "unpaired_labels" and "chosen" in names
    nulls = [side for side in ("chosen", "rejected") if is_unpaired and row.get(side) is None]
    return nulls[0] if len(nulls) == 1 else None


def _render(
    values: Mapping[str, Any], names: Mapping[str, str], rendering: Rendering, reading: Reading
) -> list[Row]:
    """The texts of a line: one row, or one for each turn of the assistant, of which the last is the line's.

    The prompt of a turn is what the model sees when it answers.
    """
    prompt, answers = split_row(values, names)
    tools, table = tools_of(values.get("tools")), reading.table.name
    if isinstance(prompt, str):
        if tools:
            raise Unusable("malformed", "has tools, but its prompt is text, which no chat template renders")
        return [plain_row(prompt, answers, rendering, table)]
    row: Row = render_turns(prompt, answers, tools, rendering, table)
    earlier = list[Row]()
    for i in range(1, len(prompt)) if reading.role == "sft" and rendering.train_on == "all" else ():
        is_answer = prompt[i]["role"] == "assistant" and prompt[i].get("weight") != 0
        if is_answer and any(turn["role"] == "user" for turn in prompt[:i]):
            answer = {"completion": prompt[i : i + 1]}
            with suppress(Unmarked):  # no demonstration, says the template
                turn = render_turns(prompt[:i], answer, tools, rendering, table)
                earlier.append(turn | {CONVERSATION: row["prompt"]})
    return [*earlier, row]


def split_row(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str | list[Message], dict[str, Any]]:
    """Prompt and answers of a record: all texts, or all messages.

    Two whole conversations are cut where they part; what follows must be one answer each.

    Raises:
        Unusable: naming what is missing, or where the conversations part.
    """
    texts: dict[str, Any] = {ours: values.get(theirs) for ours, theirs in names.items()}
    if all(isinstance(value, str) and value.isascii() for value in texts.values()):  # most of all rows
        return texts.pop("prompt"), texts
    prompt, answers = _check_values(values, names)
    talks = [answer for answer in answers.values() if isinstance(answer, list)]
    if "chosen" in answers and len(talks) == 2 and not isinstance(prompt, list):
        shared = common_start(*talks)
        if not shared and not prompt:
            raise Unusable("malformed", "the sides have no common start, which would be the prompt")
        turns = ((i, turn) for talk in talks for i, turn in enumerate(talk[len(shared) :], len(shared) + 1))
        if asked := [number for number, turn in turns if turn["role"] == "user"]:
            lengths = " and ".join(str(len(talk)) for talk in talks)
            raise Unusable(
                "malformed",
                f"the sides, of {lengths} messages, part at message {len(shared) + 1}, and message "
                f"{min(asked)} is the user's: they do not answer the same prompt",
            )
        prompt = shared or prompt
    if prompt is None:
        raise Unusable("malformed", f"has no {names['prompt']!r}")
    if isinstance(prompt, str) and talks:
        if not prompt.strip():
            raise Unusable("empty", "prompt is empty")
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        return prompt, answers
    for name, answer in answers.items():
        if isinstance(answer, str):
            answers[name] = [{"role": "assistant", "content": LEADING_BLANK.sub("", answer)}]
        elif answer[: len(prompt)] == prompt:
            answers[name] = answer[len(prompt) :]
    return prompt, answers


def _check_values(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str | list[Message] | None, dict[str, str | list[Message]]]:
    """Prompt (None where the row has none) and answers, each a text or messages."""
    answers = {ours: theirs for ours, theirs in names.items() if ours != "prompt"}
    if names["prompt"] not in values and "messages" in values and "chosen" not in names:
        turns = _value("messages", values["messages"])
        if isinstance(turns, str):
            raise Unusable("malformed", "messages is text, not a list of {role, content}")
        if not turns or turns[-1]["role"] != "assistant":
            raise Unusable("malformed", "the last message must be the assistant's: it is the completion")
        return turns[:-1], dict.fromkeys(answers, turns[-1:])
    if absent := [theirs for theirs in answers.values() if theirs not in values]:
        raise Unusable("malformed", f"has no {', '.join(map(repr, absent))}")
    prompt = _value("prompt", values[names["prompt"]]) if names["prompt"] in values else None
    return prompt, {ours: _value(ours, values[theirs]) for ours, theirs in answers.items()}


def _value(name: str, value: Any) -> str | list[Message]:
    """A text or a list of messages, checked. Null becomes an empty text, which is reported later."""
    if value is None:
        return ""
    if isinstance(value, str):
        if LONE_SURROGATE.search(value):
            raise Unusable("not_utf8", f"{name} is not UTF-8")
        return value
    if not isinstance(value, list):
        kind = type(value).__name__
        raise Unusable("malformed", f"{name} is of type {kind}; give text or a list of messages")
    return [message(name, number, item) for number, item in enumerate(value)]

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
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data import shapes
from rlhf_tasks.data.chat import (
    LONE_SURROGATE,
    Message,
    Rendering,
    Unmarked,
    Unusable,
    common_start,
    message,
    rendered,
    tools_of,
)
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.columns import fault as value_fault
from rlhf_tasks.data.rows import CONVERSATION, TEXTS, Corpus, Problems, Role, Row, evaluated_role
from rlhf_tasks.data.shapes import Line, Reading, Table
from rlhf_tasks.errors import UserError

MOST_NAMED = 3  # files or places in a line of the console


def assemble(
    tables: Sequence[tuple[Role | None, Split, Table]],
    data: Data,
    rendering: Rendering,
    problems: Problems,
    own: Callable[[dict[str, Any]], Any] | None = None,
) -> Corpus:
    """All tables as rows; bad lines go to `problems`, and what is read how, or not, is said.

    Tables of one role and split are joined in their order. `own` is the function of `data.format`.

    Raises:
        UserError: naming every table whose shape is not known, or that lacks a column.
    """
    known = shapes.read(tables, data, chat=rendering.chat is not None, own=own)
    _say([reading for _, reading in known])
    judged = evaluated_role({reading.role for _, reading in known}) if known else None
    prompts = [reading.table for _, reading in known if reading.role == judged]
    faults = [
        f"{reading.table.name} holds prompts alone, and stage judge compares with references: give a "
        "column of answers, such as completion, or demonstrations or pairs in another file"
        for _, reading in known
        if reading.role == "prompts" and not {"completion", "reference"} & set(reading.table.columns)
    ]
    faults += [fault for table in prompts if (fault := _missing_kept(table, data.columns)) is not None]
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))
    corpus: Corpus = {}
    for split, reading in known:
        kept = data.columns.keep if reading.role == judged else ()
        corpus.setdefault(reading.role, {}).setdefault(split, [])
        for line, unusable in reading.bad:
            problems.add(line.where, line.values, unusable.reason, unusable.detail)
        for position, line in enumerate(reading.table.lines):
            place = corpus.setdefault(reading.role, {}).setdefault(reading.splits.get(position, split), [])
            place += _rows(line, reading, rendering, problems, kept)
    return corpus


def _say(readings: Sequence[Reading]) -> None:
    """What was read how, and what was not used, by file; equal lines once."""
    said = dict[str, list[str]]()
    for reading in readings:
        unused = [name for name in reading.columns if name not in reading.used]
        text = reading.rule + (f"; not used: {', '.join(unused)}" if unused else "")
        said.setdefault(text, []).append(reading.table.name)
    for text, names in said.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        console.say(f"{', '.join(names[:MOST_NAMED])}{more}: {text}")
    left_out = [one for reading in readings for one in reading.left_out]
    for why, count in Counter(why for _, why in left_out).items():
        places = [where for where, reason in left_out if reason == why]
        more = ", …" if count > MOST_NAMED else ""
        console.say(f"  {count} row(s) make no row: {why} ({', '.join(places[:MOST_NAMED])}{more})")


def _source_names(table: Table, role: Role) -> dict[str, str]:
    """The text columns of a role → those of a table in our shape."""
    if role == "prompts":
        return {
            "prompt": "prompt",
            "reference": "reference" if "reference" in table.columns else "completion",
        }
    return {name: name for name in TEXTS[role]}


def _missing_kept(table: Table, columns: Columns) -> str | None:
    """Why the prompts of a table lack a column of `data.columns.keep`, or None."""
    lost = ", ".join(repr(name) for name in columns.keep if name not in table.columns)
    if not lost or not table.lines:
        return None
    has = ", ".join(map(repr, table.columns))
    return f"{table.name}: no column {lost}, which data.columns.keep names; it has {has}"


def _rows(
    line: Line, reading: Reading, rendering: Rendering, problems: Problems, keep: Sequence[str]
) -> list[Row]:
    names = _source_names(reading.table, reading.role)
    try:
        kept = {KEY: _kept(line.values, keep)} if keep else {}
        turns = _texts(line.values, names, rendering, reading.table.name, every_turn=reading.role == "sft")
        return [turn | {"source": line.where} | kept for turn in turns]
    except Unusable as fault:
        problems.add(line.where, line.values, fault.reason, fault.detail)
        return []


def _kept(values: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    for name in keep:
        if name not in values:
            raise Unusable("malformed", f"has no {name!r}, which data.columns.keep names; give null for none")
        if (fault := value_fault(values[name])) is not None:
            raise Unusable("malformed", f"{name!r} cannot be kept: {fault}")
    return {name: values[name] for name in keep}


def _texts(
    values: Mapping[str, Any],
    names: Mapping[str, str],
    rendering: Rendering,
    table: str,
    *,
    every_turn: bool,
) -> list[Row]:
    """The texts of a line: one row, or one for each turn of the assistant, of which the last is the line's.

    The prompt of a turn is what the model sees when it answers.
    """
    prompt, answers = split_row(values, names)
    if isinstance(prompt, list):
        tools = tools_of(values.get("tools"))
        row: Row = rendered(prompt, answers, tools, rendering, table)
        turns = range(1, len(prompt)) if every_turn and rendering.train_on == "all" else ()
        earlier = []
        for i in turns:
            if prompt[i]["role"] == "assistant" and any(turn["role"] == "user" for turn in prompt[:i]):
                with suppress(Unmarked):  # no demonstration, says the template
                    earlier.append(
                        rendered(prompt[:i], {"completion": prompt[i : i + 1]}, tools, rendering, table)
                    )
        return [*(turn | {CONVERSATION: row["prompt"]} for turn in earlier), row]
    if tools_of(values.get("tools")):
        raise Unusable("malformed", "has tools, but its prompt is text, which no chat template renders")
    if prompt.strip() and not prompt.startswith(rendering.bos.rstrip()):
        prompt = rendering.bos + prompt
    return [{"prompt": prompt} | {name: _without_end(str(a), rendering.eos) for name, a in answers.items()}]


def split_row(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str | list[Message], dict[str, str | list[Message]]]:
    """Prompt and answers of a record: all texts, or all messages.

    Two whole conversations are cut where they part; what follows must be one answer each.

    Raises:
        Unusable: naming what is missing, or where the conversations part.
    """
    prompt, answers = _given(values, names)
    talks = [answer for answer in answers.values() if isinstance(answer, list)]
    if "chosen" in answers and len(talks) == 2 and not isinstance(prompt, list):
        shared = common_start(*talks)
        if not shared and not prompt:
            raise Unusable("malformed", "the sides have no common start, which would be the prompt")
        asked = [number for talk in talks for number in _asked_after(talk, len(shared))]
        if asked:
            lengths = " and ".join(str(len(talk)) for talk in talks)
            part = f"the sides, of {lengths} messages, part at message {len(shared) + 1}"
            raise Unusable(
                "malformed",
                f"{part}, and message {min(asked)} is the user's: they do not answer the same prompt",
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
    start = len(prompt)
    return prompt, {
        name: [{"role": "assistant", "content": answer}]
        if isinstance(answer, str)
        else answer[start:] if answer[:start] == prompt else answer
        for name, answer in answers.items()
    }  # fmt: skip


def _asked_after(talk: Sequence[Message], start: int) -> list[int]:
    """The numbers, from 1, of the user's messages from a position on."""
    return [number for number, turn in enumerate(talk[start:], start + 1) if turn["role"] == "user"]


def of_prompt(values: Mapping[str, Any]) -> str | list[Message]:
    """The prompt of a record without an answer: text or messages."""
    return _value("prompt", values["prompt"])


def _given(
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
    absent = [theirs for theirs in answers.values() if theirs not in values]
    if absent:
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
        raise Unusable(
            "malformed", f"{name} is of type {type(value).__name__}; give text or a list of messages"
        )
    return [message(name, number, item) for number, item in enumerate(value)]


def _without_end(text: str, eos: str) -> str:
    bare = text.rstrip()
    return bare.removesuffix(eos) if bare.endswith(eos) else text

"""Converts the user's columns to ours: maps names, renders `messages`, and reports unusable values.

The supported conventions: plain `prompt`/`completion` and `prompt`/`chosen`/`rejected`; the same as lists
of `{role, content}` messages, also beside a prompt as text; comparisons of whole conversations, whose common
start is the prompt; and a `messages` column, whose last turn is the completion. A column `tools` goes to the
chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.config import Columns, Split
from rlhf_tasks.data.chat import (
    LONE_SURROGATE,
    Message,
    Rendering,
    Unusable,
    common_start,
    message,
    rendered,
    tools_of,
)
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.columns import fault as value_fault
from rlhf_tasks.data.rows import CONVERSATION, Corpus, Problems, Role, Row, evaluated_role
from rlhf_tasks.errors import UserError


@dataclass(frozen=True)
class Line:
    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One file, or one split of a set, as it was read."""

    name: str
    columns: tuple[str, ...]
    lines: list[Line]


def infer_role(table: Table, columns: Columns) -> Role:
    """The role of a file by its columns, where its name does not give one."""
    return "preferences" if {columns.chosen, columns.rejected} <= set(table.columns) else "sft"


def assemble(
    tables: Sequence[tuple[Role | None, Split, Table]],
    columns: Columns,
    rendering: Rendering,
    problems: Problems,
) -> Corpus:
    """All tables as rows; bad lines go to `problems`.

    Raises:
        UserError: naming every table that lacks a column, or two tables of one role and split.
    """
    known = [(role or infer_role(table, columns), split, table) for role, split, table in tables]
    judged = evaluated_role({role for role, _, _ in known}) if known else None
    faults = [
        fault for role, _, table in known if (fault := _missing_columns(table, role, columns)) is not None
    ]
    prompts = [table for role, _, table in known if role == judged]
    faults += [fault for table in prompts if (fault := _missing_kept(table, columns)) is not None]
    owner: dict[tuple[Role, Split], str] = {}
    for role, split, table in known:
        other = owner.setdefault((role, split), table.name)
        if other != table.name:
            faults.append(
                f"{other} and {table.name} both hold {role}/{split}; join them, or name their splits"
            )
    if faults:
        raise UserError("the data cannot be read as it is:\n  " + "\n  ".join(faults))
    corpus: Corpus = {}
    for role, split, table in known:
        kept = columns.keep if role == judged else ()
        corpus.setdefault(role, {})[split] = _rows(table, role, columns, rendering, problems, kept)
    return corpus


def _source_names(table: Table, role: Role, columns: Columns) -> dict[str, str]:
    """Our column → the file's."""
    if role == "preferences":
        return {"prompt": columns.prompt, "chosen": columns.chosen, "rejected": columns.rejected}
    if role == "sft":
        return {"prompt": columns.prompt, "completion": columns.completion}
    plain = columns.completion in table.columns or "reference" not in table.columns
    return {"prompt": columns.prompt, "reference": columns.completion if plain else "reference"}


def _missing_columns(table: Table, role: Role, columns: Columns) -> str | None:
    if not table.columns:
        return None  # nothing was readable: its lines are named one by one, or it is empty
    names = _source_names(table, role, columns)
    missing = {ours: theirs for ours, theirs in names.items() if theirs not in table.columns}
    if role != "preferences" and missing and "messages" in table.columns:
        return None
    talks = any(isinstance(line.values.get(names.get("chosen", "")), list) for line in table.lines)
    if list(missing) == ["prompt"] and talks:
        return None
    if not missing:
        return None
    lost = ", ".join(repr(theirs) for theirs in missing.values())
    mapping = ", ".join(f"data.columns.{'completion' if ours == 'reference' else ours}" for ours in missing)
    has = ", ".join(map(repr, table.columns)) or "none"
    return f"{table.name}: no column {lost} for {role}; it has {has}; name the right column in {mapping}"


def _missing_kept(table: Table, columns: Columns) -> str | None:
    """Why the prompts of a table lack a column of `data.columns.keep`, or None."""
    lost = ", ".join(repr(name) for name in columns.keep if name not in table.columns)
    if not lost or not table.lines:
        return None
    has = ", ".join(map(repr, table.columns))
    return f"{table.name}: no column {lost}, which data.columns.keep names; it has {has}"


def _rows(
    table: Table,
    role: Role,
    columns: Columns,
    rendering: Rendering,
    problems: Problems,
    keep: Sequence[str],
) -> list[Row]:
    names = _source_names(table, role, columns)
    rows = []
    for line in table.lines:
        try:
            kept = {KEY: _kept(line.values, keep)} if keep else {}
            turns = _texts(line.values, names, rendering, table.name, every_turn=role == "sft")
            rows += [turn | {"source": line.where} | kept for turn in turns]
        except Unusable as fault:
            problems.add(line.where, line.values, fault.reason, fault.detail)
    return rows


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
    prompt, answers = _given(values, names)
    talks = [answer for answer in answers.values() if isinstance(answer, list)]
    if "chosen" in answers and len(talks) == 2 and not isinstance(prompt, list):
        prompt = common_start(*talks) or prompt or []
    if isinstance(prompt, str) and prompt.strip() and talks:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        tools = tools_of(values.get("tools"))
        row: Row = rendered(prompt, answers, tools, rendering, table)
        turns = range(1, len(prompt)) if every_turn and rendering.train_on == "all" else ()
        earlier = [
            rendered(prompt[:i], {"completion": prompt[i : i + 1]}, tools, rendering, table)
            for i in turns
            if prompt[i]["role"] == "assistant" and any(turn["role"] == "user" for turn in prompt[:i])
        ]
        return [*(turn | {CONVERSATION: row["prompt"]} for turn in earlier), row]
    if prompt is None:
        raise Unusable("malformed", f"has no {names['prompt']!r}")
    if talks:
        raise Unusable("empty", "prompt is empty")
    if prompt.strip() and not prompt.startswith(rendering.bos.rstrip()):
        prompt = rendering.bos + prompt
    return [{"prompt": prompt} | {name: _without_end(str(a), rendering.eos) for name, a in answers.items()}]


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

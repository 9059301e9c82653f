"""Converts the user's columns to ours: maps names, renders `messages`, and reports unusable values.

The supported conventions: plain `prompt`/`completion` and `prompt`/`chosen`/`rejected`; the same as lists
of `{role, content}` messages; comparisons of whole conversations, whose common start is the prompt;
and a `messages` column, whose last turn is the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.config import Columns, Split
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.columns import fault as value_fault
from rlhf_tasks.data.rows import Corpus, Problems, Reason, Role, Row, evaluated_role
from rlhf_tasks.errors import UserError

Message = dict[str, Any]
Chat = Callable[[list[Message], bool], str]

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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


@dataclass(frozen=True)
class Rendering:
    """How texts become what the model sees.

    bos: put before plain prompts if the tokenizer does so; a chat template writes its own.
    eos: removed from the end of answers, because it is added as a token id.
    chat: renders messages, and whether an answer follows, as text. It raises ValueError for messages that
    the template rejects. None where the tokenizer has no template.
    """

    bos: str
    eos: str
    chat: Chat | None
    tokenizer: str


class _Unusable(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


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
            row = _texts(line.values, names, rendering, table.name) | {"source": line.where}
            rows.append(row | ({KEY: _kept(line.values, keep)} if keep else {}))
        except _Unusable as fault:
            problems.add(line.where, line.values, fault.reason, fault.detail)
    return rows


def _kept(values: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    for name in keep:
        if name not in values:
            raise _Unusable(
                "malformed", f"has no {name!r}, which data.columns.keep names; give null for none"
            )
        if (fault := value_fault(values[name])) is not None:
            raise _Unusable("malformed", f"{name!r} cannot be kept: {fault}")
    return {name: values[name] for name in keep}


def _texts(values: Mapping[str, Any], names: Mapping[str, str], rendering: Rendering, table: str) -> Row:
    prompt, answers = _given(values, names)
    talks = [answer for answer in answers.values() if isinstance(answer, list)]
    if "chosen" in answers and len(talks) == 2 and not isinstance(prompt, list):
        prompt = _common_start(*talks)
    if isinstance(prompt, list):
        return _conversation(prompt, answers, rendering, table)
    if prompt is None:
        raise _Unusable("malformed", f"has no {names['prompt']!r}")
    if talks:
        raise _Unusable("malformed", "the prompt is text but an answer is messages; give both in one form")
    if prompt.strip() and not prompt.startswith(rendering.bos.rstrip()):
        prompt = rendering.bos + prompt
    return {"prompt": prompt} | {name: _without_end(str(a), rendering.eos) for name, a in answers.items()}


def _given(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str | list[Message] | None, dict[str, str | list[Message]]]:
    """Prompt (None where the row has none) and answers, each a text or messages."""
    answers = {ours: theirs for ours, theirs in names.items() if ours != "prompt"}
    if names["prompt"] not in values and "messages" in values and "chosen" not in names:
        turns = _value("messages", values["messages"])
        if isinstance(turns, str):
            raise _Unusable("malformed", "messages is text, not a list of {role, content}")
        if not turns or turns[-1]["role"] != "assistant":
            raise _Unusable("malformed", "the last message must be the assistant's: it is the completion")
        return turns[:-1], dict.fromkeys(answers, turns[-1:])
    absent = [theirs for theirs in answers.values() if theirs not in values]
    if absent:
        raise _Unusable("malformed", f"has no {', '.join(map(repr, absent))}")
    prompt = _value("prompt", values[names["prompt"]]) if names["prompt"] in values else None
    return prompt, {ours: _value(ours, values[theirs]) for ours, theirs in answers.items()}


def _value(name: str, value: Any) -> str | list[Message]:
    """A text or a list of messages, checked. Null becomes an empty text, which is reported later."""
    if value is None:
        return ""
    if isinstance(value, str):
        if LONE_SURROGATE.search(value):
            raise _Unusable("not_utf8", f"{name} is not UTF-8")
        return value
    if not isinstance(value, list):
        raise _Unusable(
            "malformed", f"{name} is of type {type(value).__name__}; give text or a list of messages"
        )
    return [_message(name, number, item) for number, item in enumerate(value)]


def _message(name: str, number: int, item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise _Unusable(
            "malformed", f"{name}[{number}] is of type {type(item).__name__}, not {{role, content}}"
        )
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            raise _Unusable("malformed", f"{name}[{number}] has no text under {key!r}")
        if LONE_SURROGATE.search(item[key]):
            raise _Unusable("not_utf8", f"{name}[{number}].{key} is not UTF-8")
    return {key: value for key, value in item.items() if value is not None}


def _common_start(first: list[Message], second: list[Message]) -> list[Message]:
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared == len(first) == len(second):
        shared -= 1  # chosen equals rejected: reported later
    return first[:shared]


def _conversation(
    prompt: list[Message], answers: Mapping[str, str | list[Message]], rendering: Rendering, table: str
) -> Row:
    if rendering.chat is None:
        raise UserError(
            f"{table} holds messages, but {rendering.tokenizer} has no chat template to render them; "
            "use a model whose tokenizer has one, or give plain texts"
        )
    if not any(turn["content"].strip() for turn in prompt):
        raise _Unusable("empty", "prompt is empty")
    try:
        head = rendering.chat(prompt, True)
        return {"prompt": head} | {
            name: _answer(prompt, answer, name, head, rendering) for name, answer in answers.items()
        }
    except ValueError as error:
        raise _Unusable("malformed", f"the chat template rejects it: {error}") from None


def _answer(
    prompt: list[Message], answer: str | list[Message], name: str, head: str, rendering: Rendering
) -> str:
    """The rendering of the whole conversation after that of the prompt, `head`; without EOS."""
    assert rendering.chat is not None
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    if not any(turn["content"].strip() for turn in turns):
        raise _Unusable("empty", f"{name} is empty")
    full = rendering.chat([*prompt, *turns], False)
    if not full.startswith(head):
        raise _Unusable(
            "malformed", f"the chat template renders the prompt differently when the {name} follows it"
        )
    return _without_end(full[len(head) :], rendering.eos)


def _without_end(text: str, eos: str) -> str:
    bare = text.rstrip()
    return bare.removesuffix(eos) if bare.endswith(eos) else text

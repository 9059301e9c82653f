"""Public data sets in small: each folder of cases/ has the right reading in its expected.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf_tasks.config import Data, Split
from rlhf_tasks.data.chat import Unusable, tools_of
from rlhf_tasks.data.readers import files, shapes, tables
from rlhf_tasks.data.readers.readings import Line, Table, split_of
from rlhf_tasks.data.rows import ROLES, SPLITS, TEXTS, Problems, Role
from rlhf_tasks.errors import UserError
from tests.data.conftest import converted

CASES = sorted((Path(__file__).parent / "cases").iterdir())
NEEDS: dict[str, dict[str, Any]] = {"20_verl_gsm8k": {"columns": {"keep": ["reward_model"]}}}
"""What a user sets."""
SETTINGS: dict[str, dict[str, Any]] = {
    "pairs by safety": {"format": "safer_response_id"},
    "all pairs of adjacent": {"pairs": "adjacent"},
    "without a chat template": {"chat": False},
    "pairs of the prompts that have both labels": {"format": "label_pairs"},
    "the true rows as demonstrations": {"format": "good_answers"},
    "column names alone give demonstrations": {"columns": {"prompt": "question", "completion": "answer"}},
}
"""What gives another right reading, by a part of its reason."""
NOT_OFFERED = (
    "score_ratio",
    "a part of a column",
    "the user's last turn is dropped",
    "the common start is the prompt, all the rest",
    "turn 2 with the common start",
)
"""Those that need a function of one's own (`data.format`)."""
Rows = dict[str, dict[str, list[Any]]]
Given = list[tuple[Role | None, Split, Table]]


class Case(NamedTuple):
    expected: dict[str, Any]
    given: Given
    needs: dict[str, Any]
    problems: Problems

    @property
    def rows(self) -> dict[str, list[Any]]:
        return {role: rows for role, rows in (self.expected["rows"] or {}).items() if rows}


def readings(given: Given, problems: Problems, **data: Any) -> tuple[Rows, dict[str, str]]:
    """Rows by role and split, and why a record makes none, by its place: what `tables.assemble` renders."""
    chat, settings = data.pop("chat", True), Data.model_validate({"source": "files", **data})
    rows: Rows = {}
    left_out: dict[str, str] = {}
    for split, reading in shapes.read(given, settings, chat=chat):
        made = converted(reading)
        left_out |= dict(made.left_out)
        for line, values in made.rows:
            place = rows.setdefault(reading.role, {}).setdefault(split_of(line.values) or split, [])
            try:
                place.append(plain(reading.role, values))
            except Unusable as fault:
                problems.add(line.where, line.values, fault.reason, fault.detail)
                left_out[line.where] = fault.detail
    return rows, left_out


def opened(folder: Path, expected: dict[str, Any], problems: Problems) -> Given:
    found, _ = files.discover(folder / expected["path"])
    return [(role, split, files.read_file(file, name, problems)) for role, split, name, file in found]


def flat(rows: Rows, role: Role) -> list[Any]:
    return [row for split in SPLITS for row in rows.get(role, {}).get(split, [])]


def plain(role: Role, values: Any) -> dict[str, Any]:
    """A row as expected.json has it, before a chat template renders it."""
    prompt: Any = None
    answers: dict[str, Any] = {}
    if role == "prompts":
        prompt, _ = tables.split_row(values, {"prompt": "prompt"})
    else:
        prompt, answers = tables.split_row(values, {name: name for name in TEXTS[role]})
    kept = {key: values[key] for key in ("answer", "reward_model") if key in values and role == "prompts"}
    for turns in (prompt, *answers.values()):
        for turn in turns if isinstance(turns, list) else []:
            if "tool_calls" in turn and not turn["content"]:
                del turn["content"]  # templates need the key, and expected.json leaves nulls out
    tools = {"tools": tools_of(values["tools"])} if values.get("tools") else {}
    return {"prompt": prompt} | answers | tools | kept


@pytest.fixture(params=CASES, ids=lambda folder: folder.name)
def case(request: pytest.FixtureRequest) -> Case:
    folder: Path = request.param
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    problems = Problems()
    return Case(expected, opened(folder, expected, problems), NEEDS.get(folder.name, {}), problems)


def test_a_public_shape_is_read_as_it_means(case: Case) -> None:
    if not case.rows:
        with pytest.raises(
            UserError, match=r"'label' marks 4 of 8 rows as false.*label_pairs.*unpaired_labels"
        ):
            readings(case.given, case.problems, **case.needs)
        return
    rows, left_out = readings(case.given, case.problems, **case.needs)
    for role in ROLES:
        assert flat(rows, role) == case.rows.get(role, []), role
        if case.expected["splits"] and case.rows.get(role):
            assert {split: len(some) for split, some in rows[role].items()} == case.expected["splits"][role]
    assert left_out.keys() == {one["where"] for one in case.expected.get("left_out", [])}
    assert bool(case.expected["refuse"]) == bool(len(case.problems))


def test_other_right_readings_are_had_by_a_setting(case: Case) -> None:
    for other in case.expected.get("also_right", []):
        settings = next((one for part, one in SETTINGS.items() if part in other["why"]), None)
        if settings is None:
            assert any(part in other["why"] for part in NOT_OFFERED), other["why"]
            continue
        rows, left_out = readings(case.given, Problems(), **case.needs | settings)
        for role in ROLES:
            assert flat(rows, role) == (other["rows"][role] or []), (other["why"], role)
        if "left_out" in other:
            assert left_out.keys() == {one["where"] for one in other["left_out"]}


EXTRA = {"row_number": 7, "remark": "a remark of nobody", "scores_of_others": [0.5, 0.25]}


def test_further_columns_and_another_order_change_no_row(case: Case) -> None:
    if not case.rows:
        return
    changed = [
        (role, split, changed_table(table, lambda values: {**EXTRA, **dict(reversed(values.items()))}))
        for role, split, table in case.given
    ]
    rows, _ = readings(changed, Problems(), **case.needs)
    for role in ROLES:
        assert flat(rows, role) == case.rows.get(role, []), role


def test_columns_of_unknown_names_give_the_same_rows_or_are_refused_by_name(case: Case) -> None:
    """One column at a time, then all of them."""
    columns = sorted({name for _, _, table in case.given for name in table.columns})
    for several in ([name] for name in columns), (columns,):
        for names in several:
            new = {name: f"field_{columns.index(name)}" for name in names}
            changed = [(role, split, renamed_columns(table, new)) for role, split, table in case.given]
            try:
                rows, left_out = readings(changed, Problems(), **case.needs)
            except UserError as error:
                message = str(error)
            else:
                wanted = {role: case.rows.get(role, []) for role in ROLES}
                if {role: flat(rows, role) for role in ROLES} == wanted or all(
                    not flat(rows, role) for role in ROLES
                ):
                    continue  # the same rows, or each of them is refused at its place
                message = said(changed, left_out)
            assert any(name in message for name in new.values()), (names, message)


def renamed_columns(table: Table, new: dict[str, str]) -> Table:
    return changed_table(table, lambda values: {new.get(key, key): value for key, value in values.items()})


def said(given: Given, left_out: dict[str, str]) -> str:
    """What the console names: columns that are not used, and rows that are left out."""
    unused = {
        name
        for _, reading in shapes.read(given, Data(), chat=True)
        for *_, table in given
        for name in table.columns
        if table.name == reading.table.name and name not in reading.used
    }
    return f"{unused} {left_out}"


def changed_table(table: Table, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Table:
    lines = [Line(line.where, change(dict(line.values))) for line in table.lines]
    return Table(table.name, tuple(dict.fromkeys(key for line in lines for key in line.values)), lines)

"""The verifier's checks, against verdicts that were decided by hand."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from rlhf_tasks.config.scorers import Check, Format
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.scoring.verifier import Verifier

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def check(kind: str, **changes: Any) -> Check:
    given = {"kind": kind, "column": "answer", "tolerance": 0.0, "weight": 1.0}
    return Check.model_validate(given | changes)


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("exact", "Paris", ["Paris", "  Paris\n"], ["paris", "Paris.", "", "Paris Paris"]),
        ("exact", 12, ["12"], ["12.0", "1 2", "012"]),
        ("number", 12, ["12", " 12.0", "+12", "1.2e1", "0012"], ["13", "", "12 apples", "1 2", "nan", "²"]),
        ("number", "1,234.5", ["1234.5", "1,234.50"], ["12,34.5", "1234", "1234.500001", "1_234.5"]),
        ("number", 0.1, ["0.1", ".1", "1e-1"], ["0.1000000001", "inf", "1e999999999", "."]),
        ("number", 2**70, [str(2**70)], [str(2**70 + 1), "1.1805916207174113e21"]),
        ("number", -0.0, ["0", "-0"], ["-", "+"]),
        ("regex", r"(red|blue) \d+", ["red 1", "blue 22"], ["red", "a red 1", "red 1.", "green 1"]),
        ("json_schema", SCHEMA, ['{"n": 1}', ' {"n": 1, "m": 2} '], ['{"n": "1"}', "{}", "n: 1", "", "1"]),
        ("json_schema", '{"type": "integer"}', ["1"], ["1.5", '"1"', "[" * 100_000]),
        ("json_schema", {"multipleOf": 0.1}, ["2"], ["1e999", "-1e999", "1" + "0" * 400, "0.25"]),
        ("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, ["1"], ["1.5"]),
    ],
)
def test_each_check_accepts_right_answers_only(
    kind: str, value: Any, right: list[str], wrong: list[str]
) -> None:
    verifier = Verifier([check(kind)], None)
    columns = {"answer": [value] * (len(right) + len(wrong))}
    assert verifier.correct([*right, *wrong], columns) == [True] * len(right) + [False] * len(wrong)


def test_the_tolerance_is_an_absolute_difference_that_is_included() -> None:
    verifier = Verifier([check("number", tolerance=0.5)], None)
    answers = ["9.5", "10.5", "9.49", "10.51"]
    assert verifier.correct(answers, {"answer": [10] * 4}) == [True, True, False, False]


def test_the_format_is_weighted_apart_and_gives_the_answer() -> None:
    form = Format(pattern=r".*<answer>(.*)</answer>", weight=0.25)
    verifier = Verifier([check("number", weight=2.0), check("regex", column="form", weight=0.5)], form)
    tagged = [f"<answer>{answer}</answer>" for answer in ("4.0", "5", "")]
    responses = ["two and two\nis <answer> 4 </answer> ", *tagged, "4", "<answer>4</answer> or not"]
    columns: Columns = {"answer": [4] * 6, "form": [r"\d"] * 6}
    assert verifier.read_answers(responses) == ["4", "4.0", "5", "", None, None]
    rows = Responses.of_texts(["p"] * 6, responses, columns)
    assert verifier(rows).tolist() == [2.75, 2.25, 0.75, 0.25, 0.0, 0.0]
    assert verifier.correct(responses, columns) == [True] + [False] * 5
    assert verifier.match_format(responses) == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("exact", None, "None is neither text nor a whole number"),
        ("exact", 1.5, "1.5 is neither text"),
        ("number", "four", "'four' is not a number"),
        ("number", None, "None is not a number"),
        ("number", True, "True is not a number"),
        ("regex", "(", r"'\(' is not a regular expression: missing \)"),
        ("regex", 3, "3 is not a regular expression"),
        ("json_schema", {"type": "no"}, ".* is not a JSON Schema: 'no' is not valid"),
        ("json_schema", "{", r"'\{' is not a JSON Schema"),
        ("json_schema", [1], r"\[1\] is not a JSON Schema"),
        ("json_schema", "[" * 100_000, ".* is not a JSON Schema"),
    ],
)
def test_a_value_that_a_check_cannot_use_is_refused_with_its_row(kind: str, value: Any, reason: str) -> None:
    good = {"exact": "a", "number": 1, "regex": "a", "json_schema": {}}[kind]
    rows = [{"source": "mine.jsonl:7"}, {"source": "mine.jsonl:9"}, {"source": "generated"}]
    with pytest.raises(UserError, match=f"a verifier: 2 value.*\n  mine.jsonl:9: answer: {reason}"):
        Verifier([check(kind)], None).check(rows, {"answer": [good, value, value]}, "a verifier")
    with pytest.raises(UserError, match="  generated row 3: answer"):
        Verifier([check(kind)], None).check(rows, {"answer": [good, good, value]}, "a verifier")
    Verifier([check(kind)], None).check(rows[:1], {"answer": [good]}, "a verifier")


def test_a_schema_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    for reference in ("http://127.0.0.1:9/schema", "#/$defs/missing"):
        with pytest.raises(
            UserError, match=rf"{re.escape(reference)}.* leads nowhere, and nothing is fetched"
        ):
            Verifier([check("json_schema")], None).correct(["1"], {"answer": [{"$ref": reference}]})


def test_a_column_that_is_not_kept_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"a verifier needs the column answer, and .* has other; add it"):
        Verifier([check("exact")], None).check([], {"other": []}, "a verifier")


def test_a_format_has_one_group() -> None:
    for pattern, reason in (("(", "not a regular"), ("a", "0 groups"), ("(a)(b)", "2 g")):
        with pytest.raises(ValueError, match=reason):
            Format(pattern=pattern, weight=0.1)

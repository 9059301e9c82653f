"""Verifiable answers: exact texts, numbers, regular expressions and JSON Schema, each against a column.

A response is right if every check passes. Its answer is the whole response, or the group of the format's
pattern; a response that the pattern does not match has no answer, and passes no check. No model is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.config.scorers import Check, Format
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.protocol import Responses, excerpt, shorten

MAX_SHOWN = 10
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d{1,3})?")

Test = Callable[[str], bool]
"""Whether an answer is right."""


class Verifier:
    """A scorer of right and wrong answers; the test of a column's value is made once."""

    def __init__(self, checks: Sequence[Check], form: Format | None) -> None:
        self._checks, self.has_format = checks, form is not None
        self._pattern = re.compile("(.*)" if form is None else form.pattern, re.DOTALL)
        self._format_weight = 0.0 if form is None else form.weight
        self._tests: dict[tuple[int, str], Test] = {}

    def __call__(self, rows: Responses) -> Tensor:
        """(B,) float64: the weights of the checks that pass, and the format's weight where it matches."""
        weights, answers = [check.weight for check in self._checks], self.read_answers(rows.texts)
        scores = [
            sum(w for w, passes in zip(weights, row, strict=True) if passes)
            + self._format_weight * (answer is not None)
            for answer, row in zip(answers, self._run_checks(answers, rows.columns), strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float64)

    def read_answers(self, responses: Sequence[str]) -> list[str | None]:
        """The answer in each response; None where the format does not match."""
        matches = [self._pattern.fullmatch(response.strip()) for response in responses]
        return [None if match is None else (match[1] or "").strip() for match in matches]

    def match_format(self, responses: Sequence[str]) -> list[bool]:
        """Whether the format matches each response."""
        return [answer is not None for answer in self.read_answers(responses)]

    def correct(self, responses: Sequence[str], columns: Columns) -> list[bool]:
        """Whether each response passes every check."""
        return [all(row) for row in self._run_checks(self.read_answers(responses), columns)]

    def _run_checks(self, answers: Sequence[str | None], columns: Columns) -> list[list[bool]]:
        return [
            [
                answer is not None and self._test(number, columns[check.column][i])(answer)
                for number, check in enumerate(self._checks)
            ]
            for i, answer in enumerate(answers)
        ]

    def _test(self, number: int, value: Any) -> Test:
        key = (number, json.dumps(value, sort_keys=True))
        if key not in self._tests:
            self._tests[key] = _make_test(self._checks[number], value)
        return self._tests[key]

    def check(self, rows: Sequence[Mapping[str, Any]], kept: Columns, title: str) -> None:
        """Check that every row has a value that each check can use; `title` names the verifier.

        Raises:
            UserError: naming a column that is not kept, or the rows whose value cannot be used.
        """
        lost = sorted({check.column for check in self._checks} - set(kept))
        if lost:
            raise UserError(
                f"{title} needs the column {', '.join(lost)}, and data.columns.keep has "
                f"{', '.join(kept) or 'none'}; add it there, and run `rlhf prepare`"
            )
        faults = []
        for i, row in enumerate(rows):
            for number, check in enumerate(self._checks):
                try:
                    self._test(number, kept[check.column][i])
                except ValueError as error:
                    where = row.get("source", "")
                    where = where if ":" in where else f"{where} row {i + 1}".strip()
                    faults.append(f"  {where}: {check.column}: {error}")
        if faults:
            more = [f"  … and {len(faults) - MAX_SHOWN} more"] if len(faults) > MAX_SHOWN else []
            text = "\n".join([*faults[:MAX_SHOWN], *more])
            raise UserError(
                f"{title}: {len(faults)} value(s) cannot be used by a check; correct these rows:\n{text}"
            )


def parse_number(text: str) -> Decimal | None:
    """The number that a text is, such as `-1,234.5` or `2e3`; None for any other text."""
    bare = text.strip()
    try:
        return Decimal(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None
    except InvalidOperation:  # no digit at all
        return None


def _make_test(check: Check, value: Any) -> Test:
    """The test of an answer against a column's value; ValueError for a value that the check cannot use."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match check.kind:
        case "exact":
            if not isinstance(value, str) and not (is_number and isinstance(value, int)):
                raise ValueError(f"{excerpt(value)} is neither text nor a whole number, as `exact` needs")
            return str(value).strip().__eq__
        case "number":
            right = parse_number(str(value)) if is_number or isinstance(value, str) else None
            if right is None:
                raise ValueError(f"{excerpt(value)} is not a number")
            most = Decimal(str(check.tolerance))
            return lambda answer: (x := parse_number(answer)) is not None and abs(x - right) <= most
        case "regex":
            if not isinstance(value, str):
                raise ValueError(f"{excerpt(value)} is not a regular expression")
            try:
                pattern = re.compile(value, re.DOTALL)
            except re.error as error:
                raise ValueError(f"{excerpt(value)} is not a regular expression: {error}") from None
            return lambda answer: pattern.fullmatch(answer) is not None
        case "json_schema":
            return _json_schema(value)


def _json_schema(value: Any) -> Test:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema_specifications import REGISTRY  # the published meta-schemas; it fetches nothing
    from referencing.exceptions import Unresolvable

    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
        Draft202012Validator.check_schema(schema)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ValueError(f"{excerpt(value)} is not a JSON Schema: {str(error).splitlines()[0]}") from None
    validator = Draft202012Validator(schema, registry=REGISTRY)

    def test(answer: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(answer)))
        except Unresolvable as error:
            raise UserError(
                f"a verifier: a reference in the JSON Schema {excerpt(value)} leads nowhere, and nothing is "
                f"fetched ({shorten(str(error))}); correct this row"
            ) from None
        except (ValueError, RecursionError, ArithmeticError):
            return False

    return test

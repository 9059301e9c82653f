"""Verifiable answers: exact texts, numbers, regular expressions and JSON Schema, each against a column.

A response is right if every check passes. Its answer is the whole response, or the group of the format's
pattern; a response that the pattern does not match has no answer, and passes no check. No model is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from rlhf_tasks.config.scorers import Check, Format
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from referencing import Resource

MAX_SHOWN = 10
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d{1,3})?")

Test = Callable[[str], bool]
"""Whether an answer is right."""


class Verifier:
    """Checks of one problem after another; the tests of a column's value are made once."""

    def __init__(self, checks: Sequence[Check], form: Format | None) -> None:
        self._checks, self._form = checks, form
        self._pattern = None if form is None else re.compile(form.pattern, re.DOTALL)
        self._tests: dict[tuple[int, str], Test] = {}

    @property
    def has_format(self) -> bool:
        return self._form is not None

    def answers(self, responses: Sequence[str]) -> list[str | None]:
        """The answer in each response; None where the format does not match."""
        stripped = [response.strip() for response in responses]
        if self._pattern is None:
            return list(stripped)
        matches = [self._pattern.fullmatch(response) for response in stripped]
        return [None if match is None else (match[1] or "").strip() for match in matches]

    def correct(self, responses: Sequence[str], columns: Columns) -> list[bool]:
        """Whether each response passes every check."""
        return [all(passed) for passed in self._passed(responses, columns)]

    def formatted(self, responses: Sequence[str]) -> list[bool]:
        """Whether the format matches each response."""
        return [answer is not None for answer in self.answers(responses)]

    def scores(self, responses: Sequence[str], columns: Columns) -> list[float]:
        """The sum of the weights of the checks that pass, and of the format's weight where it matches."""
        weight = 0.0 if self._form is None else self._form.weight
        formatted = self.formatted(responses)
        return [
            sum(check.weight for check, passes in zip(self._checks, passed, strict=True) if passes)
            + weight * has_format
            for passed, has_format in zip(self._passed(responses, columns), formatted, strict=True)
        ]

    def _passed(self, responses: Sequence[str], columns: Columns) -> list[list[bool]]:
        return [
            [
                answer is not None and self._test(number, columns[check.column][i])(answer)
                for number, check in enumerate(self._checks)
            ]
            for i, answer in enumerate(self.answers(responses))
        ]

    def _test(self, number: int, value: Any) -> Test:
        key = (number, json.dumps(value, sort_keys=True))
        if key not in self._tests:
            self._tests[key] = _TESTS[self._checks[number].kind](value, self._checks[number])
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


# ----------------------------------------------------------------------------------------- checks


def parse_number(text: str) -> Decimal | None:
    """The number that a text is, such as `-1,234.5` or `2e3`; None for any other text."""
    bare = text.strip()
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:  # no digit at all
        return None


def _exact(value: Any, check: Check) -> Test:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{_shown(value)} is neither text nor a whole number, as `exact` needs")
    right = str(value).strip()
    return lambda answer: answer == right


def _number(value: Any, check: Check) -> Test:
    right = None if isinstance(value, bool) or not isinstance(value, str | int | float) else str(value)
    number = None if right is None else parse_number(right)
    if number is None:
        raise ValueError(f"{_shown(value)} is not a number")
    tolerance = Decimal(str(check.tolerance))

    def test(answer: str) -> bool:
        found = parse_number(answer)
        return found is not None and abs(found - number) <= tolerance

    return test


def _regex(value: Any, check: Check) -> Test:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a regular expression")
    try:
        pattern = re.compile(value, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{_shown(value)} is not a regular expression: {error}") from None
    return lambda answer: pattern.fullmatch(answer) is not None


def _json_schema(value: Any, check: Check) -> Test:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema_specifications import REGISTRY  # the published meta-schemas; it fetches nothing
    from referencing.jsonschema import DRAFT202012

    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
        Draft202012Validator.check_schema(schema)
        resource = DRAFT202012.create_resource(schema)
        _check_references(resource, REGISTRY.resolver_with_root(resource), set())
    except (ValueError, RecursionError, SchemaError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{_shown(value)} is not a JSON Schema: {reason}") from None
    validator = Draft202012Validator(schema, registry=REGISTRY)

    def test(answer: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(answer)))
        except (ValueError, RecursionError, ArithmeticError):
            return False

    return test


def _check_references(resource: Resource[Any], resolver: Any, seen: set[int]) -> None:
    """Check that every reference of a schema, and of the parts it refers to, leads to a schema.

    `resolver` is that of the library `referencing`; `seen` are the ids of the parts that are checked already.

    Raises:
        ValueError: naming a reference that leads nowhere.
        SchemaError: for a part that is referred to and is no schema.
    """
    from jsonschema import Draft202012Validator
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    part = resource.contents
    if not isinstance(part, dict) or id(part) in seen:
        return
    seen.add(id(part))
    for reference in (part[keyword] for keyword in ("$ref", "$dynamicRef") if keyword in part):
        try:
            found = resolver.lookup(reference)
        except (Unresolvable, TypeError):
            raise ValueError(
                f"the reference {reference!r} leads nowhere in it, and nothing is fetched"
            ) from None
        Draft202012Validator.check_schema(found.contents)
        _check_references(DRAFT202012.create_resource(found.contents), found.resolver, seen)
    for inner in resource.subresources():
        _check_references(inner, resolver.in_subresource(inner), seen)


_TESTS: Mapping[str, Callable[[Any, Check], Test]] = {
    "exact": _exact, "number": _number, "regex": _regex, "json_schema": _json_schema,
}  # fmt: skip


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"

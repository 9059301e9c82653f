"""Columns of the prompt rows that scorers and judges get (`data.columns.keep`). B rows. No torch.

A table holds them in one text column, `columns`, as a JSON object per row. So numbers, texts, lists, objects
and nulls keep their types, whatever the types of other rows are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Columns = Mapping[str, Sequence[Any]]
"""By name, (B,) values in the order of the prompts; empty where no column is kept."""

NONE: Columns = MappingProxyType({})
KEY = "columns"
"""The key of a row, and the column of a table, that holds the kept columns."""


def fault(value: Any) -> str | None:
    """Why a value cannot be kept, or None."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"{error}; give text, a finite number, true or false, null, or a list or object of these"
    return None


def encoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a table holds it."""
    kept = {KEY: json.dumps(row[KEY], ensure_ascii=False)} if KEY in row else {}
    return {**row, **kept}


def decoded(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `encoded` for the rows of a table."""
    return [{**row, KEY: json.loads(row[KEY])} if KEY in row else dict(row) for row in rows]


def of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The kept columns of rows that all keep the same ones."""
    names = rows[0].get(KEY, ()) if rows else ()
    return {name: [row[KEY][name] for row in rows] for name in names}


def of_row(columns: Columns, number: int) -> dict[str, Any]:
    """One row's part of the columns, as a row has it: nothing where no column is kept."""
    return {KEY: {name: values[number] for name, values in columns.items()}} if columns else {}


def take(columns: Columns, rows: Sequence[int]) -> dict[str, list[Any]]:
    return {name: [values[i] for i in rows] for name, values in columns.items()}


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with a text for each kept column, `column/NAME`, in place of `columns`: for tables for people."""
    texts = {
        f"column/{name}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in row.get(KEY, {}).items()
    }
    return {key: value for key, value in row.items() if key != KEY} | texts

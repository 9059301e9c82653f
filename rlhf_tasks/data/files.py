"""`data.source: files`: a file or a folder of JSONL, Parquet or CSV.

In a folder, the name of a file gives its role and split: `ROLE.EXT`, `ROLE.SPLIT.EXT` or `ROLE/SPLIT.EXT`,
where ROLE is sft, preferences or prompts. For `SPLIT.EXT` and for a single file the columns decide the role.
Rows are named `FILE:LINE` (Parquet: `FILE:ROW`, from 1).
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks.config import Columns, Split
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import ROLES, Corpus, Problems, Role
from rlhf_tasks.data.splits import SPLIT_NAMES, fill_splits
from rlhf_tasks.data.tables import Line, Table, assemble
from rlhf_tasks.errors import UserError


def load(
    path: Path,
    columns: Columns,
    rendering: Rendering,
    problems: Problems,
    *,
    seed: int,
    sizes: Mapping[Split, int],
) -> Corpus:
    """The rows of a file or folder, split by prompt where the files are not.

    Raises:
        UserError: if the data does not exist, the name of a file gives no role or split, or a file is
            unreadable or lacks a column.
    """
    found = _discover(path)
    tables = [(role, split, _READERS[file.suffix](file, name, problems)) for role, split, name, file in found]
    return fill_splits(assemble(tables, columns, rendering, problems), seed=seed, sizes=sizes)


def _discover(path: Path) -> list[tuple[Role | None, Split, str, Path]]:
    if path.is_file():
        if path.suffix not in _READERS:
            raise UserError(
                f"data.path={path}: {path.suffix or 'no suffix'} is not supported; use {', '.join(_READERS)}"
            )
        return [(None, "train", path.name, path)]
    if not path.is_dir():
        raise UserError(f"data.path={path} does not exist; give the file or folder that holds the data")
    found, unknown = [], []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        if not file.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        meaning = _meaning(relative)
        if meaning is not None and file.suffix in _READERS:
            found.append((*meaning, relative.as_posix(), file))
        elif file.suffix in _READERS or (meaning is not None and file.suffix in _MISTAKEN):
            unknown.append(relative.as_posix())
    known = f"ROLE.EXT, ROLE.SPLIT.EXT, ROLE/SPLIT.EXT or SPLIT.EXT; ROLE: {', '.join(ROLES)}; SPLIT: "
    known += f"{', '.join(SPLIT_NAMES)}; EXT: {', '.join(name[1:] for name in _READERS)}"
    if unknown:
        raise UserError(
            f"data.path={path}: the role or split of {', '.join(unknown)} is unknown. Name files {known}"
        )
    if not found:
        raise UserError(f"data.path={path} holds no data file. Name files {known}")
    return found


def _meaning(relative: Path) -> tuple[Role | None, Split] | None:
    """The role and split of a file, by its place in the folder; None if the name gives neither."""
    parts = [*relative.parent.parts, *relative.stem.split(".")]
    role = cast(Role, parts.pop(0)) if parts[0] in ROLES else None
    if not parts:
        return role, "train"
    return (role, SPLIT_NAMES[parts[0]]) if len(parts) == 1 and parts[0] in SPLIT_NAMES else None


_MISTAKEN = (".json", ".tsv", ".arrow", ".txt", ".gz")

# ---------------------------------------------------------------------------------------- readers


def _read_jsonl(file: Path, name: str, problems: Problems) -> Table:
    lines: list[Line] = []
    content = _text(file, name)
    _check_rows_are_lines(content, name)
    for number, text in enumerate(content.split("\n"), start=1):
        where = f"{name}:{number}"
        if not text.strip():
            continue
        if (fault := _bad_byte(text)) is not None:
            problems.add(where, {"line": text}, "not_utf8", fault)
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
            problems.add(where, {"line": text}, "malformed", f"not JSON: {error}")
            continue
        if isinstance(values, dict):
            lines.append(Line(where, values))
        else:
            problems.add(where, {"line": text}, "malformed", f"a JSON {type(values).__name__}, not an object")
    return Table(name, tuple(dict.fromkeys(key for line in lines for key in line.values)), lines)


def _check_rows_are_lines(content: str, name: str) -> None:
    """Check that the first JSON value ends on the line on which it starts.

    Raises:
        UserError: for one JSON document, or for objects that are printed over several lines.
    """
    text = content.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return  # the lines are reported one by one
    if "\n" in text[:end]:
        number = content[: len(content) - len(text)].count("\n") + 1
        what = (
            "this is one JSON document" if not text[end:].strip() else "a JSON value goes over several lines"
        )
        raise UserError(f"{name}:{number}: {what}; write one row, a JSON object, per line")


def _read_csv(file: Path, name: str, problems: Problems) -> Table:
    """Reads a header line, then a record per row. A quoted field may contain line breaks."""
    text = _text(file, name)
    _check_separator(text, name)
    records = _csv_records(text)
    header = next(records, (1, [], None))
    if header[2] is not None or not header[1]:
        raise UserError(
            f"{name}:1: no CSV header: {header[2] or 'the file is empty'}; name the columns in line 1"
        )
    columns = tuple(header[1])
    if twice := [column for column, count in Counter(columns).items() if column and count > 1]:
        raise UserError(f"{name}:1: the header names {', '.join(map(repr, twice))} twice; rename one of them")
    lines: list[Line] = []
    for number, fields, fault in records:
        where = f"{name}:{number}"
        if fault is not None:
            problems.add(where, {"fields": fields}, "malformed", f"not CSV: {fault}")
        elif (not_utf8 := _bad_byte("".join(fields))) is not None:
            problems.add(where, {"fields": fields}, "not_utf8", not_utf8)
        elif len(fields) != len(columns):
            detail = f"{len(fields)} fields, the header has {len(columns)}"
            problems.add(where, {"fields": fields}, "malformed", detail)
        else:
            lines.append(Line(where, dict(zip(columns, fields, strict=True))))
    return Table(name, columns, lines)


def _check_separator(text: str, name: str) -> None:
    """Check that no other separator than a comma makes columns of the header.

    Raises:
        UserError: naming the separator. A single column is never enough for a row.
    """
    header = text.lstrip().partition("\n")[0]
    if _num_columns(header, ",") > 1:
        return
    for separator, known in {";": "semicolons", "\t": "tabs", "|": "bars"}.items():
        if _num_columns(header, separator) > 1:
            raise UserError(
                f"{name}:1: {known} separate the columns; save the file with commas, as CSV has them"
            )


def _num_columns(header: str, separator: str) -> int:
    try:
        return len(next(csv.reader([header], delimiter=separator, strict=True), []))
    except csv.Error:
        return 0


def _csv_records(text: str) -> Iterator[tuple[int, list[str], str | None]]:
    """(first line, fields, error or None) of each record; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, [], str(error)
            continue
        if fields:
            yield start, fields, None


def _read_parquet(file: Path, name: str, problems: Problems) -> Table:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not readable as Parquet: {error}; write the file again") from None
    columns = {column: _plain_values(table.column(column)) for column in table.column_names}
    lines: list[Line] = []
    for number in range(table.num_rows):
        values = {column: cells[number] for column, cells in columns.items()}
        where = f"{name}:{number + 1}"
        faults = [_bad_byte(value) for value in values.values() if isinstance(value, str)]
        if (fault := next((f for f in faults if f is not None), None)) is not None:
            problems.add(where, values, "not_utf8", fault)
        else:
            lines.append(Line(where, values))
    return Table(name, tuple(table.column_names), lines)


def _plain_values(column: pa.ChunkedArray) -> list[Any]:
    """Python values. Strings are decoded from bytes, because Arrow does not check that they are UTF-8."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        cells = column.cast(pa.large_binary()).to_pylist()
        return [None if c is None else c.decode("utf-8", errors="surrogateescape") for c in cells]
    return [_nested_value(cell) for cell in column]


def _nested_value(cell: pa.Scalar) -> Any:
    """A list or struct as Python values. One with a bad byte becomes a text that is reported as not UTF-8."""
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", errors="surrogateescape")


def _text(file: Path, name: str) -> str:
    """The text of a file without its byte order mark; bytes that are not UTF-8 become lone surrogates.

    Raises:
        UserError: for UTF-16, of which every line would be a bad row.
    """
    content = file.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        raise UserError(f"{name} is UTF-16; save it as UTF-8")
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")


BAD_BYTE = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of it


def _bad_byte(text: str) -> str | None:
    """The first bad byte of a text decoded by surrogateescape, as a message, or None."""
    found = BAD_BYTE.search(text)
    if found is None:
        return None
    byte = ord(found[0]) - 0xDC00
    return f"byte 0x{byte:02x} after {found.start()} characters is not UTF-8; save it as UTF-8"


_READERS: Mapping[str, Callable[[Path, str, Problems], Table]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}

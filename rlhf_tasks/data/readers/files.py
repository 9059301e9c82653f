"""`data.source: files`: a file or a folder of JSON, CSV, TSV, Parquet or Arrow, also compressed.

The names of folders and files give roles (sft, preferences, prompts) and splits where they name one, as in
`sft.train.jsonl`, `test/0000.jsonl.zst` or `train_prefs-00000-of-00002.parquet`; else shapes.py decides by
the columns, and all rows are one split. The first bytes of a file tell whether it is compressed. Rows are
named `FILE:LINE`, and `FILE:ROW` from 1 in Parquet, Arrow and JSON arrays.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import PydanticSerializationError, to_jsonable_python

from rlhf_tasks import console
from rlhf_tasks.config import Split
from rlhf_tasks.data.readers.readings import Line, Lines, RoleTable, Table
from rlhf_tasks.data.rows import BATCH, ROLES, SPLITS, Problems, Role
from rlhf_tasks.data.splits import SPLIT_NAMES
from rlhf_tasks.errors import UserError

LARGE_BYTES = 2**27  # of a file that is announced


def tables_of(path: Path, problems: Problems, most: int | None = None) -> list[RoleTable]:
    """The tables of a file or folder, with the role and split that their names give, or their first rows.

    Raises:
        UserError: if the data does not exist, or a file is unreadable.
    """
    data_files, unused = discover(path)
    if unused:
        console.say(f"Not read, because it is no data file: {', '.join(unused)}")
    tables: list[RoleTable] = []
    for role, split, name, file in data_files:
        if most is None and (size := file.stat().st_size) > LARGE_BYTES:
            console.say(f"reading {name}, {size / 1e6:,.0f} MB")
        tables.append((role, split, read_file(file, name, problems, most)))
    return tables


def discover(path: Path) -> tuple[list[tuple[Role | None, Split, str, Path]], list[str]]:
    """Role and split by its name, name and path of each data file: train, validation, test. And other files.

    Raises:
        UserError: if there is no data.
    """
    known = f"{', '.join(_READERS)}, also compressed ({', '.join(_PACKED)})"
    if path.is_file():
        if _suffix(path) not in _READERS:
            raise UserError(f"data.path={path}: {path.suffix or 'no suffix'} is not supported; use {known}")
        return [(*_meaning(Path(path.name)), path.name, path)], []
    if not path.is_dir():
        raise UserError(f"data.path={path} does not exist; give the file or folder that holds the data")
    found, unused = [], []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        hidden = any(part.startswith((".", "__")) for part in relative.parts)
        if hidden or file.name in _ABOUT or (not file.is_file() and not file.is_symlink()):
            continue
        is_cache = file.suffix == ".arrow" and file.name.startswith("cache-")  # of `datasets`, of older rows
        if _suffix(file) in _READERS and file.is_file() and not is_cache:
            found.append((*_meaning(relative), relative.as_posix(), file))
        else:
            unused.append(relative.as_posix())
    if not found:
        raise UserError(f"data.path={path} holds no data file; use {known}")
    return sorted(found, key=lambda one: (SPLITS.index(one[1]), one[2])), unused


def _suffix(file: Path) -> str:
    """The suffix of the data, below that of a compression."""
    return (Path(file.stem).suffix if file.suffix in _PACKED + _REFUSED else file.suffix).lower()


def _meaning(relative: Path) -> tuple[Role | None, Split]:
    """Role and split that a path names, as a folder or as a word of the file's name; else None and train."""
    stem = relative.name.split(".")[0 : -1 - (relative.suffix in _PACKED + _REFUSED)]
    if len(stem) == 2 and stem[0] in ROLES and stem[1] not in SPLIT_NAMES:
        raise UserError(f"{relative}: {stem[1]!r} is no split; use {', '.join(SPLIT_NAMES)}")
    words = [*relative.parent.parts, *stem]
    role = next((word for word in words if word in ROLES), None)
    named = [word.casefold() for part in reversed(words) for word in re.split(r"[-_ ()]", part)]
    return role, next((SPLIT_NAMES[word] for word in named if word in SPLIT_NAMES), "train")


_PACKED = (".gz", ".zst", ".lz4")
"""The suffixes of compressions that are read."""
_REFUSED = (".bz2", ".xz", ".zip")
"""Those of others, whose files are refused, and not passed over as files without data."""
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5/\xfd": "zstd", b"\4\x22M\x18": "lz4"}
"""Compressions by the first bytes of a file, whatever its name."""
_FOREIGN = (
    (0, b"BZh", "is packed by bzip2; unpack it: bunzip2 -k {name}"),
    (0, b"\xfd7zXZ", "is packed by xz; unpack it: xz -dk {name}"),
    (0, b"PK\3\4", "is packed by ZIP, or an Excel workbook; unpack it, or save the sheet as CSV"),
    (257, b"ustar", "is a tar archive; unpack it: tar -xf {name}"),
)
"""What is refused by its bytes at a position, and what to do."""
_UTF_16 = "is UTF-16; save it as UTF-8"
_NO_TEXT = (
    (0, codecs.BOM_UTF16_LE, _UTF_16),
    (0, codecs.BOM_UTF16_BE, _UTF_16),
    (0, b"\0", _UTF_16),
    (1, b"\0", _UTF_16),
    (0, b"PAR1", "is Parquet; let its name end with .parquet"),
    (0, b"ARROW1", "is Arrow; let its name end with .arrow"),
)
"""What is refused where text is read."""
_ABOUT = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Files in which `datasets` describes the others."""

# ---------------------------------------------------------------------------------------- readers

Reader = Callable[[Path, str, Problems], Iterator[Line]]
"""The records of a file, by its path and name; a broken one goes to the problems."""


def read_file(file: Path, name: str, problems: Problems, most: int | None = None) -> Table:
    """The records of a file by its suffix; a broken one goes to `problems`.

    They are read again each time that the table's lines are. With `most`, the first records are in the
    table, and the rest of the file is not read.

    Raises:
        UserError: if the file cannot be read, or its name has another suffix.
    """
    if _suffix(file) not in _READERS:
        raise UserError(f"{name}: give a file whose name ends with {', '.join(_READERS)}")
    read = _READERS[_suffix(file)]
    columns, count, some = dict[str, None](), 0, list[Line]()
    for line in itertools.islice(read(file, name, problems), most):
        columns.update(dict.fromkeys(line.values))
        count += 1
        if most is not None:
            some.append(line)
    lines = some if most is not None else Lines(lambda: read(file, name, Problems()), count)
    return Table(name, tuple(columns), lines)


def _read_json(file: Path, name: str, problems: Problems) -> Iterator[Line]:
    """A JSON array of records, or a record per line: the content decides, not the suffix."""
    with _open(file, name) as stream:
        texts = (line.decode("utf-8", errors="surrogateescape") for line in stream)
        numbered = ((number, text) for number, text in enumerate(texts, start=1) if text.strip())
        some = list(itertools.islice(numbered, 2))
        rest: Iterable[tuple[int, str]] = itertools.chain(some, numbered)
        if some and (len(some) == 1 or not _is_json(some[0][1])):  # maybe one JSON value
            rest = list(rest)
            content = "\n" * (rest[0][0] - 1) + "".join(text for _, text in rest)
            if (whole := _records_of_document(content, name)) is not None:
                for number, values in enumerate(whole, start=1):
                    yield from _record(f"{name}:{number}", values, problems)
                return
        for number, text in rest:
            where, text = f"{name}:{number}", text.removesuffix("\n")
            if (fault := _bad_byte(text)) is not None:
                problems.add(where, {"line": text}, "not_utf8", fault)
                continue
            try:
                values = JSON.decode(text)
            except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
                problems.add(where, {"line": text}, "malformed", f"not JSON: {error}")
                continue
            yield from _record(where, values, problems)


WRAPPERS = ("data", "rows", "records", "examples", "instances")
"""The key of the records in a file that is one JSON object."""


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def _records_of_document(content: str, name: str) -> list[Any] | None:
    """The records of a JSON array, or of an object that holds one; None if the lines are records.

    Raises:
        UserError: for another JSON document, also a broken one, or for objects printed over several lines.
    """
    fault = "it is one JSON document, and no list of records"
    try:
        found = JSON.decode(content)
        found = _unwrap(found) if isinstance(found, dict) else found
        if isinstance(found, list) and all(isinstance(one, dict) or _are_objects(one) for one in found):
            return found
    except (ValueError, RecursionError) as error:
        fault = f"as one JSON document it is broken: {error}"
    lines = content.strip().split("\n")
    if 2 * sum(line.startswith(lines[0][0]) and _is_json(line) for line in lines) < len(lines):
        raise UserError(
            f"{name}: its lines are no rows, and {fault}. It is not known where its rows end, so "
            "data.on_bad_row: quarantine cannot leave one out; write one row, a JSON object, per line, or "
            "move a file that holds no rows out of the folder"
        )
    return None


def _unwrap(whole: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The records of `{"data": [...]}`, with its other keys, or of `{"train": [...], "test": [...]}`.

    None for any other object, also one whose other keys the records have: it is a record itself.
    """
    wrapper = next((key for key in WRAPPERS if isinstance(whole.get(key), list)), None)
    parts: dict[str, dict[str, Any]] = {}
    if whole.keys() <= SPLIT_NAMES.keys():
        parts = {split: {"split": split} for split in whole}
    elif wrapper is not None:
        parts = {wrapper: {key: value for key, value in whole.items() if key != wrapper}}
    if not parts or not all(_are_objects(whole[key]) for key in parts):
        return None
    pairs = [(others, row) for key, others in parts.items() for row in whole[key]]
    if any(others.keys() & row.keys() for others, row in pairs):
        return None
    return [others | row for others, row in pairs]


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands there twice would lose its first value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return values


JSON = json.JSONDecoder(object_pairs_hook=_once)


def _record(where: str, values: Any, problems: Problems) -> Iterator[Line]:
    """A JSON value as a record: an object, or a list of objects as the column `records`."""
    if values and _are_objects(values):
        values = {"records": values}
    if not isinstance(values, dict):
        line = {"line": json.dumps(values)}
        problems.add(where, line, "malformed", f"a JSON {type(values).__name__}, not an object")
    elif fault := next((f for v in values.values() if isinstance(v, str) and (f := _bad_byte(v))), None):
        problems.add(where, values, "not_utf8", fault)
    else:
        yield Line(where, values)


def _read_csv(file: Path, name: str, problems: Problems, separator: str = ",") -> Iterator[Line]:
    """Reads a header line, then a record per row. A quoted field may contain line breaks."""
    with _open(file, name) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        lines = ((number, line) for number, line in enumerate(text) if line.strip())
        skipped, first = next(lines, (0, ""))
        at = f"{name}:{skipped + 1}"
        if re.match(r'"?sep=', first, re.IGNORECASE):
            raise UserError(f"{at}: {first.strip()} is a hint for Excel, not the header; delete the line")
        separators = (separator, ";", "\t", "|")  # Excel and databases write the others
        used = next((one for one in separators if _num_columns(first, one) > 1), separator)
        records = _csv_records(itertools.chain([first], text), used, name, skipped)
        at, columns, _ = next(records, (at, [], False))
        if not columns:
            raise UserError(f"{at}: no CSV header: the file is empty; name the columns in the first line")
        if twice := [repr(column) for column, count in Counter(columns).items() if column and count > 1]:
            raise UserError(f"{at}: the header names {', '.join(twice)} twice; rename one of them")
        for where, fields, has_quotes in records:
            if len(fields) != len(columns):
                detail = f"{len(fields)} fields, the header has {len(columns)}"
                if has_quotes:  # one of them may be a stray one, and the record longer or shorter
                    raise _without_end(where, detail)
                problems.add(where, {"fields": fields}, "malformed", detail)
            elif (not_utf8 := _bad_byte("".join(fields))) is not None:
                problems.add(where, {"fields": fields}, "not_utf8", not_utf8)
            else:
                yield Line(where, dict(zip(columns, fields, strict=True)))


def _num_columns(header: str, separator: str) -> int:
    """A single column is never enough for a row."""
    with suppress(csv.Error):
        return len(next(csv.reader([header.rstrip("\n")], delimiter=separator, strict=True), []))
    return 0


csv.field_size_limit(2**31 - 1)


def _csv_records(
    lines: Iterable[str], separator: str, name: str, skipped: int
) -> Iterator[tuple[str, list[str], bool]]:
    """(place, fields, whether it has quotes) of each record after `skipped` lines, without blank ones.

    Raises:
        UserError: at a record that is not CSV.
    """
    read = list[str]()

    def remembered() -> Iterator[str]:
        for line in lines:
            read.append(line)
            yield line

    reader = csv.reader(remembered(), strict=True, delimiter=separator)
    while True:
        where = f"{name}:{reader.line_num + 1 + skipped}"
        read.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_open = str(error) == "unexpected end of data"
            raise _without_end(where, "a quote is never closed" if is_open else str(error)) from None
        if fields:
            yield where, fields, any('"' in line for line in read)


def _without_end(where: str, fault: str) -> UserError:
    """A CSV record whose quotes may not match: the lines after it may be of its fields, or rows."""
    return UserError(
        f"{where}: not CSV: {fault}. It is not known where the next record begins, so data.on_bad_row: "
        "quarantine cannot leave this one out; write a quote inside a quoted field twice, and quote each "
        "field that has a separator or a line break"
    )


def _read_arrow(file: Path, name: str, problems: Problems, form: str = "Arrow") -> Iterator[Line]:
    """Parquet, or Arrow: a stream, as `datasets.save_to_disk` writes it, or a file."""
    try:
        with _map_file(file, name) as mapped:
            if form == "Parquet":
                batches = pq.ParquetFile(mapped).iter_batches(BATCH)
            else:
                is_file = mapped.read_at(6, 0) == b"ARROW1"
                opened = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
                batches = opened.read_all().to_batches(BATCH)
            yield from _of_arrow(batches, name, problems)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not readable as {form}: {error}; write the file again") from None
    except KeyError as error:  # as pytz and zoneinfo have it
        raise UserError(f"{name} has times in an unknown time zone, {error}; write them in UTC") from None


def _of_arrow(batches: Iterable[pa.RecordBatch], name: str, problems: Problems) -> Iterator[Line]:
    numbers = itertools.count(1)
    for batch in batches:
        columns = [_convert_column(column) for column in batch.columns]
        for cells in zip(*columns, strict=True):
            values, where = dict(zip(batch.schema.names, cells, strict=True)), f"{name}:{next(numbers)}"
            faults = (_bad_byte(value) for value in cells if isinstance(value, str))
            if fault := next(filter(None, faults), None):
                problems.add(where, values, "not_utf8", fault)
            else:
                yield Line(where, values)


def _convert_column(column: pa.Array) -> list[Any]:
    """Python values. Strings are decoded from bytes, because Arrow does not check that they are UTF-8."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        cells = column.cast(pa.large_binary()).to_pylist()
        return [None if c is None else c.decode("utf-8", errors="surrogateescape") for c in cells]
    return [_convert_cell(cell) for cell in column]


def _convert_cell(cell: pa.Scalar) -> Any:
    """A value of another type. One with a bad byte becomes a text that is reported as not UTF-8."""
    try:
        return plain_value(cell.as_py())
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", errors="surrogateescape")
    except (ValueError, OverflowError):  # a date that Python does not have
        return cell.cast(pa.string()).as_py()


def plain_value(value: Any) -> Any:
    """A value as JSON has it: a Decimal by its digits, times in ISO 8601, bytes as text, a map as an object.

    What JSON does not have stays as it is: an image, or bytes that are not UTF-8.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and value and all(type(pair) is tuple for pair in value):
        value = dict(value)  # pyarrow gives the pairs of a map
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Decimal):
        return f"{value:f}"
    if hasattr(value, "tolist"):  # of NumPy
        return plain_value(value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    with suppress(UnicodeDecodeError, PydanticSerializationError):
        return value.decode() if isinstance(value, bytes) else to_jsonable_python(value)
    return value


def _map_file(file: Path, name: str) -> pa.NativeFile:
    """A file of Parquet or Arrow, mapped into memory, or unpacked there."""
    with _open(file, name, of_tables=True) as stream:
        is_plain = isinstance(stream.raw, io.FileIO)
        return pa.memory_map(str(file)) if is_plain else pa.BufferReader(stream.read())


@contextmanager
def _open(file: Path, name: str, *, of_tables: bool = False) -> Iterator[io.BufferedReader]:
    """The content of a file, unpacked, without its byte order mark.

    Raises:
        UserError: if it cannot be unpacked, or is something else, as Parquet is but for readers `of_tables`.
    """
    try:
        with file.open("rb") as stream:
            packing = next((codec for begin, codec in _CODECS.items() if stream.peek().startswith(begin)), "")
            if packing:
                raw: Any = pa.CompressedInputStream(pa.PythonFile(stream), packing)
                stream = io.BufferedReader(raw)
            head = stream.peek()
            for start, begin, advice in _FOREIGN if of_tables else (*_FOREIGN, *_NO_TEXT):
                if head.startswith(begin, start):
                    raise UserError(f"{name} {advice.format(name=name)}")
            if head.startswith(codecs.BOM_UTF8):
                stream.read(3)
            yield stream
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} cannot be unpacked: {error}; write the file again") from None


BAD_BYTE = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of it


def _bad_byte(text: str) -> str | None:
    """The first bad byte of a text decoded by surrogateescape, as a message, or None."""
    if text.isascii() or (bad := BAD_BYTE.search(text)) is None:
        return None
    byte = ord(bad[0]) - 0xDC00
    return f"byte 0x{byte:02x} after {bad.start()} characters is not UTF-8; save it as UTF-8"


_READERS: Mapping[str, Reader] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".parquet": partial(_read_arrow, form="Parquet"),
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, separator="\t"),
}

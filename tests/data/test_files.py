from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config import Columns, Data, Split
from rlhf_tasks.data.readers import files
from rlhf_tasks.data.rows import SPLITS, Corpus, Problems
from rlhf_tasks.data.tokenizer import scratch_rendering
from rlhf_tasks.errors import UserError
from tests import toy
from tests.conftest import Command
from tests.data import conftest
from tests.data.conftest import NAMED, demonstrations, jsonl
from tests.small import ROOT

SIZES: dict[Split, int] = {"validation": 2, "test": 2}


def load(path: Path, problems: Problems | None = None, columns: Columns = NAMED) -> Corpus:
    found = Problems() if problems is None else problems
    corpus = conftest.load(path, Data(columns=columns), scratch_rendering(), found, seed=1, sizes=SIZES)
    assert problems is not None or not found, found.report()
    return corpus


def texts(corpus: Corpus) -> list[tuple[str, ...]]:
    """(split, prompt, completion) of the demonstrations, in order."""
    return [(split, row["prompt"], row["completion"]) for split in SPLITS for row in corpus["sft"][split]]


def write_csv(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)


def test_jsonl_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    rows = [*demonstrations(9), {"prompt": 'a "quoted", odd\nprompt – ü ?', "completion": " two\nlines"}]
    one = jsonl(tmp_path / "a.jsonl", *rows)
    two, three = tmp_path / "b.csv", tmp_path / "c.parquet"
    write_csv(two, rows)
    pq.write_table(pa.Table.from_pylist(rows), three)
    first, *others = [texts(load(path)) for path in (one, two, three)]
    assert len(first) == 10
    assert others == [first, first]


def test_every_bad_line_of_every_file_is_named_at_its_line(tmp_path: Path) -> None:
    good = [json.dumps(row).encode() for row in demonstrations(4)]
    lines = [
        good[0],
        b'{"prompt": "torn',
        b"",
        b"[1, 2]",
        b'{"prompt": "caf\xe9", "completion": "x"}',
        good[1],
        b'{"prompt": 3, "completion": "x"}',
        b'{"prompt": "p"}',
        b'{"prompt": "lone \\ud800", "completion": "x"}',
        b'{"prompt": "p", "completion": 5}',
        good[2],
    ]
    (tmp_path / "sft.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    (tmp_path / "preferences.csv").write_bytes(
        b'prompt,chosen,rejected\r\n"two\r\nlines",a,b\r\nshort,a\r\ncaf\xe9,a,b\r\nok,a,b,c\r\nlast,a,b\r\n'
    )
    table = pa.table(
        {name: pa.array([b"fine", b"\xff"]).cast(pa.binary()) for name in ("prompt", "completion")}
    )
    strings = [pa.StringArray.from_buffers(2, *c.chunk(0).buffers()[1:]) for c in table.columns]
    pq.write_table(pa.table(strings, names=table.column_names), tmp_path / "prompts.parquet")
    problems = Problems()
    corpus = load(tmp_path, problems)
    faults = [json.loads(line) for line in problems.lines()]
    bad_lines = {f"{bad['where']} {bad['problems'][0]['reason']}" for bad in faults}
    assert bad_lines == {
        "sft.jsonl:2 malformed",
        "sft.jsonl:4 malformed",
        "sft.jsonl:5 not_utf8",
        "sft.jsonl:7 malformed",
        "sft.jsonl:8 malformed",
        "sft.jsonl:9 not_utf8",
        "sft.jsonl:10 malformed",
        "preferences.csv:4 malformed",
        "preferences.csv:5 not_utf8",
        "preferences.csv:6 malformed",
        "prompts.parquet:2 not_utf8",
    }
    assert sum(len(corpus["sft"][split]) for split in SPLITS) == 3
    kept = {(r["prompt"], r["source"]) for split in SPLITS for r in corpus["preferences"][split]}
    assert kept == {("two\r\nlines", "preferences.csv:2"), ("last", "preferences.csv:7")}


def test_all_missing_columns_are_in_one_error_with_the_columns_of_the_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "sft.jsonl", {"topic": "q", "words": "a"})
    jsonl(tmp_path / "preferences.jsonl", {"prompt": "q", "best": "a", "rejected": "b"})
    with pytest.raises(UserError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "sft.jsonl has no known shape; its columns are topic (text), words (text)" in message
    assert "preferences.jsonl has no known shape; its columns are prompt (text), best (text)" in message


def test_columns_are_mapped(tmp_path: Path) -> None:
    named = Columns(prompt="instruction", completion="output", chosen="win", rejected="lose", keep=())
    jsonl(
        tmp_path / "sft.jsonl", *({"instruction": f"i {n}", "output": f" o {n}", "id": n} for n in range(8))
    )
    jsonl(
        tmp_path / "preferences.jsonl",
        *({"instruction": f"i {n}", "win": "w", "lose": "l"} for n in range(8)),
    )
    corpus = load(tmp_path, columns=named)
    assert {row["prompt"][:2] for row in corpus["sft"]["train"]} == {"i "}
    assert {(row["chosen"], row["rejected"]) for row in corpus["preferences"]["train"]} == {("w", "l")}


def test_file_names_give_role_and_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "sft.jsonl", *demonstrations(8))
    jsonl(tmp_path / "sft.test.jsonl", {"prompt": "t", "completion": "t"})
    jsonl(tmp_path / "sft" / "valid.jsonl", {"prompt": "v", "completion": "v"})
    jsonl(tmp_path / "prompts.train.jsonl", {"prompt": "p", "reference": "r"})
    (tmp_path / "README.md").write_text("no data", encoding="utf-8")
    corpus = load(tmp_path)
    assert [len(corpus["sft"][split]) for split in SPLITS] == [8, 1, 1]
    assert corpus["sft"]["validation"][0]["source"] == "sft/valid.jsonl:1"
    assert list(corpus["prompts"]["train"]) == [
        {"prompt": "p", "reference": "r", "source": "prompts.train.jsonl:1"}
    ]


def test_files_named_by_split_get_their_role_from_their_columns(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", *({"prompt": f"{n}", "chosen": "w", "rejected": "l"} for n in range(8)))
    jsonl(tmp_path / "test.jsonl", {"prompt": "t", "chosen": "w", "rejected": "l"})
    jsonl(tmp_path / "Test (1).jsonl", {"prompt": "u", "chosen": "w", "rejected": "l"})
    corpus = load(tmp_path)
    assert set(corpus) == {"preferences"}
    assert [len(corpus["preferences"][split]) for split in SPLITS] == [6, 2, 2]


def test_a_path_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none does not exist"):
        load(tmp_path / "none")
    (tmp_path / "notes.md").write_text("no data", encoding="utf-8")
    with pytest.raises(UserError, match="holds no data file"):
        load(tmp_path)
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(UserError, match=r"\.xlsx is not supported; use \.jsonl, .*\.csv"):
        load(tmp_path / "a.xlsx")


def test_the_shipped_examples_are_good() -> None:
    corpus = load(ROOT / "rlhf_tasks" / "data" / "examples")
    found = {role: sum(map(len, tables.values())) for role, tables in corpus.items()}
    assert found == {"sft": 40, "preferences": 40}


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_header_of_a_csv_file_tells_its_separator(tmp_path: Path, separator: str) -> None:
    """Excel separates by semicolons where numbers have a decimal comma, and writes a byte order mark."""
    text = f'\ufeff"prompt"{separator}completion\r\n"a, b; c"{separator}d\r\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    [line] = files.read_file(tmp_path / "a.csv", "a.csv", Problems()).lines
    assert line.values == {"prompt": "a, b; c", "completion": "d"}


def tar(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rows"), io.BytesIO(content))
    return out.getvalue()


def parquet(content: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt": pa.array([content])}), out)
    return out.getvalue()


ROW = {"prompt": "p", "completion": "c"}
TEXT = b"prompt,completion\na,b\n"
PRINTED = json.dumps(ROW, indent=1).encode()
MARS = parquet(pa.scalar(1, pa.timestamp("us", "Mars/Phobos")))
BROKEN = "its lines are no rows, and as one JSON document it is broken"
REFUSED: list[tuple[str, bytes, str]] = [
    ("sft.trian.jsonl", b"{}", "sft.trian.jsonl: 'trian' is no split"),
    ("sft.jsonl", bz2.compress(TEXT), "sft.jsonl is packed by bzip2; unpack it: bunzip2 -k sft.jsonl"),
    ("sft.jsonl.bz2", bz2.compress(TEXT), "sft.jsonl.bz2 is packed by bzip2; unpack it: bunzip2"),
    ("sft.json", lzma.compress(TEXT), "sft.json is packed by xz; unpack it: xz -dk sft.json"),
    ("sft.parquet.xz", lzma.compress(TEXT), "sft.parquet.xz is packed by xz; unpack it: xz"),
    ("sft.csv", b"PK\3\4" + TEXT, "sft.csv is packed by ZIP, or an Excel workbook; unpack it"),
    ("sft.csv", tar(TEXT), "sft.csv is a tar archive; unpack it: tar -xf sft.csv"),
    ("sft.jsonl.gz", gzip.compress(tar(TEXT), mtime=0), "sft.jsonl.gz is a tar archive; unpack it"),
    ("sft.jsonl", parquet("a"), "sft.jsonl is Parquet; let its name end with .parquet"),
    *(
        ("sft.csv", TEXT.decode().encode(encoding), "sft.csv is UTF-16; save it")
        for encoding in ("utf-16", "utf-16-le", "utf-16-be")
    ),
    ("sft.parquet", b"PAR1 torn", "sft.parquet is not readable as Parquet"),
    ("sft.jsonl", b"\n" + PRINTED, "sft.jsonl: its lines are no rows, and it is one JSON document"),
    ("a.json", b'[{"a": 1,\n"a": 2}]', f"a.json: {BROKEN}: an object has the key 'a' twice"),
    ("sft.jsonl", PRINTED + b"\n" + PRINTED, f"sft.jsonl: {BROKEN}: Extra data"),
    ("sft.csv", b"prompt,completion,prompt\na,b,c\n", "sft.csv:1: the header names 'prompt' twice"),
    ("a.csv", b"sep=;\nprompt;completion\na;b\n", "a.csv:1: sep=; is a hint for Excel, not the header"),
    ("a.parquet", MARS, "a.parquet has times in an unknown time zone, 'Mars/Phobos'; write"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_a_file_that_cannot_be_read_is_one_message_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert str(error.value).startswith(message)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.json", "a.parquet"])
def test_a_sample_is_the_beginning_of_what_the_whole_file_gives(name: str, tmp_path: Path) -> None:
    records = [{"prompt": f"q{i}", "completion": f"line\nbreak {i}"} for i in range(50)]
    file = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), file)
    elif name.endswith(".csv"):
        write_csv(file, records)
    else:
        text = json.dumps(records) if name == "a.json" else "".join(json.dumps(r) + "\n" for r in records)
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    whole = files.read_file(file, name, Problems())
    assert len(whole.lines) == 50
    problems = Problems()
    some = files.read_file(file, name, problems, 20)
    assert not problems, problems.report()
    assert list(some.lines) == list(whole.lines)[:20]


def values_of(file: Path) -> list[Any]:
    return [line.values for line in files.read_file(file, file.name, Problems()).lines]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("content", "records"),
    [
        ({"data": [ROW, ROW]}, [ROW, ROW]),
        ({"version": "1", "rows": [ROW]}, [{"version": "1", **ROW}]),
        ({"train": [ROW], "dev": [], "test": [ROW]}, [{"split": "train", **ROW}, {"split": "test", **ROW}]),
        ([[ROW, ROW], [ROW]], [{"records": [ROW, ROW]}, {"records": [ROW]}]),
    ],
)
def test_a_file_of_one_json_value_keeps_what_it_holds(
    tmp_path: Path, content: Any, records: list[Any], indent: int | None
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent), encoding="utf-8")
    assert values_of(tmp_path / "a.json") == records


@pytest.mark.parametrize("record", [ROW | {"examples": [ROW]}, {"prompt": {}}])
def test_a_record_that_holds_others_is_one_record(tmp_path: Path, record: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert values_of(tmp_path / "a.jsonl") == [record]


def prepare(folder: str) -> None:
    """What `rlhf prepare` needs to read the files of a folder."""
    toy.copy_project()
    toy.foreign("foreign/base", "gpt2")
    toy.write_params(data={"path": folder, "num_validation": 2, "num_test": 2})


@pytest.mark.parametrize("role", ["demonstrations", "pairs"])
@pytest.mark.parametrize("empty", ["test.jsonl", "validation.csv", "test.parquet"])
def test_a_split_without_rows_is_taken_from_train(
    role: str, empty: str, project: Path, rlhf: Command
) -> None:
    answers = {"chosen": "a b", "rejected": "a c"} if role == "pairs" else {"completion": "a b"}
    jsonl(project / "some/train.jsonl", *({"prompt": f"q {i}", **answers} for i in range(12)))
    (project / "some" / empty).write_text("prompt,completion\n" if empty.endswith("csv") else "")
    if empty.endswith("parquet"):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), project / "some" / empty)
    prepare("some")
    rlhf("prepare")
    counts = [pq.read_table(f"data/prompts/{split}.parquet").num_rows for split in SPLITS]
    assert counts == [8, 2, 2]


def test_held_out_rows_alone_are_refused_by_what_holds_them_out(project: Path, rlhf: Command) -> None:
    jsonl(project / "some/test.jsonl", *demonstrations(12))
    prepare("some")
    told = rlhf("prepare", status=2).err
    assert "no usable row is left for sft/train" in told
    assert "all rows are held out by their file's name or their `split`" in told
    assert "at least 4" not in told

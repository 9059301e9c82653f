"""`rlhf data`: what it says, and what it writes."""

from __future__ import annotations

import datetime
import gzip
import io
import json
from decimal import Decimal
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import toy
from tests.conftest import Command

CASES = Path(__file__).parent / "cases"


pytestmark = pytest.mark.usefixtures("here")


def test_it_says_shape_unused_columns_rows_and_lengths(rlhf: Command) -> None:
    out = rlhf("data", CASES / "11_helpsteer2/HelpSteer2").out
    assert "train.jsonl.gz | none | train | 8" in out
    assert "pairs of the rows that have the same prompt: prompt = prompt, response = response, score" in out
    assert "not used: correctness, coherence, complexity, verbosity" in out
    assert "2 row(s) make no row: all scores are equal (3 and 3) (train.jsonl.gz:5, train.jsonl.gz:6)" in out
    assert "prompt (7 tokens): When|do|I|prune|an|apple|tree?" in out
    assert "response tokens" in out
    assert "none over data.max_prompt_tokens=80" in out


def test_it_says_that_no_table_has_a_column_of_data_columns(rlhf: Command) -> None:
    toy.write_given()
    toy.foreign("foreign/base", "gpt2")
    toy.write_params(data={"columns": {"completion": "answr"}})
    assert "Note: data.columns names what no table has (completion: 'answr')" in rlhf("data given").out


def test_it_shows_tokens_of_the_base_models_tokenizer(rlhf: Command) -> None:
    toy.write_given()
    toy.foreign("foreign/base", "gpt2")
    toy.write_params()
    assert "|now|<eos>" in rlhf("data given").out, "words alone, as for a model from scratch, have no end"


def test_what_it_writes_is_read_again(rlhf: Command) -> None:
    words = [CASES / "12_nectar/data/rlaif.parquet", "--write", "out"]
    rlhf("data", *words)
    rows = pq.read_table("out/preferences/train.parquet").to_pylist()
    assert len(rows) == 6
    assert rows[0]["chosen"] == "Dill, because its fresh taste does not cover the fish."
    assert "preferences: 6 train" in rlhf("data out").out
    assert "the folder is not empty" in rlhf("data", *words, status=2).err


def test_unpaired_labels_are_counted_and_what_it_writes_is_read_again(rlhf: Command) -> None:
    toy.foreign("foreign/base", "gpt2")
    toy.write_params(data={"format": "unpaired_labels"})
    for words in ([CASES / "16_kto/train.jsonl", "--write", "out"], ["out"]):
        said = rlhf("data", *words).out
        assert "unpaired labels: 4 good and 4 bad; dpo.loss: kto alone learns from both" in said
        assert "preferences: 8 train" in said
        assert said.count("    prompt (") == 3, "that of a bad response is shown too"
    table = pq.read_table("out/preferences/train.parquet").to_pylist()
    assert "".join("-+"[row["rejected"] is None] for row in table) == "+-+--++-"
    assert all((row["chosen"] is None) != (row["rejected"] is None) for row in table)
    Path("params.yaml").unlink()
    assert "8 row(s) of the data cannot be used (8 empty)" in rlhf("data out", status=2).out


def test_without_a_usable_row_it_ends_with_2(rlhf: Command) -> None:
    assert "data.format to label_pairs" in rlhf("data", CASES / "16_kto/train.jsonl", status=2).err
    Path("empty.csv").write_text("prompt,completion\nhow?,\n", "utf-8")
    said = rlhf("data empty.csv", status=2)
    assert "completion is empty" in said.out
    assert "no row of empty.csv can be used" in said.err


def test_a_row_of_an_unknown_split_is_named(rlhf: Command) -> None:
    lines = "prompt,completion,split\na,b,train\nc,d,holdout\ne,f,dev\n"
    Path("rows.csv").write_text(lines, "utf-8")
    out = rlhf("data rows.csv").out
    assert "rows.csv:3: malformed: split is 'holdout'; give train, validation or test" in out
    assert "sft: 1 train, 1 validation" in out


def test_a_set_of_the_hub_is_sampled(here: Path, rlhf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub: only where it is not below the working folder is its name a hub id."""
    rows = [{"prompt": f"question {i}?", "completion": f"answer {i}"} for i in range(5)]
    (here / "hub/owner/name").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), here / "hub/owner/name/train.parquet")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: load(str(here / "hub" / name), **how))
    out = rlhf("data owner/name").out
    assert "owner/name/train: demonstrations: prompt = prompt, completion = completion" in out
    assert "fetch owner/name into a folder first" in rlhf("data owner/name --all", status=2).err


def test_a_path_that_is_nothing_is_named(rlhf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = rlhf("data no/such", status=2).err
    assert "no/such is no file or folder here, and could not be read from the hub" in message
    assert "data.path=no/such.jsonl does not exist" in rlhf("data no/such.jsonl", status=2).err


def test_a_packed_file_is_read_whatever_its_name(rlhf: Command) -> None:
    """A download may keep the name of what was sent compressed, or of what its client has unpacked."""
    text = "".join(json.dumps({"prompt": f"q {i}", "completion": f"a {i}"}) + "\n" for i in range(3)).encode()
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"prompt": "q 0", "completion": "a 0"}]), table)
    zstd = pa.Codec("zstd").compress(text, asbytes=True)
    Path("plain.jsonl.gz").write_bytes(text)
    Path("table.parquet").write_bytes(gzip.compress(table.getvalue()))
    Path("gz.jsonl").write_bytes(gzip.compress(text))
    Path("zstd.jsonl").write_bytes(zstd)
    for name in ("plain.jsonl.gz", "gz.jsonl", "zstd.jsonl", "table.parquet"):
        assert ":1\n    prompt (2 tokens): q|0\n" in rlhf("data", name).out
    Path("zip.jsonl").write_bytes(b"PK\3\4" + text)
    assert rlhf("data zip.jsonl", status=2).err.startswith("rlhf: zip.jsonl is packed by ZIP, or an")


DAY = datetime.datetime(2024, 5, 6, 7, 8, 9)
ANSWERS: dict[str, tuple[pa.Array, str]] = {
    "decimal": (pa.array([Decimal("12.50")]), "12.50"),
    "small decimal": (pa.array([Decimal("0E-10")], pa.decimal256(40, 10)), "0.0000000000"),
    "date": (pa.array([DAY.date()]), "2024-05-06"),
    "far date": (pa.array([25 * 146_097], pa.int32()).cast(pa.date32()), "11970-01-01"),
    "time": (pa.array([DAY.time()]), "07:08:09"),
    "timestamp": (pa.array([DAY]), "2024-05-06T07:08:09"),
    "nanoseconds": (pa.array([DAY], pa.timestamp("ns", "UTC")), "2024-05-06T07:08:09+00:00"),
    "duration": (pa.array([90], pa.duration("s")), "PT1M30S"),
    "dictionary": (pa.array(["yes"]).dictionary_encode(), "yes"),
    "large": (pa.array(["yes"], pa.large_string()), "yes"),
    "view": (pa.array(["yes"], pa.string_view()), "yes"),
    "binary": (pa.array([b"yes"]), "yes"),
    "fixed binary": (pa.array([b"yes"], pa.binary(3)), "yes"),
    "json": (pa.array(["yes"], pa.json_(pa.string())), "yes"),
    "uuid": (pa.array([b"0" * 16], pa.uuid()), "30303030-3030-3030-3030-303030303030"),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_an_answer_of_any_type_is_read_as_it_is_written(kind: str, suffix: str, rlhf: Command) -> None:
    """Beside what no text is, such as a picture."""
    column, text = ANSWERS[kind]
    given = pa.table({"prompt": pa.array(["q"]), "completion": column, "image": pa.array([b"\xff\xd8"])})
    if suffix == "parquet":
        pq.write_table(given, "rows.parquet", store_schema=True)
    else:
        with pa.ipc.new_file("rows.arrow", given.schema) as out:
            out.write_table(given)
    rlhf(f"data rows.{suffix} --write out")
    [row] = pq.read_table("out/sft/train.parquet").to_pylist()
    assert row["completion"] == text


def test_values_of_any_type_within_others_are_read_and_no_column_is_called_absent(rlhf: Command) -> None:
    rated = [{"text": "good", "score": Decimal("2.5")}, {"text": "bad", "score": Decimal("0.5")}]
    Path("pairs").mkdir()
    given = pa.table({"prompt": pa.array([b"q"]), "answers": pa.array([rated])})
    pq.write_table(given, "pairs/a.parquet")
    rlhf("data pairs --write out")
    [row] = pq.read_table("out/preferences/train.parquet").to_pylist()
    assert (row["chosen"], row["rejected"]) == ("good", "bad")
    half, facts = (
        pa.array([0.5], pa.float16()),
        pa.array([[("a", DAY)]], pa.map_(pa.string(), pa.timestamp("s"))),
    )
    pq.write_table(pa.table({"half": half, "facts": facts, "image": pa.array([b"\xff"])}), "other.parquet")
    told = rlhf("data other.parquet", status=2).err
    assert "its columns are half (number), facts (object), image (bytes)" in told


def test_written_rows_have_their_kept_columns(rlhf: Command) -> None:
    """What is written is read again with the same settings."""
    toy.foreign("foreign/base", "gpt2")
    toy.write_params(data={"columns": {"keep": ["answer"]}})
    answers = [{"n": 1}, 5]
    rows = [{"prompt": f"q{i}", "completion": "a", "answer": answer} for i, answer in enumerate(answers)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = rlhf("data rows.jsonl --write out").err
    written = [json.loads(line) for line in Path("out/sft/train.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in written] == answers, said
    assert [set(row) for row in written] == [{"prompt", "completion", "source", "answer"}] * 2
    assert rlhf("data out --write again").out
    again = [json.loads(line) for line in Path("again/sft/train.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["completion"], row["answer"]) for row in again] == [
        (row["prompt"], row["completion"], row["answer"]) for row in written
    ]

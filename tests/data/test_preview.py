"""`rlhf data`: what it says, and what it writes."""

from __future__ import annotations

from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import toy
from tests.conftest import Command

CASES = Path(__file__).parent / "cases"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_shape_unused_columns_rows_and_lengths(rlhf: Command) -> None:
    out = rlhf("data", CASES / "11_helpsteer2/HelpSteer2").out
    assert "train.jsonl.gz | none | train | 8" in out
    assert "pairs of the rows that have the same prompt, by helpfulness" in out
    assert "not used: correctness, coherence, complexity, verbosity" in out
    assert "2 row(s) make no row: all scores are equal (3 and 3) (train.jsonl.gz:5, train.jsonl.gz:6)" in out
    assert "prompt (7 tokens): When|do|I|prune|an|apple|tree?" in out
    assert "response tokens" in out
    assert "none over data.max_prompt_tokens=80" in out


def test_it_shows_tokens_of_the_base_models_tokenizer(rlhf: Command) -> None:
    toy.write_given()
    toy.foreign("foreign/base", "gpt2")
    toy.write_params()
    assert "|now|<eos>" in rlhf("data given").out, "words alone, as for a model from scratch, have no end"


def test_what_it_writes_is_read_again(folder: Path, rlhf: Command) -> None:
    words = [CASES / "12_nectar/data/rlaif.parquet", "--write", "out"]
    rlhf("data", *words)
    rows = pq.read_table(folder / "out/preferences/train.parquet").to_pylist()
    assert len(rows) == 6
    assert rows[0]["chosen"] == "Dill, because its fresh taste does not cover the fish."
    assert "preferences: 6 train" in rlhf("data out").out
    assert "the folder is not empty" in rlhf("data", *words, status=2).err


def test_unpaired_labels_are_refused_with_the_ways_on(rlhf: Command) -> None:
    assert "data.format to label_pairs" in rlhf("data", CASES / "16_kto/train.jsonl", status=2).err


def test_without_a_usable_row_it_ends_with_2(folder: Path, rlhf: Command) -> None:
    (folder / "empty.csv").write_text("prompt,completion\nhow?,\n", "utf-8")
    said = rlhf("data empty.csv", status=2)
    assert "completion is empty" in said.out
    assert "no row of empty.csv can be used" in said.err


def test_a_row_of_an_unknown_split_is_named(folder: Path, rlhf: Command) -> None:
    lines = "prompt,completion,split\na,b,train\nc,d,holdout\ne,f,dev\n"
    (folder / "rows.csv").write_text(lines, "utf-8")
    out = rlhf("data rows.csv").out
    assert "rows.csv:3: malformed: split is 'holdout'; give train, validation or test" in out
    assert "sft: 1 train, 1 validation" in out


def test_a_set_of_the_hub_is_sampled(folder: Path, rlhf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub: only where it is not below the working folder is its name a hub id."""
    rows = [{"prompt": f"question {i}?", "completion": f"answer {i}"} for i in range(5)]
    (folder / "hub/owner/name").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "hub/owner/name/train.parquet")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: load(str(folder / "hub" / name), **how))
    out = rlhf("data owner/name").out
    assert "owner/name/train: demonstrations: prompt = prompt, completion = completion" in out
    assert "fetch owner/name into a folder first" in rlhf("data owner/name --all", status=2).err


def test_a_path_that_is_nothing_is_named(rlhf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = rlhf("data no/such", status=2).err
    assert "no/such is no file or folder here, and could not be read from the hub" in message

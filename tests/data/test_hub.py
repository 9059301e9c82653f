"""Through `datasets.load_dataset` on local folders with the columns of the TL;DR sets on the hub."""

from __future__ import annotations

from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config import Columns, Data, HubSet, HubSources, Split
from rlhf_tasks.data import hub
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import SPLITS, Corpus, Problems, check_leaks
from rlhf_tasks.data.splits import fill_splits
from rlhf_tasks.data.tables import Part, assemble
from rlhf_tasks.errors import UserError

SIZES: dict[Split, int] = {"validation": 3, "test": 3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def post(number: int) -> str:
    return f"SUBREDDIT: r/advice\n\nTITLE: title {number}\n\nPOST: my story {number}\n\nTL;DR:"


def tldr(folder: Path, **ranges: range) -> HubSet:
    folder.mkdir()
    for split, numbers in ranges.items():
        rows = [{"prompt": post(n), "completion": f" story {n}"} for n in numbers]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return HubSet(id=str(folder), revision="0" * 40, name=None)


def tldr_preference(folder: Path, **ranges: range) -> HubSet:
    folder.mkdir()
    for split, numbers in ranges.items():
        rows = [
            {"prompt": post(n), "chosen": f" good {n}", "rejected": " bad", "policies": ["a", "b"]}
            for n in numbers
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return HubSet(id=str(folder), revision="0" * 40, name=None)


def load(sft: HubSet, preferences: HubSet | None, columns: Columns, plain: Rendering) -> Corpus:
    problems = Problems()
    tables = hub.tables_of(HubSources(sft=sft, preferences=preferences))
    corpus = assemble([Part(tables, Data(columns=columns))], plain, problems)
    corpus = fill_splits(corpus, seed=1, sizes=SIZES)
    check_leaks(corpus, problems)
    assert not problems, problems.report()
    return corpus


def test_tldr_columns_and_splits_are_read_and_rows_name_their_place(
    tmp_path: Path, columns: Columns, plain: Rendering
) -> None:
    sft = tldr(tmp_path / "tldr", train=range(20), validation=range(20, 24), test=range(24, 30))
    preferences = tldr_preference(tmp_path / "pref", train=range(16), validation=range(30, 34))
    corpus = load(sft, preferences, columns, plain)
    assert [len(corpus["sft"][split]) for split in SPLITS] == [20, 4, 6]
    assert [len(corpus["preferences"][split]) for split in SPLITS] == [13, 4, 3]
    assert corpus["sft"]["test"][1] == {
        "prompt": post(25), "completion": " story 25", "source": "tldr/test:2",
    }  # fmt: skip


def test_a_set_that_cannot_be_loaded_is_an_error_with_advice(columns: Columns, plain: Rendering) -> None:
    missing = HubSet(id="no-one/no-such-set", revision="1" * 40, name=None)
    with pytest.raises(UserError) as error:
        load(missing, None, columns, plain)
    assert "'no-one/no-such-set'" in str(error.value)
    assert "1" * 40 in str(error.value)
    assert "data.source: files" in str(error.value)


def test_a_set_of_pairs_alone_is_enough_and_its_splits_are_found_by_their_words(
    tmp_path: Path, plain: Rendering, capsys: pytest.CaptureFixture[str]
) -> None:
    """As HuggingFaceH4/ultrafeedback_binarized has them."""
    ranges = {
        "train_prefs": range(20),
        "test_prefs": range(30, 34),
        "train_sft": range(9),
        "test_gen": range(9),
    }
    pairs = tldr_preference(tmp_path / "ultra", **ranges)
    splits = [file.stem for file in sorted((tmp_path / "ultra").glob("*.parquet"))]
    listed = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in splits)
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{listed}---\n"
    (tmp_path / "ultra/README.md").write_text(card, encoding="utf-8")
    problems = Problems()
    tables = hub.tables_of(HubSources(preferences=pairs))
    corpus = fill_splits(assemble([Part(tables, Data())], plain, problems), seed=1, sizes=SIZES)
    assert not problems, problems.report()
    assert {*corpus} == {"preferences"}
    assert len(corpus["preferences"]["test"]) == 4
    assert sum(map(len, corpus["preferences"].values())) == 24
    assert "the splits test_gen, train_sft are not used for preferences" in capsys.readouterr().out

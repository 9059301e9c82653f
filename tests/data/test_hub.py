"""Through `datasets.load_dataset` on local folders with the columns of the TL;DR sets on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config import Data, HubSet, Split
from rlhf_tasks.data.readers import hub
from rlhf_tasks.data.readers.tables import Part, assemble
from rlhf_tasks.data.rows import ROLES, SPLITS, Corpus, Problems, check_leaks
from rlhf_tasks.data.splits import fill_splits
from rlhf_tasks.data.tokenizer import scratch_rendering
from rlhf_tasks.errors import UserError
from tests.data.conftest import NAMED

SIZES: dict[Split, int] = {"validation": 3, "test": 3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def post(number: int) -> str:
    return f"SUBREDDIT: r/advice\n\nTITLE: title {number}\n\nPOST: my story {number}\n\nTL;DR:"


def tldr(number: int) -> dict[str, Any]:
    return {"prompt": post(number), "completion": f" story {number}"}


def tldr_preference(number: int) -> dict[str, Any]:
    answers = {"chosen": f" good {number}", "rejected": " bad"}
    return {"prompt": post(number), **answers, "policies": ["a", "b"]}


def hub_set(folder: Path, row: Callable[[int], dict[str, Any]], **splits: range) -> HubSet:
    folder.mkdir()
    for split, numbers in splits.items():
        pq.write_table(pa.Table.from_pylist([row(n) for n in numbers]), folder / f"{split}.parquet")
    return HubSet(id=str(folder), revision="0" * 40, name=None)


def load(data: Data | None = None, **sets: HubSet) -> Corpus:
    problems = Problems()
    given = [(role, sets[role]) for role in ROLES if role in sets]
    tables = [(role, *found) for role, one in given for found in hub.tables_of_set(one, role)]
    parts = [Part(tables, data or Data(columns=NAMED))]
    corpus = fill_splits(assemble(parts, scratch_rendering(), problems), seed=1, sizes=SIZES)
    check_leaks(corpus, problems)
    assert not problems, problems.report()
    return corpus


def test_tldr_columns_and_splits_are_read_and_rows_name_their_place(tmp_path: Path) -> None:
    ranges = {"train": range(20), "validation": range(20, 24), "test": range(24, 30)}
    sft = hub_set(tmp_path / "tldr", tldr, **ranges)
    preferences = hub_set(tmp_path / "pref", tldr_preference, train=range(16), validation=range(30, 34))
    corpus = load(sft=sft, preferences=preferences)
    assert [len(corpus["sft"][split]) for split in SPLITS] == [20, 4, 6]
    assert [len(corpus["preferences"][split]) for split in SPLITS] == [13, 4, 3]
    assert corpus["sft"]["test"][1] == {
        "prompt": post(25),
        "completion": " story 25",
        "source": "tldr/test:2",
    }


def test_a_set_that_cannot_be_loaded_is_an_error_with_advice() -> None:
    missing = HubSet(id="no-one/no-such-set", revision="1" * 40, name=None)
    with pytest.raises(UserError) as error:
        load(sft=missing)
    assert "'no-one/no-such-set'" in str(error.value)
    assert "1" * 40 in str(error.value)
    assert "data.source: files" in str(error.value)


def test_a_set_of_pairs_alone_is_enough_and_its_splits_are_found_by_their_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As HuggingFaceH4/ultrafeedback_binarized has them."""
    prefs = {"train_prefs": range(20), "test_prefs": range(30, 34)}
    pairs = hub_set(tmp_path / "ultra", tldr_preference, **prefs, train_sft=range(9), test_gen=range(9))
    splits = [file.stem for file in sorted((tmp_path / "ultra").glob("*.parquet"))]
    listed = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in splits)
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{listed}---\n"
    (tmp_path / "ultra/README.md").write_text(card, encoding="utf-8")
    corpus = load(Data(), preferences=pairs)
    assert {*corpus} == {"preferences"}
    assert len(corpus["preferences"]["test"]) == 4
    assert sum(map(len, corpus["preferences"].values())) == 24
    assert "the splits test_gen, train_sft are not used for preferences" in capsys.readouterr().out

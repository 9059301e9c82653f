"""Columns of the user's rows that scorers and judges get, from every source to data/prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project.paths import Paths
from tests import small
from tests.data.conftest import demonstrations, jsonl

NAMES = {"prompt": "prompt", "completion": "completion", "chosen": "chosen", "rejected": "rejected"}
VALUES = [7, 2.5, "7", True, None, [1, "two", None], {"type": "object", "of": {"n": 1}}, 2**70]
FILES = {"data.source": "files", "data.path": "mine", "judge.judges": [small.HELDOUT]}


pytestmark = pytest.mark.usefixtures("here")


def prepared(changes: Mapping[str, Any], *keep: str) -> dict[str, dict[str, Any]]:
    """The rows of data/prompts by prompt, after stage prepare."""
    small.run("prepare", {**changes, "data.columns": NAMES | {"keep": list(keep)}})
    return {row["prompt"]: row for split in SPLITS for row in read_table(Paths(), "prompts", split)}


def test_values_of_all_types_reach_the_prompts_that_are_derived_from_demonstrations() -> None:
    given: list[dict[str, Any]] = [
        row | {"answer": VALUES[i % 8], "source": f"book {i}"} for i, row in enumerate(demonstrations(24))
    ]
    jsonl(Path("mine/sft.jsonl"), *given)
    jsonl(Path("mine/preferences.jsonl"), {"prompt": "p", "chosen": "a", "rejected": "b"})
    found = prepared(FILES, "answer", "source")
    assert len(found) == 24
    for row in given:
        assert found[row["prompt"]]["columns"] == {"answer": row["answer"], "source": row["source"]}
        assert type(found[row["prompt"]]["columns"]["answer"]) is type(row["answer"])


def test_parquet_and_csv_keep_their_columns_too() -> None:
    rows = [row | {"answer": [i]} for i, row in enumerate(demonstrations(8))]
    Path("mine").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), "mine/sft.parquet")
    assert prepared(FILES, "answer")["question 3 ?"]["columns"] == {"answer": [3]}
    Path("mine/sft.parquet").unlink()
    lines = [f"{row['prompt']},{row['completion']},{i}" for i, row in enumerate(rows)]
    Path("mine/sft.csv").write_text("\n".join(["prompt,completion,answer", *lines]), encoding="utf-8")
    assert prepared(FILES, "answer")["question 3 ?"]["columns"] == {"answer": "3"}, "CSV has texts only"


def test_a_table_without_the_column_is_refused_with_those_that_it_has() -> None:
    jsonl(Path("mine/sft.jsonl"), *demonstrations(8))
    with pytest.raises(UserError, match=r"sft.jsonl: no column 'answer', which .* it has 'prompt', 'compl"):
        prepared(FILES, "answer")


def test_a_row_without_a_value_or_with_one_that_cannot_be_kept_is_named() -> None:
    rows: list[dict[str, Any]] = [row | {"answer": 1} for row in demonstrations(8)]
    del rows[2]["answer"]
    rows[4]["answer"] = float("nan")
    jsonl(Path("mine/sft.jsonl"), *rows)
    with pytest.raises(UserError) as error:
        prepared(FILES, "answer")
    assert "sft.jsonl:3: malformed: has no 'answer', which data.columns.keep names" in str(error.value)
    assert "sft.jsonl:5: malformed: 'answer' cannot be kept" in str(error.value)


def test_the_built_in_task_keeps_its_facts() -> None:
    sizes = {"prompt": 40, "sft": 20, "preference": 20}
    settings = {f"prepare.synthetic_{name}_rows": size for name, size in sizes.items()}
    settings |= {"data.num_validation": 5, "data.num_test": 5}
    for row in prepared(settings, "who", "plan").values():
        assert list(row["columns"]) == ["who", "plan"]
        assert {row["columns"]["who"], row["columns"]["plan"]} <= set(row["prompt"].split())
    assert all("columns" not in row for row in prepared(settings).values())
    with pytest.raises(UserError, match=r"no column 'answer', which .* 'who', 'thing', 'place', 'plan'"):
        prepared(settings, "answer")
    with pytest.raises(ConfigError, match="who is there twice"):
        prepared(settings, "who", "who")

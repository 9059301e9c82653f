"""A function in `data.source`: its arguments, its rows through stage prepare, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project.paths import Paths
from tests import small

PAGE = (small.ROOT / "docs/how-to/your-own-source.md").read_text(encoding="utf-8")
MINE = """
def demos(seed, num_test, count=40):
    rows = [{"prompt": f"{n} {seed} {num_test} ?", "completion": f" {n}"} for n in range(count)]
    tested = [row | {"split": "test", "source": "book:1"} for row in rows[:3]]
    return {"sft": (row for row in tested + rows[3:])}
def needs(count): return {"sft": []}
def fails(): return {"sft": [1 / 0]}
def no_roles(): return [{"prompt": "p", "completion": "c"}]
def other_role(): return {"dpo": []}
def no_row(): return {"sft": ["text"]}
def other_split(): return {"sft": [{"prompt": "p", "completion": "c", "split": "dev"}]}
def bad_rows(): return {"sft": [{"prompt": "p", "completion": ""}, {"prompt": "q"}]}
"""


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE, encoding="utf-8")


def prepared(function: str, **changes: Any) -> dict[str, float]:
    given = {"data.source": function, "judge.judges": [small.HELDOUT]}
    changes = {f"data.{key}": value for key, value in changes.items()}
    return small.run("prepare", given | changes)


def test_arguments_go_by_name_and_only_train_rows_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    prepared("mine:demos", options={"count": 60}, num_validation=5, num_test=7)
    rows = {split: list(read_table(Paths(), "sft", split)) for split in SPLITS}
    assert {split: len(some) for split, some in rows.items()} == {"train": 52, "validation": 5, "test": 3}
    assert {row["source"] for row in rows["test"]} == {"book:1"}
    assert all(re.fullmatch(r"\d+ 1 7 \?", row["prompt"]) for row in rows["train"])
    assert {row["source"] for row in rows["train"]} >= {"mine:demos sft:60"}
    assert "mine:demos: rows of sft\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("demos", {"cuont": 1}, "raised TypeError: .*unexpected keyword argument 'cuont'"),
        ("needs", {}, "raised TypeError: .*missing .*'count'"),
        ("needs", {"count": 1}, "needs returned no rows"),
        ("fails", {}, r"raised ZeroDivisionError: .*mine\.py:7"),
        ("no_roles", {}, r"must return rows by role \(sft, preferences, prompts\), .* but returned \[\{"),
        ("other_role", {}, "must return rows by role"),
        ("no_row", {}, "row 1 of sft must be a mapping.* but is 'text'"),
        ("other_split", {}, "one of train, validation, test, but is {.*'dev'"),
        ("bad_rows", {}, "bad_rows sft:2: malformed: has no 'completion'.*sft:1: empty: "),
        ("nothing", {}, r"mine\.py has no such function"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(function: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s){message}"):
        prepared(f"mine:{function}", options=options)


def test_the_source_of_the_how_to_page_is_prepared() -> None:
    Path("my_sums.py").write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], encoding="utf-8")
    data = config.parse(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0], "page")["data"]
    metrics = prepared(data.pop("source"), **{k: v for k, v in data.items() if k != "columns"})
    assert metrics["rows/prompts/train"] > 1000


def test_options_belong_to_a_function_and_go_with_it() -> None:
    with pytest.raises(ConfigError, match=r"data\.options` are arguments of a function in `source`"):
        small.view("prepare", {"data.options": {"count": 1}})
    with pytest.raises(ConfigError, match=r"synthetic, files, hub, mix, or .* such as examples\.arithmetic:"):
        small.view("prepare", {"data.source": "arithmetic"})
    tree: dict[str, Any] = {"data": {"source": "mine:demos", "options": {"count": 1}}}
    config.merge(tree, {"data": {"options": {"other": 2}}})
    assert tree["data"]["options"] == {"count": 1, "other": 2}
    config.merge(tree, {"data": {"source": "mine:needs", "options": {"count": 3}}})
    assert tree["data"]["options"] == {"count": 3}
    config.merge(tree, {"data": {"source": "files"}})
    assert "options" not in tree["data"]

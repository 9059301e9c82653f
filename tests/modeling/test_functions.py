"""Reward functions with columns: what they are called with, and what is refused before they are called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import functions
from rlhf_tasks.modeling.functions import TextFunction

COLUMNS: Columns = {"answer": [1, "2"], "tests": [[3], None]}


def made(folder: Path, signature: str, body: str = "return locals()") -> TextFunction:
    name = f"functions_{abs(hash((folder, signature, body)))}"
    (folder / f"{name}.py").write_text(f"def reward({signature}):\n    {body}\n", encoding="utf-8")
    return TextFunction(f"{name}:reward", "ppo.scorers", folder, COLUMNS)


@pytest.mark.parametrize(
    ("signature", "given"),
    [
        ("prompts, responses", {}),
        ("prompts, responses, *, answer", {"answer": [1, "2"]}),
        ("prompts, responses, answer", {"answer": [1, "2"]}),
        ("prompts, responses, *, answer, other=5", {"answer": [1, "2"], "other": 5}),
        ("prompts, responses, *, answer=None", {"answer": [1, "2"]}),
        ("prompts, responses, *, answer, **columns", {"answer": [1, "2"], "columns": {"tests": [[3], None]}}),
        ("prompts, responses, **columns", {"columns": COLUMNS}),
        ("prompts, responses, /, **columns", {"columns": COLUMNS}),
    ],
)
def test_a_function_gets_the_columns_that_it_names(
    tmp_path: Path, signature: str, given: dict[str, object]
) -> None:
    found = made(tmp_path, signature)(["p", "q"], ["r", "s"], COLUMNS)
    assert found == {"prompts": ["p", "q"], "responses": ["r", "s"], **given}


def test_a_column_that_is_not_kept_is_refused_before_any_call(tmp_path: Path) -> None:
    message = "ppo.scorers: function .* needs the column label, and data.columns.keep has answer, tests;"
    with pytest.raises(UserError, match=message):
        made(tmp_path, "prompts, responses, *, label, answer")
    with pytest.raises(UserError, match="has an argument answer, which is also the name of a column"):
        made(tmp_path, "answer, responses, **columns")


def test_an_exception_is_one_message_with_its_line(tmp_path: Path) -> None:
    function = made(tmp_path, "prompts, responses", "return prompts[9]")
    with pytest.raises(UserError, match=r"^function .*:reward raised IndexError: .*\.py:2\)$"):
        function(["p"], ["r"])


def test_a_slow_function_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(functions, "SLOW_SECONDS", -1.0)
    function = made(tmp_path, "prompts, responses", "print('hello'); return [0.0]")
    for _ in range(2):
        assert function(["p"], ["r"]) == [0.0]
    assert len(re.findall("took 0 s for 1 responses", capsys.readouterr().out)) == 1

"""Functions of the user: how they are imported, what they are called with, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.function import ColumnsFunction, FunctionScorer
from rlhf_tasks.scoring.protocol import Responses, UnusableScores

COLUMNS: Columns = {"answer": [1, "2"], "tests": [[3], None]}
ROWS = Responses.of_texts(["p0", "p1", "p2"], ["w6 w7", "w8", ""])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into the current directory, which is not on the path; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])

    def write(text: str) -> str:
        name = f"rewards_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def score(name: str, root: Path | None = None) -> list[float]:
    found = FunctionScorer(f"{name}:score", "ppo.scorers", root or Path())(ROWS)
    assert found.dtype == torch.float32
    result: list[float] = found.tolist()
    return result


# --------------------------------------------------------------------------------------- imports

DATACLASS = """\
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Weight:
    value: float = 2.0
def score(p, r):
    return [Weight().value for _ in r]
"""


def test_a_function_of_the_current_directory_gets_all_texts_once(module: Callable[[str], str]) -> None:
    name = module("seen = []\ndef score(p, r):\n    seen.append((p, r))\n    return [len(x) for x in r]\n")
    assert score(name) == [5.0, 2.0, 0.0]
    assert sys.modules[name].seen == [(ROWS.prompts, ROWS.texts)]
    assert FunctionScorer(f"{name}:score", "k", Path())(Responses.of_texts([], [])).shape == (0,)


def test_a_module_may_define_dataclasses(module: Callable[[str], str]) -> None:
    """They look up their module in `sys.modules` while it is imported."""
    assert score(module(DATACLASS)) == [2.0, 2.0, 2.0]


def test_a_module_below_the_root_may_import_its_neighbors(tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_rewards.py").write_text("WEIGHT = 2.0\n", encoding="utf-8")
    code = "def score(p, r):\n    from neighbor_of_rewards import WEIGHT\n    return [WEIGHT for _ in r]\n"
    (tmp_path / "rewards_with_neighbor.py").write_text(code, encoding="utf-8")
    assert score("rewards_with_neighbor", tmp_path) == [2.0, 2.0, 2.0]


def test_each_root_has_its_own_module_of_one_name(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        code = f"def score(p, r):\n    return [{number}.0 for _ in r]\n"
        (folder / "rewards_of_root.py").write_text(code, encoding="utf-8")
    for number in (1, 2, 1):
        assert score("rewards_of_root", tmp_path / str(number)) == [float(number)] * 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\n", "has no such function"),
        ("score = 1\n", "holds a int of that name"),
        ("def score(:\n", "cannot be imported: SyntaxError"),
        ("import no_such_thing\n", "cannot be imported: ModuleNotFoundError: .*no_such_thing"),
        ("def score(p, r):\n    return [0.0 for _ in r]\n1 / 0\n", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_user_error_each_time(
    module: Callable[[str], str], text: str, why: str
) -> None:
    name = module(text)
    for _ in range(2):
        with pytest.raises(UserError, match=f"^ppo.scorers: {name}:score.*{why}"):
            score(name)


# -------------------------------------------------------------------------------- what it returns


@pytest.mark.parametrize(
    "made", ["torch.tensor(n)", "numpy.array(n)", "(x for x in n)", "[bool(x) for x in n]"]
)
def test_any_iterable_of_numbers_is_read(module: Callable[[str], str], made: str) -> None:
    name = module(f"import numpy, torch\ndef score(p, r):\n    n = [1.0, 0.0, 1.0]\n    return {made}\n")
    assert score(name) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("[1.0, 2.0]", "but gave 2 for 3"),
        ("[1.0, None, 2.0]", "but returned"),
        ("['1', '2', '3']", "but returned .*text is not a number"),
        ("'123'", "but returned .*text is not a number"),
        ("[10**400, 1, 2]", "but returned"),
        ("None", "but returned None"),
    ],
)
def test_anything_but_one_number_per_response_is_a_user_error(
    module: Callable[[str], str], made: str, why: str
) -> None:
    name = module(f"def score(p, r):\n    return {made}\n")
    message = f"^ppo.scorers: function {name}:score must return one number per response, {why}"
    with pytest.raises(UnusableScores, match=message):
        score(name)


def test_an_exception_is_one_message_with_its_line(module: Callable[[str], str]) -> None:
    name = module("def score(p, r):\n    return p[9]\n")
    with pytest.raises(UserError, match=r"function .*:score raised IndexError: .*\.py:2\)$"):
        score(name)


# --------------------------------------------------------------------------------------- columns


def made(folder: Path, signature: str, num_lists: int = 2) -> ColumnsFunction:
    name = f"functions_{abs(hash((folder, signature)))}"
    (folder / f"{name}.py").write_text(f"def reward({signature}):\n    return locals()\n", encoding="utf-8")
    return ColumnsFunction(f"{name}:reward", "ppo.scorers", folder, COLUMNS, num_lists)


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
    found = made(tmp_path, signature)(["p", "q"], ["r", "s"], columns=COLUMNS)
    assert found == {"prompts": ["p", "q"], "responses": ["r", "s"], **given}


def test_a_judge_gets_three_lists_and_the_columns_that_it_names(tmp_path: Path) -> None:
    found = made(tmp_path, "prompts, a, b, answer", 3)(["p"], ["x"], ["y"], columns=COLUMNS)
    assert found == {"prompts": ["p"], "a": ["x"], "b": ["y"], "answer": [1, "2"]}


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        ("prompts, responses, *, label, answer", r"\(answer, tests\): missing a required .*'label'"),
        ("answer, responses, **columns", "multiple values for argument 'answer'"),
        ("prompts", "too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_with_the_kept_columns_is_refused_before_any_call(
    tmp_path: Path, signature: str, why: str
) -> None:
    message = f"^ppo.scorers: function .* cannot be called with 2 lists and the columns .*{why}"
    with pytest.raises(UserError, match=message):
        made(tmp_path, signature)

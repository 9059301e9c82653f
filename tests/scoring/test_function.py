"""Functions of the user: how they are imported, what they are called with, and what is refused."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.function import ONE, TWO, ColumnsFunction, ImportedScorer
from rlhf_tasks.scoring.protocol import Responses, UnusableScores
from tests.conftest import Command

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
    found = ImportedScorer(f"{name}:score", "ppo.scorers", root or Path())(ROWS)
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
    assert ImportedScorer(f"{name}:score", "k", Path())(Responses.of_texts([], [])).shape == (0,)


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
    "made",
    [
        "torch.tensor(n)",
        "numpy.array(n)",
        "pandas.Series(n)",
        "(x for x in n)",
        "[bool(x) for x in n]",
        "dict(enumerate(n)).values()",
    ],
)
def test_any_iterable_of_numbers_is_read(module: Callable[[str], str], made: str) -> None:
    name = module(
        f"import numpy, pandas, torch\ndef score(p, r):\n    n = [1.0, 0.0, 1.0]\n    return {made}\n"
    )
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
        ("{5: 1, 6: 2, 7: 3}", "but returned .*a dict is no list"),
        ("{5: 1, 6: 2, 7: 3}.keys()", "but returned .*a dict_keys is no list"),
        ("b'abc'", "but returned .*a bytes is no list"),
        ("{5, 6, 7}", "but returned .*a set is no list"),
        ("frozenset([5, 6, 7])", "but returned .*a frozenset is no list"),
        ("pandas.DataFrame([[0.5] * 3] * 3)", "but returned .*a DataFrame is no list"),
    ],
)
def test_anything_but_one_number_per_response_is_a_user_error(
    module: Callable[[str], str], made: str, why: str
) -> None:
    name = module(f"import pandas\ndef score(p, r):\n    return {made}\n")
    message = f"(?s)^ppo.scorers: function {name}:score must return one number per response, {why}"
    with pytest.raises(UnusableScores, match=message):
        score(name)


# -------------------------------------------------------------------------------------- arguments

PROMPTS, RESPONSES, A, B = ["p", "q"], ["r", "s"], ["x", "y"], ["z", "w"]


def made(folder: Path, signature: str, texts: Mapping[str, str] = ONE) -> ColumnsFunction:
    name = f"functions_{abs(hash((folder, signature)))}"
    (folder / f"{name}.py").write_text(f"def reward({signature}):\n    return locals()\n", encoding="utf-8")
    return ColumnsFunction(f"{name}:reward", "ppo.scorers", folder, COLUMNS, texts)


@pytest.mark.parametrize(
    ("signature", "given"),
    [
        ("prompts, responses", {"prompts": PROMPTS, "responses": RESPONSES}),
        ("responses, prompts", {"prompts": PROMPTS, "responses": RESPONSES}),
        ("prompts, completions", {"prompts": PROMPTS, "completions": RESPONSES}),
        ("completions, answer", {"completions": RESPONSES, "answer": [1, "2"]}),
        ("prompts=None, completions=None", {"prompts": PROMPTS, "completions": RESPONSES}),
        ("*, responses", {"responses": RESPONSES}),
        ("p, r", {"p": PROMPTS, "r": RESPONSES}),
        ("prompts, answers", {"prompts": PROMPTS, "answers": RESPONSES}),
        ("answers, prompts", {"prompts": PROMPTS, "answers": RESPONSES}),
        ("response, prompt", {"prompt": PROMPTS, "response": RESPONSES}),
        ("texts", {"texts": RESPONSES}),
        ("texts, answer, other=5", {"texts": RESPONSES, "answer": [1, "2"], "other": 5}),
        ("answer, a, b", {"answer": [1, "2"], "a": PROMPTS, "b": RESPONSES}),
        ("completions, **rest", {"completions": RESPONSES, "rest": {**COLUMNS, "prompts": PROMPTS}}),
        (
            "completions, tests, **rest",
            {
                "completions": RESPONSES,
                "tests": [[3], None],
                "rest": {"answer": [1, "2"], "prompts": PROMPTS},
            },
        ),
        ("p, r, **rest", {"p": PROMPTS, "r": RESPONSES, "rest": COLUMNS}),
        ("p, r, /, **rest", {"p": PROMPTS, "r": RESPONSES, "rest": COLUMNS}),
        ("p, *texts, answer", {"p": PROMPTS, "texts": (RESPONSES,), "answer": [1, "2"]}),
        ("*texts", {"texts": (PROMPTS, RESPONSES)}),
        ("*texts, **rest", {"texts": (PROMPTS, RESPONSES), "rest": COLUMNS}),
        ("responses, *more", {"responses": RESPONSES, "more": (PROMPTS,)}),
        ("responses, prompts, /", {"responses": RESPONSES, "prompts": PROMPTS}),
        ("p, /", {"p": RESPONSES}),
    ],
)
def test_a_parameter_gets_what_its_name_says_and_others_the_texts_that_are_left(
    tmp_path: Path, signature: str, given: dict[str, object]
) -> None:
    assert made(tmp_path, signature)(PROMPTS, RESPONSES, columns=COLUMNS) == given


@pytest.mark.parametrize(
    ("signature", "given"),
    [
        ("prompts, a, b", {"prompts": PROMPTS, "a": A, "b": B}),
        ("b, a, answer", {"a": A, "b": B, "answer": [1, "2"]}),
        (
            "questions, first, second, *, answer",
            {"questions": PROMPTS, "first": A, "second": B, "answer": [1, "2"]},
        ),
        ("first, second, prompts", {"prompts": PROMPTS, "first": A, "second": B}),
        ("p, x, y, /", {"p": PROMPTS, "x": A, "y": B}),
        ("a, b, **rest", {"a": A, "b": B, "rest": {**COLUMNS, "prompts": PROMPTS}}),
    ],
)
def test_a_pairwise_judge_gets_prompts_and_both_responses_in_the_same_way(
    tmp_path: Path, signature: str, given: dict[str, object]
) -> None:
    assert made(tmp_path, signature, TWO)(PROMPTS, A, B, columns=COLUMNS) == given


@pytest.mark.parametrize(
    ("signature", "texts", "why"),
    [
        ("prompts", ONE, "it takes no responses"),
        ("answer", ONE, "it takes no responses"),
        ("**rest", ONE, "it takes no responses"),
        ("", ONE, "it takes no responses"),
        ("prompts, completions, completion_ids", ONE, "nothing is left for completion_ids"),
        ("completions, completion_ids, **rest", ONE, "nothing is left for completion_ids"),
        ("prompts, responses, *, label, answer", ONE, "nothing is left for label"),
        ("prompts, x, y", ONE, "nothing is left for x, y"),
        ("x, y, z", ONE, "nothing is left for x, y, z"),
        ("prompt, x, y", ONE, "nothing is left for x, y"),
        ("*texts, label", ONE, "nothing is left for label"),
        ("p, r, /, label", ONE, "nothing is left for p, r, label"),
        ("prompts, a", TWO, "it takes no b"),
        ("prompts, x", TWO, "it takes no a and b"),
        ("x, y, z, label", TWO, "nothing is left for x, y, z, label"),
    ],
)
def test_what_cannot_be_called_so_is_refused_with_the_names_there_are(
    tmp_path: Path, signature: str, texts: Mapping[str, str], why: str
) -> None:
    names = r"prompts, .*(responses, .*|a, b), answer, tests\."
    with pytest.raises(UserError, match=f"^ppo.scorers: function .*: {re.escape(why)}; .* of {names}"):
        made(tmp_path, signature, texts)


DECORATORS = """
import functools

def with_names(function):
    @functools.wraps(function)
    def inner(prompts, responses):
        return function(prompts, responses)
    return inner

def by_position(function):
    @functools.wraps(function)
    def inner(*texts):
        return function(*texts)
    return inner

def of_everything(function):
    @functools.wraps(function)
    def inner(*texts, **rest):
        return function(*texts, **rest)
    return inner

"""


@pytest.mark.parametrize(
    "decorator",
    ["with_names", "by_position", "of_everything", "functools.singledispatch", "functools.partial"],
)
def test_a_decorated_function_gets_prompts_and_responses(
    module: Callable[[str], str], decorator: str
) -> None:
    code = f"{DECORATORS}@{decorator}\ndef score(p, r):\n    return [len(p[0]) + len(x) for x in r]\n"
    assert score(module(code)) == [7.0, 4.0, 2.0]


def test_a_kept_column_may_have_any_other_name(module: Callable[[str], str]) -> None:
    name = module("def score(completions, name, **rest):\n    return [*name[:-1], len(rest['function'])]\n")
    columns: Columns = {"name": [1, 2, 3], "function": [4, 5, 6]}
    rows = Responses.of_texts(ROWS.prompts, ROWS.texts, columns)
    assert ImportedScorer(f"{name}:score", "k", Path(), columns)(rows).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "made", ["fail(r[0])", "map(fail, r)", "(fail(x) for x in r)", "Pool(2).map(fail, r)"]
)
def test_an_error_is_one_message_with_its_line_also_in_what_is_drawn_later(
    module: Callable[[str], str], made: str
) -> None:
    imports = "from concurrent.futures import ThreadPoolExecutor as Pool"
    name = module(f"{imports}\ndef fail(x):\n    return {{}}[x]\ndef score(p, r):\n    return {made}\n")
    with pytest.raises(UserError, match=r"function .*:score raised KeyError: .*\.py:3\)$"):
        score(name)


def test_a_kept_column_cannot_have_the_name_of_a_text(rlhf: Command, project: Path) -> None:
    said = rlhf("preset smoke --set", "data.columns.keep=[topic, completions]", status=2)
    assert "give the column completions another name" in said.err

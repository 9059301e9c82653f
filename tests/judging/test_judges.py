"""Planted judges through the code of real ones; combined judges by hand; which judges are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.judging import summary
from rlhf_tasks.judging.judges import comparisons
from rlhf_tasks.judging.judges.build import ScoringJudge, build_judges
from rlhf_tasks.judging.judges.comparisons import (
    Comparisons,
    Judge,
    PairwiseJudge,
    Question,
    Reply,
    check_failures,
)
from rlhf_tasks.judging.results import ComparisonResult
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.templates import fill_template, list_templates, load_template
from tests import small

CPU = torch.device("cpu")
N = 300
PROMPTS = [f"prompt {i}" for i in range(N)]
QUALITY = random.Random(1).sample(range(10 * N), 2 * N)
OURS, THEIRS = ([f"{quality:05d} words" for quality in part] for part in (QUALITY[:N], QUALITY[N:]))


class Planted:
    """A comparer made of a function of the two texts; it records its questions."""

    def __init__(self, probability: Any) -> None:
        self._probability, self.questions = probability, list[Question]()

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        self.questions += questions
        self.max_failures = max_failures
        probabilities = [self._probability(question.first, question.second) for question in questions]
        return [Reply(p) if not math.isnan(p) else Reply.failed("planted") for p in probabilities]


def compared(probability: Any, a: Sequence[str] = OURS, b: Sequence[str] = THEIRS) -> Comparisons:
    return PairwiseJudge("planted", Planted(probability), 1.0).compare(PROMPTS[: len(a)], a, b)


def summarised(comparisons: Comparisons) -> ComparisonResult:
    (result,) = summary.summarize({summary.Key("j", "a", "b"): comparisons}, {"a": OURS, "b": THEIRS})
    return result


def test_a_judge_of_one_place_gives_ties_and_full_bias_and_a_perfect_one_the_known_ranking() -> None:
    result = summarised(compared(lambda first, second: 1.0))
    bias = (result.win_rate.value, result.position_bias, result.first_share, result.ties)
    assert bias == (0.5, 1.0, 1.0, N)
    result = summarised(compared(lambda first, second: float(first > second)))
    assert result.win_rate.value == sum(a > b for a, b in zip(OURS, THEIRS, strict=True)) / N
    assert (result.position_bias, result.first_share, result.ties) == (0.0, 0.5, 0)


def test_two_equal_responses_are_a_tie_without_a_question() -> None:
    planted = Planted(lambda first, second: 1.0)
    result = PairwiseJudge("planted", planted, 1.0).compare(["p", "q"], ["x", "same"], ["y", "same"])
    assert [(question.prompt, question.first) for question in planted.questions] == [("p", "x"), ("p", "y")]
    assert result.outcomes.tolist() == [0.5, 0.5]
    assert result.num_replies == 2
    assert result.orders is not None
    assert np.isnan(result.orders[0]).tolist() == [False, True]


def test_a_failure_in_either_order_is_neither_win_nor_loss() -> None:
    def fails(first: str, second: str) -> float:
        return math.nan if first == OURS[0] or second == OURS[1] else float(first > second)

    result = compared(fails)
    assert sorted(result.failures) == [0, 1]
    assert np.isnan(result.outcomes[:2]).all()
    wins = [a > b for a, b in zip(OURS, THEIRS, strict=True)][2:]
    assert summarised(result).win_rate.value == pytest.approx(sum(wins) / len(wins))
    assert summarised(result).failures == 2


def test_too_many_failures_are_an_error_with_the_most_frequent_reason() -> None:
    result = compared(lambda first, second: math.nan if first < OURS[5] else 0.9)
    check_failures("j", result, 1.0)
    with pytest.raises(
        UserError, match=r"judge j: \d+ of 300 comparisons failed.*max_failure_share=0.05.*planted"
    ):
        check_failures("j", result, 0.05)
    with pytest.raises(UserError, match="300 of 300"):
        check_failures("j", compared(lambda first, second: math.nan), 1.0)


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    scores = {"a": [math.inf, 1.0, math.nan], "b": [0.0, 0.0, 0.0]}
    judge = ScoringJudge(
        "some", lambda rows: torch.tensor(scores[rows.texts[0]]), lambda p, r: {"other": 2.0}
    )
    result = judge.compare(["p", "q", "r"], ["a", "a", "a"], ["b", "b", "b"])
    assert np.isnan(result.outcomes).tolist() == [True, False, True]
    assert sorted(result.failures) == [0, 2]
    assert judge.facets(["p", "q", "r"], ["a", "a", "a"]) == {"other": 2.0, "score": 1.0}


# ---------------------------------------------------------------------------------------- mixtures

WIN, TIE, LOSS, FAILED = 1.0, 0.5, 0.0, math.nan


@pytest.mark.parametrize(
    ("single", "together", "most"),
    [
        ((WIN, WIN, WIN), WIN, WIN),
        ((WIN, WIN, LOSS), TIE, WIN),
        ((WIN, TIE, TIE), TIE, WIN),
        ((WIN, LOSS, TIE), TIE, TIE),
        ((LOSS, LOSS, LOSS), LOSS, LOSS),
        ((LOSS, LOSS, FAILED), FAILED, LOSS),
        ((WIN, FAILED, FAILED), FAILED, FAILED),
    ],
)
def test_combined_outcomes_by_hand(single: tuple[float, ...], together: float, most: float) -> None:
    outcomes = np.array(single)[:, None]
    np.testing.assert_array_equal(comparisons.all_of(outcomes), [together])
    np.testing.assert_array_equal(comparisons.majority(outcomes), [most])
    np.testing.assert_array_equal(comparisons.majority(1 - outcomes), [1 - most])


def test_a_combined_judge_repeats_no_question() -> None:
    planted = [Planted(lambda first, second: float(first > second)) for _ in range(2)]
    parts: list[Judge] = [PairwiseJudge(f"j{i}", one, 1.0) for i, one in enumerate(planted)]
    both = comparisons.JudgePanel("both", comparisons.all_of, parts)
    alone = parts[0].compare(PROMPTS, OURS, THEIRS)
    np.testing.assert_array_equal(both.compare(PROMPTS, OURS, THEIRS).outcomes, alone.outcomes)
    assert [len(one.questions) for one in planted] == [2 * N, 2 * N]


# ---------------------------------------------------------------------------------------- building


def settings(*judges: dict[str, Any]) -> Any:
    return small.view("judge", {"judge.judges": list(judges)}).judge


def build(*judges: dict[str, Any], root: Path | None = None, names: Sequence[str] = ()) -> list[Judge]:
    return build_judges(settings(*judges), CPU, Paths(root or Path()), names=names)


LONGEST = {"kind": "function", "name": "longest", "function": "my_judges:longest"}
BOTH = {"kind": "all_of", "name": "both", "judges": ["gold", "longest"]}


def test_judges_are_built_in_the_order_of_the_list_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "my_judges.py").write_text(
        "def longest(prompts, answers):\n    return [len(a) if a else float('nan') for a in answers]\n"
    )
    listed = (BOTH, small.GOLD, LONGEST)
    assert [judge.name for judge in build(*listed, root=tmp_path)] == ["both", "gold", "longest"]
    (only,) = build(*listed, root=tmp_path, names=["both"])
    post = "POST: my boss stole my lamp . it was at the park .\nTL;DR:"
    responses = [" my boss stole my lamp", " my aunt"]
    assert only.compare([post, post], responses, responses[::-1]).outcomes.tolist() == [WIN, LOSS]
    (longest,) = build(*listed, root=tmp_path, names=["longest"])
    result = longest.compare(["p", "q", "r"], ["aa", "a", "a"], ["b", "bb", ""])
    np.testing.assert_array_equal(result.outcomes, [WIN, LOSS, FAILED])
    with pytest.raises(UserError, match="has no judge best; it has both, gold, longest"):
        build(*listed, root=tmp_path, names=["best"])


def own_judge(root: Path, code: str, **keys: Any) -> Judge:
    name = f"my_judge_{abs(hash(code))}"
    (root / f"{name}.py").write_text(code, encoding="utf-8")
    (judge,) = build(LONGEST | {"function": f"{name}:judge"} | keys, root=root)
    return judge


@pytest.mark.parametrize("returned", ["[1.0]", "['1', '2']", "None"])
def test_a_function_must_return_one_number_per_response(tmp_path: Path, returned: str) -> None:
    message = r"judge\.judges: function my_judge_\d+:judge must return one number per"
    scores = own_judge(tmp_path, f"def judge(prompts, answers):\n    return {returned}\n")
    with pytest.raises(UserError, match=f"{message} response, but "):
        scores.compare(["p", "q"], ["a", "b"], ["c", "d"])
    compares = own_judge(tmp_path, f"def judge(prompts, a, b):\n    return {returned}\n", pairwise=True)
    with pytest.raises(UserError, match=f"{message} pair, but "):
        compares.compare(["p", "q"], ["a", "b"], ["c", "d"])


def test_a_pairwise_function_is_asked_in_both_orders_with_the_columns_of_each_pair(tmp_path: Path) -> None:
    """It prefers the first response where its column says so, else the longer one; None is a failure."""
    code = """\
def judge(prompts, a, b, *, biased):
    rows = zip(a, b, biased, strict=True)
    return [None if "?" in x + y else 1.0 if first else float(len(x) > len(y)) for x, y, first in rows]
"""
    (tmp_path / "my_judge.py").write_text(code, encoding="utf-8")
    one = LONGEST | {"function": "my_judge:judge", "pairwise": True}
    (judge,) = build_judges(settings(one), CPU, Paths(tmp_path), columns=["biased"])
    assert settings(one).scoring == set(), "it has no score for a single response"
    columns = {"biased": [False, True, False, True, False]}
    a, b = ["long", "long", "s", "same", "?"], ["s", "s", "long", "same", "s"]
    result = judge.compare(["p"] * 5, a, b, columns)
    np.testing.assert_array_equal(result.outcomes, [WIN, TIE, LOSS, TIE, FAILED])
    assert result.failures == {4: "the function cannot tell"}
    assert result.orders is not None
    np.testing.assert_array_equal(result.orders[0], [1.0, 1.0, 0.0, math.nan, math.nan])
    beyond = own_judge(tmp_path, "def judge(prompts, a, b):\n    return [1.5 for _ in a]\n", pairwise=True)
    with pytest.raises(UserError, match=r"must return a probability or None per pair, but gave"):
        beyond.compare(["p"], ["a"], ["b"])


@pytest.mark.parametrize(
    ("judges", "reason"),
    [
        ([small.GOLD, small.HELDOUT | {"name": "gold"}], "several have the name gold"),
        ([small.GOLD | {"name": "kappa"}], "the name of another metric"),
        ([small.GOLD | {"name": "A/B"}], "judge.judges.0.name: "),
        ([small.GOLD, BOTH], "both combines longest, which is not in the list"),
        ([small.GOLD, BOTH | {"judges": ["gold", "gold"]}], "gold is there twice"),
        ([small.GOLD, BOTH | {"judges": ["gold"]}], "at least 2 items"),
        ([small.HELDOUT | {"pathh": "x"}], "did you mean 'path'?"),
        ([BOTH | {"judge": "x"}], "did you mean 'judges'?"),
        ([], "judge.judges: add at least one, such as {kind: reward_model, name: "),
        ([{"kind": "oracle", "name": "x"}], "oracle"),
    ],
)
def test_invalid_judges_are_refused_with_the_reason(judges: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*judges)
    assert reason in str(caught.value)


# ----------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("name", list_templates(comparisons.PROMPTS))
def test_a_shipped_prompt_shows_all_fields_and_keeps_braces_of_responses(name: str) -> None:
    template = load_template(name, "judge.judges", Path(), comparisons.PROMPTS, Question._fields)
    text = fill_template(template, Question("a {first} {prompt}", "one {second}", "22")._asdict())
    assert "a {first} {prompt}" in text
    assert text.index("one {second}") < text.index("22")


def test_a_prompt_of_the_user_must_contain_all_fields(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    read = partial(load_template, "mine.txt", "judge.judges", tmp_path, comparisons.PROMPTS, Question._fields)
    with pytest.raises(UserError, match=r"cannot be read.*give hhh, tldr, or a file"):
        read()
    file.write_text("{prompt} {first}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"lacks \{second\}"):
        read()
    file.write_text("{prompt} {first} {second}\n\n", encoding="utf-8")
    assert read() == "{prompt} {first} {second}"

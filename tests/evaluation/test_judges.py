"""Planted judges through the same machinery as real ones; mixtures by hand; what `build` refuses."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_tasks.data.batches import load_tokenizer
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.evaluation import judges, statistics, summary
from rlhf_tasks.evaluation.judges import making, mixtures, prompts
from rlhf_tasks.evaluation.judges.comparing import Comparing, Question, Reply
from rlhf_tasks.evaluation.judges.scoring import Scoring
from rlhf_tasks.evaluation.judges.verdicts import Judge, Verdicts, check_failures
from rlhf_tasks.modeling import contracts, models
from tests import small

CPU = torch.device("cpu")
N = 300
PROMPTS = [f"prompt {i}" for i in range(N)]
QUALITY = random.Random(1).sample(range(10 * N), 2 * N)
OURS, THEIRS = ([f"{quality:05d} words" for quality in part] for part in (QUALITY[:N], QUALITY[N:]))


class Planted:
    """A comparer made of a function of the two texts; counts what it is asked."""

    def __init__(self, probability: Any) -> None:
        self._probability, self.asked = probability, list[Question]()

    def __call__(self, questions: Sequence[Question], max_failures: float) -> list[Reply]:
        self.asked += questions
        self.max_failures = max_failures
        found = [self._probability(question.first, question.second) for question in questions]
        return [Reply(p) if not math.isnan(p) else Reply.failed("planted") for p in found]


def judged(probability: Any, a: Sequence[str] = OURS, b: Sequence[str] = THEIRS) -> Verdicts:
    return Comparing("planted", Planted(probability), 1.0).compare(PROMPTS[: len(a)], a, b)


def metrics(found: Verdicts) -> dict[str, float]:
    made = summary.metrics(("j", "a", "b"), found, OURS, THEIRS)
    return {key.removeprefix("j/a_vs_b/"): value for key, value in made.items()}


def test_a_judge_that_always_says_first_wins_half_and_is_all_bias() -> None:
    found = metrics(judged(lambda first, second: 1.0))
    assert (found["win_rate"], found["position_bias"], found["first_share"]) == (0.5, 1.0, 1.0)
    assert found["ties"] == N


def test_a_perfect_judge_gives_the_known_ranking() -> None:
    found = metrics(judged(lambda first, second: float(first > second)))
    assert found["win_rate"] == sum(a > b for a, b in zip(OURS, THEIRS, strict=True)) / N
    assert (found["position_bias"], found["first_share"], found["ties"]) == (0.0, 0.5, 0)


def test_a_coin_gives_an_interval_that_holds_one_half() -> None:
    coin = random.Random(2)
    found = metrics(judged(lambda first, second: float(coin.random() < 0.5)))
    assert found["low"] <= 0.5 <= found["high"]
    assert found["position_bias"] == pytest.approx(0.5, abs=0.1)


def test_the_same_two_answers_are_a_tie_that_is_not_asked_for() -> None:
    planted = Planted(lambda first, second: 1.0)
    found = Comparing("planted", planted, 1.0).compare(["p", "q"], ["x", "same"], ["y", "same"])
    assert [(question.prompt, question.first) for question in planted.asked] == [("p", "x"), ("p", "y")]
    assert found.outcomes.tolist() == [0.5, 0.5]
    assert found.num_replies == 2
    assert found.orders is not None
    assert statistics.position_bias(*found.orders).count == 1


def test_a_failure_in_either_order_is_neither_win_nor_loss() -> None:
    def fails(first: str, second: str) -> float:
        return math.nan if first == OURS[0] or second == OURS[1] else float(first > second)

    found = judged(fails)
    assert sorted(found.failures) == [0, 1]
    assert np.isnan(found.outcomes[:2]).all()
    wins = [a > b for a, b in zip(OURS, THEIRS, strict=True)][2:]
    assert metrics(found)["win_rate"] == pytest.approx(sum(wins) / len(wins))
    assert metrics(found)["failures"] == 2


def test_more_failures_than_allowed_are_told_with_the_commonest_reason() -> None:
    found = judged(lambda first, second: math.nan if first < OURS[5] else 0.9)
    check_failures("j", found, 1.0)
    with pytest.raises(
        UserError, match=r"judge j: \d+ of 300 verdicts failed.*max_failure_share=0.05.*planted"
    ):
        check_failures("j", found, 0.05)
    with pytest.raises(UserError, match="300 of 300"):
        check_failures("j", judged(lambda first, second: math.nan), 1.0)


def test_as_many_failures_as_are_allowed_are_borne() -> None:
    """15 pairs of 300 are 5%: both replies of each may fail before anything is proved."""
    planted = Planted(lambda first, second: math.nan if {first, second} & set(OURS[:15]) else 1.0)
    found = Comparing("planted", planted, 0.05).compare(PROMPTS, OURS, THEIRS)
    assert (len(found.failures), planted.max_failures) == (15, 30)
    check_failures("j", found, 0.05)
    fewer = Verdicts(found.outcomes[:-1], failures=found.failures)
    with pytest.raises(UserError, match="15 of 299 verdicts failed"):
        check_failures("j", fewer, 0.05)


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    class Some:
        def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
            return [math.inf, 1.0, math.nan] if answers[0] == "a" else [0.0, 0.0, 0.0]

        def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
            return {"other": 2.0}

    judge = Scoring("some", Some())
    found = judge.compare(["p", "q", "r"], ["a", "a", "a"], ["b", "b", "b"])
    assert np.isnan(found.outcomes).tolist() == [True, False, True]
    assert sorted(found.failures) == [0, 2]
    assert judge.facets(["p", "q", "r"], ["a", "a", "a"]) == {"other": 2.0, "score": 1.0}


# ---------------------------------------------------------------------------------------- mixtures

WIN, TIE, LOSS, FAILED = 1.0, 0.5, 0.0, math.nan


@pytest.mark.parametrize(
    ("words", "together", "most"),
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
def test_mixtures_by_hand(words: tuple[float, ...], together: float, most: float) -> None:
    outcomes = np.array(words)[:, None]
    np.testing.assert_array_equal(mixtures.all_of(outcomes), [together])
    np.testing.assert_array_equal(mixtures.majority(outcomes), [most])
    np.testing.assert_array_equal(mixtures.majority(1 - outcomes), [1 - most])


def test_a_mixture_asks_its_judges_for_nothing_twice() -> None:
    planted = [Planted(lambda first, second: float(first > second)) for _ in range(2)]
    parts: list[Judge] = [making.Once(Comparing(f"j{i}", one, 1.0)) for i, one in enumerate(planted)]
    mixed = mixtures.Mixed("both", mixtures.all_of, parts)
    alone = parts[0].compare(PROMPTS, OURS, THEIRS)
    np.testing.assert_array_equal(mixed.compare(PROMPTS, OURS, THEIRS).outcomes, alone.outcomes)
    assert [len(one.asked) for one in planted] == [2 * N, 2 * N]


# ---------------------------------------------------------------------------------------- building


def settings(*given: dict[str, Any]) -> Any:
    return small.view("judge", {"judge.judges": list(given)}).judge


LONGEST = {"kind": "function", "name": "longest", "function": "my_judges:longest"}
BOTH = {"kind": "all_of", "name": "both", "judges": ["gold", "longest"]}


def test_judges_come_in_the_order_of_the_list_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_judges.py").write_text(
        "def longest(prompts, answers):\n    return [len(a) if a else float('nan') for a in answers]\n"
    )
    given = settings(BOTH, small.GOLD, LONGEST)
    assert [judge.name for judge in making.build(given, "synthetic", CPU)] == ["both", "gold", "longest"]
    (only,) = making.build(given, "synthetic", CPU, ["both"])
    post = "POST: my boss stole my lamp . it was at the park .\nTL;DR:"
    answers = [" my boss stole my lamp", " my aunt"]
    assert only.compare([post, post], answers, answers[::-1]).outcomes.tolist() == [WIN, LOSS]
    (longest,) = making.build(given, "synthetic", CPU, ["longest"])
    found = longest.compare(["p", "q", "r"], ["aa", "a", "a"], ["b", "bb", ""])
    np.testing.assert_array_equal(found.outcomes, [WIN, LOSS, FAILED])
    with pytest.raises(UserError, match="has no judge best; it has both, gold, longest"):
        making.build(given, "synthetic", CPU, ["best"])


def test_a_function_that_is_not_there_is_told_by_its_place() -> None:
    with pytest.raises(UserError, match=r"judge\.judges: no_such_module:f cannot be imported"):
        making.build(settings(LONGEST | {"function": "no_such_module:f"}), "synthetic", CPU)


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        ("[1.0]", "gave 1 scores for 2 answers"),
        ("['1', '2']", "text is no number"),
        ("None", "gave None: .* one number per answer is needed"),
    ],
)
def test_what_a_function_gives_that_is_no_number_an_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: str, why: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_giver", raising=False)
    (tmp_path / "my_giver.py").write_text(f"def gives(prompts, answers):\n    return {gives}\n")
    (own,) = making.build(settings(LONGEST | {"function": "my_giver:gives"}), "synthetic", CPU)
    with pytest.raises(UserError, match=rf"judge\.judges: function my_giver:gives .*{why}"):
        own.compare(["p", "q"], ["a", "b"], ["c", "d"])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([small.GOLD, small.HELDOUT | {"name": "gold"}], "several have the name gold"),
        ([small.GOLD | {"name": "kappa"}], "the name of another metric"),
        ([small.GOLD | {"name": "A/B"}], "judge.judges.0.gold.name: "),
        ([small.GOLD, BOTH], "both combines longest, which is not in the list"),
        ([small.GOLD, BOTH | {"judges": ["gold", "gold"]}], "names a judge twice"),
        ([small.GOLD, BOTH | {"judges": ["gold"]}], "at least 2 items"),
        ([small.HELDOUT | {"pathh": "x"}], "did you mean 'path'?"),
        ([BOTH | {"judge": "x"}], "did you mean 'judges'?"),
        ([], "at least 1 item"),
        ([{"kind": "oracle", "name": "x"}], "oracle"),
    ],
)
def test_judges_that_make_no_sense_are_refused_with_the_reason(given: list[Any], why: str) -> None:
    with pytest.raises(ConfigError) as told:
        settings(*given)
    assert why in str(told.value)


def test_a_judge_that_ppo_optimised_is_known_by_its_weights(models_here: Path) -> None:
    one = small.HELDOUT | {"name": "optimised", "path": "models/elsewhere"}
    (models_here / "models/reward").rename(models_here / "models/elsewhere")
    given = settings(small.HELDOUT, one)
    policy = Path("models/policy")
    assert judges.optimised(given, policy) == {}, "nobody says what the policy was made from"
    parents = {"reward": contracts.fingerprint(models_here / "models/elsewhere")}
    models.save(
        models.load_causal(policy), load_tokenizer(policy), policy,
        identity=contracts.identity("policy", parents), card="a card",
    )  # fmt: skip
    assert judges.optimised(given, policy) == {"optimised": "models/elsewhere"}


# ----------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("name", prompts.shipped())
def test_a_shipped_prompt_shows_all_three_and_no_brace_of_an_answer_is_filled(name: str) -> None:
    text = prompts.filled(
        prompts.load(name, "judge.judges"), Question("a {first} {prompt}", "one {second}", "22")
    )
    assert "a {first} {prompt}" in text
    assert text.index("one {second}") < text.index("22")


def test_a_prompt_of_the_users_own_must_show_all_three(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    with pytest.raises(UserError, match=r"cannot be read.*give hhh, ranker, tldr, or a file"):
        prompts.load(str(file), "judge.judges")
    file.write_text("{prompt} {first}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"has no \{second\}"):
        prompts.load(str(file), "judge.judges")
    file.write_text("{prompt} {first} {second}\n\n", encoding="utf-8")
    assert prompts.load(str(file), "judge.judges") == "{prompt} {first} {second}"


def test_win_rates_by_source_leave_the_small_ones_out() -> None:
    found = {("j", "a", "b"): judged(lambda first, second: float(first > second))}
    sources = ["one.jsonl:3"] * 100 + ["torch==2.1 torch/nn/linear.py:Linear.forward"] * 196 + ["rare"] * 4
    rows = summary.source_table(found, sources).to_pylist()
    assert [(row["source"], row["prompts"]) for row in rows] == [("one.jsonl", 100), ("torch", 196)]
    wins = [a > b for a, b in zip(OURS[:100], THEIRS[:100], strict=True)]
    assert rows[0]["win_rate"] == pytest.approx(sum(wins) / 100)
    assert summary.source_table(found, ["synthetic"] * N).num_rows == 0

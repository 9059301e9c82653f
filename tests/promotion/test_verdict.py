"""The gate's arithmetic: a better policy passes, any other is refused with the reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from scipy.stats import binom

from rlhf_tasks import config
from rlhf_tasks.config import Promotion
from rlhf_tasks.errors import ConfigError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import EvaluationResults, TaskChange
from rlhf_tasks.promotion import verdict as gate
from rlhf_tasks.promotion.verdict import Kl, Verdict, show
from tests.promotion import planted
from tests.promotion.planted import results, retention, shipped
from tests.small import GOLD, HELDOUT

JUDGES = config.Judging.model_validate(shipped()["judge"]).judges


def settings(**changes: Any) -> Promotion:
    return Promotion.model_validate(shipped()["promotion"] | changes)


def decide(
    measured: EvaluationResults | None = None,
    kl: float | None = planted.KL,
    *,
    champion: EvaluationResults | None = None,
    **changes: Any,
) -> Verdict:
    measured = results() if measured is None else measured
    if champion is not None:
        comparisons = (*measured.comparisons, *champion.comparisons)
        measured = measured.model_copy(update={"comparisons": comparisons})
    known = None if kl is None else Kl(mean=kl, standard_error=planted.KL_ERROR)
    return gate.decide(
        settings(**changes),
        measured,
        known,
        judges=JUDGES,
        champion=champion is not None,
    )


def failed(verdict: Verdict) -> list[str]:
    return [criterion.key for criterion in verdict.criteria if not criterion.passed]


def test_a_better_policy_passes_every_criterion_with_its_margin() -> None:
    verdict = decide(champion=planted.over_champion())
    assert verdict.passed
    margins = {c.key: c.margin for c in verdict.criteria}
    expected = {
        **{"over_sft/gold": 0.32, "over_sft/reward_model": 0.3},
        **{"over_champion/gold": 0.05, "over_champion/reward_model": 0.03},
        **{"kl": 8.5, "optimised_judges": 0},
        "perplexity/sft_text": 0.75,  # 2 − 2.0/1.6
        "response_perplexity": 0.5,  # 2 − 3.0/2.0
        "distinct_ratio": 0.5,  # 0.4/0.5 − 0.3
        "choice_change": 0.04,  # (0.97 − 0.98) + 0.05
        "failure_share": 0.01,  # 0.02 − 10/1000
        "examples": 790,  # the fewest, 990, − 200
    }
    assert margins == pytest.approx(expected)
    assert verdict.summary == "all 12 criteria are met"


GENERAL = retention({"sft_text": 2.0, "general": 21.0}, {"sft_text": 1.6, "general": 10.0})
PERPLEX = retention({"sft_text": 4.0}, {"sft_text": 1.6})
FORGETFUL = retention({"sft_text": 2.0}, {"sft_text": 1.6}, accuracy=(0.9, 0.98))
STRANGE = planted.responses((7.2, 0.5), (2.0, 0.5))
MONOTONOUS = planted.responses((2.0, 0.1), (2.0, 0.5))
UNKNOWN = retention({}, {"sft_text": 1.6, "general": 3.0})


@pytest.mark.parametrize(
    ("measured", "key", "complaint"),
    [
        (results(gold=0.47), "over_sft/gold", "by the gold judge (95% low) 0.47 ≤ 0.5"),
        (results(retention=PERPLEX), "perplexity/sft_text", "over SFT's 2.5 > 2"),
        (results(retention=GENERAL), "perplexity/general", "2.1 > 2"),
        (results(retention=FORGETFUL), "choice_change", "change from SFT -0.08 < -0.05"),
        (results(responses=STRANGE), "response_perplexity", "by SFT, over SFT's own 3.6 > 2"),
        (results(responses=MONOTONOUS), "distinct_ratio", "in its responses, over SFT's 0.2 < 0.3"),
        (results(failures=(30, 10)), "failure_share", "0.02913 > 0.02"),
        (results(examples=(150, 990), failures=(0, 0)), "examples", "150 < 200"),
        (results(optimized=["gold"]), "optimised_judges", "(gold) 1 > 0"),
    ],
)
def test_a_single_missed_criterion_refuses_and_is_named(
    measured: EvaluationResults, key: str, complaint: str
) -> None:
    verdict = decide(measured)
    assert not verdict.passed
    assert failed(verdict) == [key]
    assert complaint in verdict.summary


def test_without_a_champion_the_policy_must_beat_the_base_model_too() -> None:
    assert failed(decide(results(base=0.45))) == ["over_base/gold", "over_base/reward_model"]
    assert decide(results(base=0.45), over_bar=0.4).passed
    few = planted.comparison("gold", "sft", 0.502)  # such as 4 wins, 196 ties and no loss
    given = results()
    others = tuple(one for one in given.comparisons if (one.judge, one.b) != ("gold", "sft"))
    few = few.model_copy(update={"p_value": 0.125})
    assert failed(decide(given.model_copy(update={"comparisons": (*others, few)}))) == ["over_sft/gold"]
    assert decide(results(base=0.45), champion=planted.over_champion()).passed
    unbeaten = decide(results(base=0.45), champion=planted.over_champion(), over_champion=None)
    assert failed(unbeaten) == ["over_base/gold", "over_base/reward_model"]


def test_a_trial_and_a_dummy_reward_are_refused_by_name() -> None:
    assert decide(trial=True).summary == "these settings only try the pipeline out (promotion.trial)"
    verdict = decide(results(has_reward=False))
    assert verdict.summary == "it was trained by a dummy reward"


def test_a_gate_without_an_independent_judge_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert not decide(results(selecting=["reward_model"])).note
    verdict = decide(results(selecting=["reward_model"]), judge="reward_model", second_judge=None)
    assert "No judge of the gate is independent" in verdict.note
    assert "models/reward_model" in verdict.note
    show(verdict)
    assert capsys.readouterr().out.startswith("No judge of the gate is independent")
    assert Verdict.of_tree(verdict.tree()) == verdict


def test_enough_examples_tell_a_better_policy_from_an_equal_one() -> None:
    """Against the exact power: Wilson's interval over binomial draws."""
    for wins, least in ((0.6, 194), (0.55, 783), (0.7, 47)):
        number = settings(detects=wins).least_examples
        assert number == least
        power = sum(
            binom.pmf(k, number, wins) for k in range(number + 1) if statistics.wilson(k, number).low > 0.5
        )
        assert power == pytest.approx(0.8, abs=0.04)


def test_the_kl_bound_applies_to_the_mean_and_the_standard_error_is_shown() -> None:
    verdict = decide(kl=10.001)
    assert failed(verdict) == ["kl"]
    assert verdict.summary == "KL 10 ± 0.02 > 10"
    assert decide(kl=10.0).passed, "within one standard error of the bound"


def test_at_its_bound_a_win_rate_fails_and_a_budget_is_kept() -> None:
    assert failed(decide(results(gold=0.5))) == ["over_sft/gold"]
    assert decide(results(examples=(200, 200), failures=(0, 0))).passed


def test_an_over_optimised_policy_is_refused() -> None:
    """As with `kl_coef: 0`: its KL is high, and judges that it did not optimize see a worse policy."""
    measured = results(gold=0.31, second=0.45, retention=retention({"sft_text": 50.0}, {"sft_text": 1.6}))
    expected = ["over_sft/gold", "over_sft/reward_model", "kl", "perplexity/sft_text"]
    assert failed(decide(measured, kl=37.0)) == expected


def test_two_disagreeing_judges_refuse() -> None:
    assert failed(decide(results(second=0.2))) == ["over_sft/reward_model"]
    assert decide(results(second=0.2), second_judge=None).passed
    worse_by_one = planted.over_champion(gold=0.6, second=0.48)
    assert failed(decide(champion=worse_by_one)) == ["over_champion/reward_model"]


@pytest.mark.parametrize(
    ("measured", "kl", "reason"),
    [
        (results(gold=None), 1.0, "gold has not compared this policy with sft"),
        (results(), None, "KL is not known: it was not measured of this policy"),
        (results(retention={}), 1.0, "the perplexity of policy on SFT text was not measured"),
        (results(responses={}), 1.0, "corpus_distinct_2 of the responses of policy was not measured"),
        (results(retention={}), 1.0, "the multiple-choice accuracy of policy was not measured"),
        (results(retention=UNKNOWN), 1.0, "the perplexity of policy on general text was not measured"),
        (results(), math.nan, "KL is not known: the measured value is nan"),
        (results(gold=math.inf), 1.0, "the measured value is inf"),
    ],
)
def test_missing_evidence_refuses_with_the_reason(
    measured: EvaluationResults, kl: float | None, reason: str
) -> None:
    verdict = decide(measured, kl)
    assert not verdict.passed
    assert reason in verdict.summary


def test_the_champion_must_be_beaten_if_there_is_one() -> None:
    assert not any(c.key.startswith("over_champion") for c in decide().criteria)
    assert failed(decide(champion=planted.over_champion(gold=0.49))) == ["over_champion/gold"]
    expected = ["over_champion/gold", "over_champion/reward_model", "failure_share", "examples"]
    assert failed(decide(champion=EvaluationResults())) == expected


def drops(**values: float) -> dict[str, TaskChange]:
    return {task: TaskChange(metric="acc", drop=drop, standard_error=0.01) for task, drop in values.items()}


def test_a_drop_on_a_task_is_bounded_and_shown_with_its_standard_error() -> None:
    measured = results(task_changes=drops(arc=0.031, sums=-0.2))
    verdict = decide(measured, max_task_drop=0.03)
    assert failed(verdict) == ["task_drop/arc"]
    assert verdict.summary == "drop on arc (acc) from SFT 0.031 ± 0.01 > 0.03"
    assert decide(measured, max_task_drop=0.031).passed
    assert not any(c.key.startswith("task_drop") for c in decide(measured).criteria), "null in params.yaml"
    assert failed(decide(max_task_drop=0.03)) == ["task_drop"]
    assert "no task of judge.retention.tasks was measured" in decide(max_task_drop=0.03).summary


def test_a_criterion_that_is_null_is_left_out() -> None:
    off = ["max_kl", "max_perplexity_growth", "max_choice_drop", "max_failure_share", "second_judge"]
    off += ["max_response_perplexity_growth", "min_distinct_ratio"]
    keys = [c.key for c in decide(kl=None, **dict.fromkeys(off)).criteria]
    assert keys == ["over_sft/gold", "over_base/gold", "examples", "optimised_judges"]


def test_prompts_alone_leave_out_what_only_demonstrations_measure() -> None:
    general = retention({"general": 11.0}, {"general": 10.0})
    known = {name: one.model_copy(update={"multiple_choice": None}) for name, one in general.items()}
    measured = results(retention=known).model_copy(update={"has_demonstrations": False})
    verdict = decide(measured)
    assert verdict.passed
    keys = [criterion.key for criterion in verdict.criteria]
    assert "perplexity/general" in keys
    assert not {"perplexity/sft_text", "choice_change"} & {*keys}
    for name in ("max_perplexity_growth", "max_choice_drop", "judge.retention.questions"):
        assert name in verdict.note


def test_a_verdict_survives_json_and_its_metrics_agree_with_it() -> None:
    verdict = decide(results(gold=0.4), kl=None)
    numbers, tree = verdict.metrics(), verdict.tree()
    assert (numbers["gate/passed"], tree["passed"]) == (0.0, False)
    assert numbers["over_sft/gold/margin"] == pytest.approx(-0.1)
    assert "kl/value" not in numbers
    assert numbers["kl/passed"] == 0.0
    assert Verdict.of_tree(json.loads(json.dumps(tree))) == verdict
    criteria = {criterion["key"]: criterion for criterion in tree["criteria"]}
    assert criteria["kl"]["value"] is None
    earlier = decide().tree()  # without standard errors
    for criterion in earlier["criteria"]:
        del criterion["standard_error"]
    rows = {row["criterion"]: row for row in Verdict.of_tree(earlier).rows()}
    assert rows["KL"]["value"] == "1.5"


# -------------------------------------------------------------------------------- configuration

FUNCTION = {"kind": "function", "name": "short", "function": "mine:short"}
SCORER = {"kind": "function", "weight": 1.0, "function": "mine:short"}
OPTIMIZED = {**HELDOUT, "name": "own", "path": "models/reward"}
BOTH = {"kind": "all_of", "name": "reward_model", "judges": ["gold", "own"]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"promotion.judge": "best"}, "promotion.judge='best' is not in judge.judges"),
        ({"promotion.second_judge": "gold"}, "both use gold"),
        ({"promotion.over_sft": None}, "promotion.over_sft: Input should be a valid number"),
        ({"promotion.over_bar": None}, "promotion.over_bar: Input should be a valid number"),
        ({"promotion.over_sft": 0.0}, "promotion.over_sft=0.0 would pass a policy that clearly loses"),
        ({"promotion.over_bar": 0.39}, "promotion.over_bar=0.39 would pass a policy that clearly loses"),
        ({"promotion.over_champion": 0.0}, "give at least 0.4, or mark the settings by promotion.trial"),
        ({"promotion.detects": 1.0}, "promotion.detects: Input should be less than or equal to 0.7"),
        (
            {"judge.judges": [{**HELDOUT, "name": "gold", "path": "./models/reward_heldout"}, HELDOUT]},
            "both use reward_model",
        ),
        ({"promotion.min_examples": 2000}, "more than judge.num_examples=1000"),
        ({"judge.retention": None}, "promotion.max_choice_drop needs judge.retention"),
        ({"promotion.max_task_drop": 0.1}, "promotion.max_task_drop needs judge.retention.tasks"),
        ({"ppo.reference_sync": {"every": 2, "alpha": 0.6}}, "set promotion.max_kl to null"),
        (
            {"judge.judges": [GOLD, {**HELDOUT, "path": "models/reward/"}]},
            "promotion.second_judge='reward_model' uses models/reward/, which PPO optimizes",
        ),
        (
            {"judge.judges": [GOLD, HELDOUT, FUNCTION], "promotion.judge": "short", "ppo.scorers": [SCORER]},
            "promotion.judge='short' uses mine:short, which PPO optimizes",
        ),
        ({"judge.judges": [GOLD, OPTIMIZED, BOTH]}, "uses models/reward, which PPO optimizes"),
    ],
)
def test_criteria_that_cannot_hold_are_config_errors_but_for_a_trial(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate(shipped(changes), "test")
    assert problem in str(caught.value)
    bounds = {"promotion.over_sft": 0.0, "promotion.over_champion": 0.0}
    config.validate(shipped(bounds | {"promotion.trial": True}), "test")


def test_only_verdict_and_report_read_the_criteria() -> None:
    """A change of the gate runs no training and no judge again."""
    readers = [
        name for name, reads in config.VIEWS.items() if any("promotion" in key for key in reads.reads())
    ]
    assert readers == ["ppo", "verdict", "report"], (
        "PPO reads the trial mark, which it writes into the policy"
    )

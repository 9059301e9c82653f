"""The gate's arithmetic: a better policy passes, any other is refused, and it says why."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.config import Promotion
from rlhf_tasks.errors import ConfigError
from rlhf_tasks.promotion import gate
from tests.promotion.planted import BETTER, KL, over_champion, shipped

SUSPECTS = ("gold", "reward_model")


def settings(**changes: Any) -> Promotion:
    return Promotion.model_validate(shipped()["promotion"] | changes)


def decide(
    changes: Mapping[str, float | None] | None = None, *, champion: bool = False, **asked: Any
) -> gate.Verdict:
    given: dict[str, float | None] = {**BETTER, "kl": KL, **(over_champion() if champion else {})}
    given |= changes or {}
    measured = {key: value for key, value in given.items() if value is not None}
    return gate.decide(settings(**asked), measured, suspects=SUSPECTS, champion=champion)


def failed(verdict: gate.Verdict) -> list[str]:
    return [criterion.key for criterion in verdict.criteria if not criterion.passed]


def test_a_better_policy_passes_every_criterion_with_its_margin() -> None:
    verdict = decide(champion=True)
    assert verdict.passed
    margins = {c.key: c.margin for c in verdict.criteria}
    assert margins == pytest.approx({
        "over_sft/gold": 0.32, "over_sft/reward_model": 0.3,
        "over_champion/gold": 0.05, "over_champion/reward_model": 0.03,
        "kl": 8.5,
        "perplexity/sft_text": 0.75,  # 2 − 2.0/1.6
        "choice_drop": 0.04,  # 0.05 − (0.98 − 0.97)
        "failure_share": 0.01,  # 0.02 − 10/1000
        "examples": 790,  # the fewest, 990, − 200
        "optimised_judges": 0,
    })  # fmt: skip
    assert verdict.summary == "all 10 criteria are met"


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"gold/policy_vs_sft/low": 0.47}, "over_sft/gold", "by gold (95% low) 0.47 ≤ 0.5"),
        ({"kl": 11.2}, "kl", "KL 11.2 > 10"),
        ({"perplexity/sft_text/policy": 4.0}, "perplexity/sft_text", "over SFT's 2.5 > 2"),
        (
            {"perplexity/general/sft": 10.0, "perplexity/general/policy": 21.0},
            "perplexity/general",
            "2.1 > 2",
        ),
        ({"choice/policy": 0.9}, "choice_drop", "lost since SFT 0.08 > 0.05"),
        ({"gold/policy_vs_sft/failures": 30}, "failure_share", "0.02913 > 0.02"),
        ({"gold/policy_vs_sft/examples": 150}, "examples", "150 < 200"),
        ({"gold/is_optimised_reward": 1.0}, "optimised_judges", "(gold) 1 > 0"),
    ],
)
def test_one_criterion_missed_refuses_and_is_named(changes: dict[str, float], key: str, said: str) -> None:
    verdict = decide(changes)
    assert not verdict.passed
    assert failed(verdict) == [key]
    assert said in verdict.summary


def test_at_its_bound_a_win_rate_is_no_win_and_a_budget_is_kept() -> None:
    assert failed(decide({"gold/policy_vs_sft/low": 0.5})) == ["over_sft/gold"]
    assert decide({"kl": 10.0}).passed
    assert decide({"gold/policy_vs_sft/examples": 200}).passed


def test_an_over_optimised_policy_is_refused_though_its_reward_is_high() -> None:
    """As `kl_coef: 0` ends: its own reward rises, KL too, and a judge that it did not optimise sees worse."""
    verdict = decide({
        "kl": 37.0, "gold/policy_vs_sft/low": 0.31, "reward_model/policy_vs_sft/low": 0.45,
        "perplexity/sft_text/policy": 50.0,
        "objective/scores": 9.0, "reward_gap/win_rate_by_reward": 0.99, "eval/scores": 9.0,
    })  # fmt: skip
    assert failed(verdict) == ["over_sft/gold", "over_sft/reward_model", "kl", "perplexity/sft_text"]


def test_two_judges_that_disagree_promote_nothing() -> None:
    assert failed(decide({"reward_model/policy_vs_sft/low": 0.2})) == ["over_sft/reward_model"]
    assert decide({"reward_model/policy_vs_sft/low": 0.2}, second_judge=None).passed
    worse_by_one = over_champion(low=0.6, second=0.48)
    assert failed(decide(worse_by_one, champion=True)) == ["over_champion/reward_model"]


@pytest.mark.parametrize("missing", [*BETTER, "kl"])
def test_missing_evidence_refuses_with_the_reason(missing: str) -> None:
    verdict = decide({missing: None})
    if missing.endswith("/win_rate"):  # not the gate's: it goes by the interval's end
        assert verdict.passed
        return
    assert not verdict.passed
    assert f"{missing} was not measured of this policy" in verdict.summary


def test_a_value_that_is_no_number_is_no_evidence() -> None:
    assert "kl is nan" in decide({"kl": math.nan}).summary
    assert not decide({"gold/policy_vs_sft/low": math.inf}).passed


def test_a_champion_must_be_beaten_where_there_is_one() -> None:
    assert not any(c.key.startswith("over_champion") for c in decide().criteria)
    assert failed(decide(over_champion(low=0.49), champion=True)) == ["over_champion/gold"]
    beaten = {f"{judge}/policy_vs_champion/low": None for judge in SUSPECTS}
    assert failed(decide(beaten, champion=True)) == ["over_champion/gold", "over_champion/reward_model"]


def test_a_criterion_that_is_null_is_not_asked_for() -> None:
    off: dict[str, Any] = dict.fromkeys(
        (
            "max_kl",
            "max_perplexity_growth",
            "max_choice_drop",
            "max_failure_share",
            "second_judge",
        )
    )
    keys = [c.key for c in decide({"kl": None}, **off).criteria]
    assert keys == ["over_sft/gold", "examples", "optimised_judges"]


class Spy(Mapping[str, float]):
    """Remembers what was asked for."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values_, self.asked = values, set[str]()

    def __getitem__(self, key: str) -> float:
        self.asked.add(key)
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the gate asks by name")

    def __len__(self) -> int:
        return len(self.values_)


def test_the_gate_never_reads_the_optimised_reward() -> None:
    """All that it asks for is on this list, in which no metric of the optimised reward is."""
    spy = Spy({**BETTER, "kl": KL, **over_champion(), "objective/scores": 1.0, "eval/scores": 1.0})
    gate.decide(settings(), spy, suspects=SUSPECTS, champion=True)
    of_pairs = {
        f"{judge}/policy_vs_{other}/{name}"
        for judge in SUSPECTS
        for other in ("sft", "champion")
        for name in ("low", "examples", "failures")
    }
    retention = {
        f"{what}/{who}"
        for what in ("perplexity/sft_text", "perplexity/general", "choice")
        for who in ("sft", "policy")
    }
    marks = {f"{judge}/is_optimised_reward" for judge in SUSPECTS}
    assert spy.asked == of_pairs | retention | marks | {"kl"}


def test_the_verdict_as_numbers_and_as_json_says_the_same() -> None:
    verdict = decide({"kl": None, "gold/policy_vs_sft/low": 0.4})
    numbers, tree = verdict.metrics(), verdict.tree()
    assert (numbers["gate/passed"], tree["passed"]) == (0.0, False)
    assert numbers["over_sft/gold/margin"] == pytest.approx(-0.1)
    assert "kl/value" not in numbers
    assert numbers["kl/passed"] == 0.0
    assert gate.Verdict.of_tree(json.loads(json.dumps(tree))) == verdict
    told = {criterion["key"]: criterion for criterion in tree["criteria"]}
    assert told["kl"]["value"] is None
    assert [f.name for f in dataclasses.fields(gate.Criterion)] == [
        k for k in told["kl"] if k not in ("margin", "passed")
    ]


# -------------------------------------------------------------------------------- configuration

GOLD = {"kind": "gold", "name": "gold"}
HELDOUT = {"kind": "reward_model", "name": "reward_model", "path": "models/reward_heldout"}
FUNCTION = {"kind": "function", "name": "short", "function": "mine:short"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"promotion.judge": "best"}, "promotion.judge='best' is no judge of judge.judges"),
        ({"promotion.second_judge": "gold"}, "both go by what gold says"),
        ({"promotion.over_sft": None}, "promotion.over_sft: Input should be a valid number"),
        (
            {
                "judge.judges": [
                    {**HELDOUT, "name": "gold", "path": "./models/reward_heldout"},
                    HELDOUT,
                ]
            },
            "both go by what reward_model says",
        ),
        ({"promotion.min_examples": 2000}, "more than judge.num_examples=1000"),
        ({"judge.retention": None}, "promotion.max_choice_drop needs judge.retention"),
        ({"ppo.reference_sync": {"every": 2, "alpha": 0.6}}, "set promotion.max_kl to null"),
        (
            {"judge.judges": [GOLD, {**HELDOUT, "path": "models/reward/"}]},
            "promotion.second_judge='reward_model' goes by models/reward/, which PPO optimises",
        ),
        (
            {
                "judge.judges": [GOLD, HELDOUT, FUNCTION],
                "promotion.judge": "short",
                "ppo.scorers": [{"kind": "function", "weight": 1.0, "function": "mine:short"}],
            },
            "promotion.judge='short' goes by mine:short, which PPO optimises",
        ),
        (
            {
                "judge.judges": [
                    GOLD,
                    {**HELDOUT, "name": "own", "path": "models/reward"},
                    {"kind": "all_of", "name": "reward_model", "judges": ["gold", "own"]},
                ]
            },
            "goes by models/reward, which PPO optimises",
        ),
    ],
)
def test_a_gate_that_cannot_be_is_refused_by_params(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        config.validate(shipped(changes), "test")
    assert said in str(told.value)


def test_no_stage_but_its_own_runs_again_for_it() -> None:
    readers = [
        name for name, reads in config.VIEWS.items() if any("promotion" in key for key in reads.reads())
    ]
    assert readers == ["verdict"]


def test_null_turns_it_off() -> None:
    assert config.validate(shipped({"promotion": None}), "test").promotion is None

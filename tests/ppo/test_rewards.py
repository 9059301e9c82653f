"""The place of the score, the cost of KL, the score of unfinished responses, and the scaling of scores."""

from __future__ import annotations

import statistics

import pytest
import torch

from rlhf_tasks.config.ppo import EosTrickReplace, ScoreScaling
from rlhf_tasks.ppo.rewards import ScoreScaler, bootstrap_values, token_rewards, truncated_scores
from tests import small

MASK = torch.tensor([[True, True, True], [True, False, False]])
KL = torch.tensor([[1.0, -2.0, 0.5], [3.0, torch.nan, 9.0]])
SCORES = torch.tensor([10.0, -4.0])


@pytest.mark.parametrize(
    ("kl_coef", "rewards"), [(0.0, [[0, 0, 10], [-4, 0, 0]]), (0.5, [[-0.5, 1.0, 9.75], [-5.5, 0, 0]])]
)
def test_the_score_lands_on_the_last_response_token_and_the_kl_on_every_one(
    kl_coef: float, rewards: list[list[float]]
) -> None:
    assert token_rewards(SCORES, KL, MASK, kl_coef).tolist() == rewards


@pytest.mark.parametrize(
    ("kind", "unfinished", "bootstrapped"),
    [
        ("none", 5.0, 0.0),
        ("eos_trick_replace", -1.0, 0.0),
        ("eos_trick_subtract", 4.0, 0.0),
        ("bootstrap", 0.0, 3.0),
        ("bootstrap_add", 5.0, 3.0),
    ],
)
def test_the_rule_applies_only_to_responses_that_did_not_end(
    kind: str, unfinished: float, bootstrapped: float
) -> None:
    ended, rule = torch.tensor([True, False, True]), small.ppo(truncation={"kind": kind}).truncation
    scores = truncated_scores(torch.tensor([2.0, 5.0, -3.0]), ended, rule)
    assert scores.tolist() == [2.0, unfinished, -3.0]
    assert bootstrap_values(torch.tensor([7.0, 3.0, 7.0]), ended, rule).tolist() == [0.0, bootstrapped, 0.0]


def test_eos_trick_replace_ignores_the_scorers_number() -> None:
    scores, ended = torch.tensor([torch.nan]), torch.tensor([False])
    assert truncated_scores(scores, ended, EosTrickReplace()).item() == -1


# --------------------------------------------------------------------------------------- scaling

BATCHES = [[1.0, 2.0, 6.0], [-3.0, 0.5], [4.0, 4.0, 4.0, 10.0]]


@pytest.mark.parametrize("subtract_mean", [True, False])
def test_scores_are_scaled_by_the_moments_of_all_scores_so_far(subtract_mean: bool) -> None:
    scaler = ScoreScaler(ScoreScaling(subtract_mean=subtract_mean, clip=None))
    past: list[float] = []
    for batch in BATCHES:
        past += batch
        result = scaler(torch.tensor(batch))
        shift = statistics.fmean(past) if subtract_mean else 0.0
        expected = [(x - shift) / statistics.pstdev(past) for x in batch]
        assert result.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "scores", "scaled"),
    [
        (ScoreScaling(subtract_mean=True, clip=0.5), [0.0, 1.0], [-0.5, 0.5]),
        (ScoreScaling(subtract_mean=True, clip=None), [2.0, 2.0], [0, 0]),
        (None, [5.0, -7.0], [5, -7]),
    ],
    ids=["clipped", "equal scores", "without settings"],
)
def test_scaling_clips_and_never_divides_by_zero(
    settings: ScoreScaling | None, scores: list[float], scaled: list[float]
) -> None:
    assert ScoreScaler(settings)(torch.tensor(scores)).tolist() == scaled


def test_moments_continue_from_their_saved_state() -> None:
    settings = ScoreScaling(subtract_mean=True, clip=1.0)
    one, other = ScoreScaler(settings), ScoreScaler(settings)
    one(torch.tensor(BATCHES[0]))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(torch.tensor(BATCHES[1])), other(torch.tensor(BATCHES[1])))

"""Where the score lands, what KL costs, and what an unfinished answer scores."""

from __future__ import annotations

import pytest
import torch

from rlhf_tasks.ppo.kl import k1
from rlhf_tasks.ppo.rewards import replace_missing_eos, token_rewards

MASK = torch.tensor([[True, True, True], [True, False, False]])
KL = torch.tensor([[1.0, -2.0, 0.5], [3.0, torch.nan, 9.0]])
SCORES = torch.tensor([10.0, -4.0])


def test_the_score_lands_on_the_last_response_token() -> None:
    rewards = token_rewards(SCORES, KL, MASK, kl_coef=0.0)
    assert rewards.tolist() == [[0, 0, 10], [-4, 0, 0]]


def test_kl_costs_on_every_real_token_and_on_no_other() -> None:
    rewards = token_rewards(SCORES, KL, MASK, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1.0, 9.75], [-5.5, 0, 0]]


def test_rewards_sum_to_score_and_non_score_reward() -> None:
    rewards = token_rewards(SCORES, KL, MASK, kl_coef=0.1)
    assert rewards.sum().item() == pytest.approx(6.0 - 0.25)  # −0.1 · (1 − 2 + 0.5 + 3)


def test_kl_is_how_much_likelier_the_policy_finds_its_own_token() -> None:
    assert k1(torch.tensor([-1.0, -3.0]), torch.tensor([-3.0, -1.0])).tolist() == [2, -2]


@pytest.mark.parametrize("said", [5.0, -9.0, torch.nan])
def test_the_eos_trick_replaces_the_score_of_an_answer_that_did_not_end(said: float) -> None:
    found = replace_missing_eos(torch.tensor([2.0, said, -3.0]), torch.tensor([True, False, True]), -1.0)
    assert found.tolist() == [2.0, -1.0, -3.0]

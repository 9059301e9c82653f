"""Several reward models as one score, and the penalty on length, against numbers worked out apart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.columns import NONE
from rlhf_tasks.modeling.combining import combined, length_penalties
from rlhf_tasks.modeling.scorers import Part, WeightedSum, build
from tests import small

NAMES = ("a", "b", "c")


def rule(value: Any) -> Any:
    return TypeAdapter(config.Combination).validate_python(value)


def planted(scores: dict[str, list[float]], weights: dict[str, float], combine: Any) -> torch.Tensor:
    """The total of planted scores; `penalty` is no reward model."""
    model = small.scores()
    parts = [
        Part(
            name,
            weights[name],
            lambda queries, responses, columns=NONE: torch.zeros(0),
            None if name == "penalty" else model,
        )
        for name in scores
    ]
    return WeightedSum(parts, rule(combine)).total({name: torch.tensor(row) for name, row in scores.items()})


@pytest.mark.parametrize("combine", ["sum", "min", {"mean_minus_deviations": 0.5}], ids=str)
def test_reward_models_are_weighted_then_combined_and_other_scorers_are_added(combine: Any) -> None:
    """Row by row in float64, by the standard library."""
    draws = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    scores = {name: draws[i].tolist() for i, name in enumerate((*NAMES, "penalty"))}
    weights = {"a": 1.0, "b": 0.5, "c": 2.0, "penalty": 3.0}
    expected = []
    for row in range(7):
        rewards = [weights[name] * scores[name][row] for name in NAMES]
        one = {
            "sum": sum(rewards),
            "min": min(rewards),
        }.get(str(combine), statistics.fmean(rewards) - 0.5 * statistics.pstdev(rewards))
        expected.append(one + weights["penalty"] * scores["penalty"][row])
    torch.testing.assert_close(planted(scores, weights, combine), torch.tensor(expected))


def test_models_that_agree_lose_nothing_to_pessimism() -> None:
    scores = torch.tensor([[0.25, -1.5]] * 3)
    assert combined(scores, "min").tolist() == [0.25, -1.5]
    assert combined(scores, rule({"mean_minus_deviations": 2.0})).tolist() == [0.25, -1.5]


def test_disagreement_costs_its_deviation() -> None:
    """(1, 3): mean 2, deviation 1; twice that leaves 0."""
    assert combined(torch.tensor([[1.0], [3.0]]), rule({"mean_minus_deviations": 2.0})).tolist() == [0.0]


def test_the_length_penalty_by_numbers_worked_out_on_paper() -> None:
    """max_tokens 20, buffer 8: free up to 12, an eighth per token from there, −1 from 20."""
    found = length_penalties([0, 12, 13, 16, 19, 20, 21, 100], max_tokens=20, buffer=8)
    assert found.tolist() == [0.0, 0.0, -0.125, -0.5, -0.875, -1.0, -1.0, -1.0]


def test_the_penalty_counts_the_tokens_of_the_response_with_its_stop_token() -> None:
    one = config.LengthPenalty(kind="length_penalty", weight=2.0, max_tokens=4, buffer=2)
    found = build([one], small.tokenizer(), reward_model=None, max_tokens=10, root=Path())
    parts = found.parts([[3] * 9] * 3, [[4, 4], [4, 4, small.EOS], [4, 4, 4, 4]])
    assert parts["length_penalty"].tolist() == [0.0, -0.5, -1.0]
    assert found.total(parts).tolist() == [0.0, -1.0, -2.0]

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.audit import audit, trivial_responses

END = 9
QUERIES = [[1, 2, 3, 4, 5, 6, 7], [1, 2]]
REFERENCES = [[3, 4, 5, END], [6, END]]


def of(**changes: int) -> dict[str, list[Ids]]:
    settings = {"end": END, "response_length": 6, "seed": 1} | changes
    return trivial_responses(QUERIES, REFERENCES, **settings)


def test_the_kinds_of_trivial_responses() -> None:
    found = of()
    shuffled = found.pop("shuffled")
    assert [sorted(row) for row in shuffled] == [sorted(row) for row in REFERENCES]
    assert [row[-1] for row in shuffled] == [END, END]
    assert found == {
        "reference": REFERENCES,
        "constant": [[3, 4, 5, END]] * 2,
        "empty": [[END], [END]],
        "copied_prompt": [[3, 4, 5, 6, 7, END], [1, 2, END]],
        "repeated": [[3, 3, 3, 3, 3, END], [6, 6, 6, 6, 6, END]],
        "longest": [[3, 4, 5, 3, 4, 5], [6, 6, 6, 6, 6, 6]],
    }


def test_no_response_is_longer_than_ppos() -> None:
    for length in (1, 2, 3):
        assert all(len(row) <= length for rows in of(response_length=length).values() for row in rows)


def by_length(responses: list[Ids]) -> Tensor:
    return torch.tensor([float(len(row)) for row in responses])


def test_a_reward_for_length_is_named_with_what_would_earn_it(capsys: pytest.CaptureFixture[str]) -> None:
    earnings = audit(of(), by_length)
    assert earnings["reference"] == {"score": 3.0, "beats_reference": 0.0}
    assert earnings["constant"] == {"score": 4.0, "beats_reference": 0.5}
    assert earnings["longest"] == {"score": 6.0, "beats_reference": 1.0}
    shown = capsys.readouterr().out
    assert "earn more than the references (3): constant 4, copied prompt 4.5, repeated 6, longest 6." in shown
    assert "empty | 1 | 0" in shown


def test_a_reward_of_references_is_not_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    audit(of(), lambda responses: torch.tensor([float(row in REFERENCES) for row in responses]))
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [NonFiniteError, UserError])
def test_a_kind_without_a_score_is_named_and_the_others_are_shown(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def no_empty(responses: list[Ids]) -> Tensor:
        if [END] in responses:
            raise kind("ppo.scorers: mine failed")
        return by_length(responses)

    earnings = audit(of(), no_empty)
    assert set(of()) - set(earnings) == {"empty"}
    assert "empty responses have no score: ppo.scorers: mine failed" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [NonFiniteError, UserError])
def test_a_scorer_that_refuses_the_references_ends_the_run(kind: type[Exception]) -> None:
    def refuse(responses: list[Ids]) -> Tensor:
        raise kind("mine gave nothing")

    with pytest.raises(kind, match="mine gave nothing"):
        audit(of(), refuse)


def test_a_constant_reward_has_nothing_to_learn(capsys: pytest.CaptureFixture[str]) -> None:
    audit(of(), lambda responses: torch.zeros(len(responses)))
    assert "every kind of response earns the same" in capsys.readouterr().out

"""The weighted sum of scorers, and the length penalty, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.tokenizer import encode
from rlhf_tasks.scoring.build import WeightedScorer, WeightedSum, build
from rlhf_tasks.scoring.protocol import NonFiniteScore, Responses, ScorerError
from rlhf_tasks.scoring.reward_model import RewardModel, load_foreign
from tests import small
from tests.small import EOS

PROMPTS, TEXTS = ["w0 w1", "w2", "w3 w4 w5"], ["w6 w7", "w8", ""]
SIX, SEVEN, EIGHT = (ids[0] for ids in encode(small.tokenizer(), ["w6", "w7", "w8"]))
QUERIES, RESPONSES = encode(small.tokenizer(), PROMPTS), [[SIX, SEVEN, EOS], [EIGHT], [EOS]]
ROWS = Responses.of_ids(PROMPTS, QUERIES, RESPONSES, small.tokenizer())


def built(*given: Mapping[str, Any], root: Path | None = None, reward: Any = None) -> WeightedSum:
    settings: tuple[config.Scorer, ...] = TypeAdapter(tuple[config.Scorer, ...]).validate_python(given)
    return build(
        settings,
        small.tokenizer(),
        reward_model=reward,
        max_tokens=1000,
        root=root or Path(),
        placement=small.distributed(),
    )


def test_the_other_form_of_the_rows_is_made_once_and_without_the_last_eos() -> None:
    assert (ROWS.prompts, ROWS.texts, ROWS.ended) == (PROMPTS, TEXTS, [True, False, True])
    assert ROWS.texts is ROWS.texts
    assert Responses.of_ids(["w6"], [[SIX]], [[EOS, SIX, EOS]], small.tokenizer()).texts == ["<eos> w6"]
    judged = Responses.of_texts(PROMPTS, TEXTS)
    ended = [[SIX, SEVEN, EOS], [EIGHT, EOS], [EOS]]
    assert judged.ids(small.tokenizer()) == (QUERIES, ended), "a judge's responses all ended"
    assert (judged.texts, judged.ended, len(judged)) == (TEXTS, [True] * 3, 3)


def test_the_sum_is_weighted_and_its_parts_are_not(tmp_path: Path) -> None:
    code = "def words(p, r):\n    return [len(x.split()) for x in r]\n"
    (tmp_path / "rewards_of_words.py").write_text(code, encoding="utf-8")
    words = {"kind": "function", "function": "rewards_of_words:words"}
    model = small.scores()
    penalty = {"kind": "length_penalty", "weight": 0.1, "max_tokens": 4, "buffer": 2}
    found = built(
        words | {"weight": -0.5},
        {"kind": "reward_model", "weight": 2.0},
        penalty,
        words | {"weight": 3.0},
        {"kind": "dummy"},
        root=tmp_path,
        reward=model,
    )
    parts = found.parts(ROWS)
    assert tuple(parts) == ("function", "reward_model", "length_penalty", "function_2", "dummy")
    learnt = small.last_scores_alone(model, *ROWS.given)
    torch.testing.assert_close(parts["reward_model"], learnt, atol=1e-5, rtol=0)
    assert parts["function"].tolist() == parts["function_2"].tolist() == [2.0, 1.0, 0.0]
    assert parts["length_penalty"].tolist() == [-0.5, 0.0, 0.0]
    assert parts["dummy"].tolist() == [0.0, 0.0, 0.0]
    total = learnt * 2 + torch.tensor([-1 + 6 - 0.05, -0.5 + 3, 0])
    torch.testing.assert_close(found.total(parts), total, atol=1e-5, rtol=0)


def test_a_dummy_alone_gives_zeros() -> None:
    found, nothing = built({"kind": "dummy"}), Responses.of_ids([], [], [], small.tokenizer())
    assert found.total(found.parts(ROWS)).tolist() == [0.0, 0.0, 0.0]
    assert found.total(found.parts(nothing)).shape == (0,)


def test_the_error_names_the_scorer_that_gives_nan(tmp_path: Path) -> None:
    broken = small.scores()
    broken.mean = float("nan")
    with pytest.raises(ScorerError, match="reward_model gave nan for response 0 of 3"):
        built({"kind": "reward_model", "weight": 1.0}, reward=broken).parts(ROWS)
    # 1e300 is beyond float32
    code = (
        "def nan(p, r):\n    return [1.0, float('nan'), 2.0]\ndef big(p, r):\n    return [1.0, 2.0, 1e300]\n"
    )
    (tmp_path / "rewards_of_nan.py").write_text(code, encoding="utf-8")
    for name, why in {"nan": r"nan for response 1 of 3 \(1 of them", "big": "inf for response 2"}.items():
        one = {"kind": "function", "weight": 1.0, "function": f"rewards_of_nan:{name}"}
        with pytest.raises(NonFiniteScore, match=f"^ppo.scorers: function gave {why}"):
            built(one, root=tmp_path).parts(ROWS)


def test_the_reward_models_of_named_folders_are_loaded_and_their_names_kept(models_here: Path) -> None:
    plain, named = {"kind": "reward_model", "weight": 1.0}, {"path": "models/reward", "name": "helpful"}
    model = small.scores()
    found = built(plain, plain | named, reward=model)
    parts = found.parts(ROWS)
    assert list(parts) == ["reward_model", "helpful"]
    alone = load_foreign(Path("models/reward"), small.tokenizer(), 1000, small.distributed())
    torch.testing.assert_close(parts["helpful"], alone(ROWS), atol=1e-5, rtol=0)


def test_reward_models_pass_before_a_part_that_raises() -> None:
    """Where they are sharded, a process that raised first would leave the others waiting in their passes."""
    calls: list[int] = []
    model = RewardModel(small.scores(), small.tokenizer())
    model.model.register_forward_hook(lambda *_: calls.append(1))

    def fail(rows: Responses) -> torch.Tensor:
        raise NonFiniteScore("NaN")

    with pytest.raises(NonFiniteScore):
        WeightedSum([WeightedScorer("service", 1.0, fail), WeightedScorer("model", 1.0, model)]).parts(ROWS)
    assert calls == [1]


def test_the_length_penalty_by_numbers_worked_out_on_paper() -> None:
    """max_tokens 20, buffer 8: free up to 12, an eighth per token from there, −1 from 20; EOS counts."""
    lengths = [1, 12, 13, 16, 19, 20, 21, 100]
    rows = Responses.of_ids(
        ["w0"] * 8, [[3]] * 8, [[4] * (n - 1) + [EOS] for n in lengths], small.tokenizer()
    )
    found = built({"kind": "length_penalty", "weight": 2.0, "max_tokens": 20, "buffer": 8})
    parts = found.parts(rows)
    assert parts["length_penalty"].tolist() == [0.0, 0.0, -0.125, -0.5, -0.875, -1.0, -1.0, -1.0]
    assert found.total(parts).tolist() == [0.0, 0.0, -0.25, -1.0, -1.75, -2.0, -2.0, -2.0]

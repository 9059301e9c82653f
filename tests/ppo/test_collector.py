"""A rollout holds what policy, reference, critic and scorers give for each row alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.batches import Ids, collate
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.modeling.tensors import NonFiniteError
from tests import small
from tests.ppo.toy import (
    QUERIES,
    sampled_rollout,
    share_of_token_5,
    trainer,
)
from tests.small import EOS, PAD


def test_a_rollout_holds_what_the_models_give_for_each_row_alone() -> None:
    one = trainer(reference_seed=7)
    rollout = sampled_rollout(one)
    reference, value = small.causal(seed=7), small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        n = len(response)
        alone = (small.logits_alone(reference, query, response) / 0.8).log_softmax(-1)
        torch.testing.assert_close(
            rollout.ref_logprobs[row, :n], alone[range(n), response], atol=1e-5, rtol=0
        )
        with torch.no_grad():
            values = value(collate([query], [response], PAD))[0]
        torch.testing.assert_close(
            rollout.values[row, :n], values[:-1], atol=1e-5, rtol=0
        )  # the value of token t is read on the token before it
        assert rollout.mask[row].tolist() == [True] * n + [False] * (8 - n)
        assert bool(rollout.ended[row]) == (response[-1] == EOS)
    assert rollout.scores.tolist() == share_of_token_5(QUERIES, rollout.responses).tolist()


def test_micro_batches_do_not_change_a_rollout() -> None:
    large, small_ones = (sampled_rollout(trainer(micro_batch_tokens=n)) for n in (16384, 20))
    assert large.responses == small_ones.responses
    torch.testing.assert_close(large.values, small_ones.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(large.ref_logprobs, small_ones.ref_logprobs, atol=1e-5, rtol=0)


def test_a_rollout_sampled_in_parts_has_the_policys_log_probs() -> None:
    one = trainer(sampler__batch_size=5)  # 16 responses: 5, 5, 5 and 1
    rollout = sampled_rollout(one)
    assert len(rollout.responses) == len(QUERIES)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        alone = (small.logits_alone(small.causal(), query, response) / 0.8).log_softmax(-1)
        torch.testing.assert_close(
            rollout.logprobs[row, : len(response)], alone[range(len(response)), response], atol=1e-5, rtol=0
        )
    assert len(set(map(tuple, rollout.responses[::5]))) > 1, "each part draws numbers of its own"


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate allows one precision a process there")
def test_below_float32_log_probs_are_those_of_a_training_pass() -> None:
    """An equal reference then has a KL of exactly 0; the sampler's own log-probs are off by rounding."""
    rollout = sampled_rollout(trainer(rt=small.runtime("bf16")))
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    plain = sampled_rollout(trainer(rt=small.runtime()))
    assert not torch.equal(plain.logprobs, plain.ref_logprobs)


def test_the_last_value_is_the_value_of_the_state_after_the_last_token() -> None:
    one = trainer()
    rollout = sampled_rollout(one)
    value = small.scores(seed=3)
    for row, (query, response) in enumerate(zip(QUERIES, rollout.responses, strict=True)):
        with torch.no_grad():
            alone = value(collate([query], [response], PAD))[0, -1]
        assert rollout.last_values[row].item() == pytest.approx(alone.item(), abs=1e-5)


def test_a_custom_stop_token_ends_responses() -> None:
    one = trainer(stop_token=7, truncation__kind="eos_trick_replace")
    rollout = sampled_rollout(one)
    for response, ended in zip(rollout.responses, rollout.ended.tolist(), strict=True):
        assert ended == (response[-1] == 7)
        assert 7 not in response[:-1]
    assert rollout.ended.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_nan_or_infinite_is_an_error(bad: float) -> None:
    def score(queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        return torch.tensor([bad] + [0.0] * (len(queries) - 1))

    with pytest.raises(NonFiniteError, match="scores"):
        sampled_rollout(trainer(score))

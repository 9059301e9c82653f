"""Pure sampling: the log-probs kept are the training forward's, whatever left the batch and when."""

from __future__ import annotations

import pytest
import torch

from rlhf_tasks.data.batches import collate, text_of
from rlhf_tasks.modeling.generation import Samples, answer, sample
from rlhf_tasks.ppo.rollout import logprobs_of
from tests import small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, _ = small.rows(24, longest=7)


def samples(family: Family = "llama", seed: int = 1, temperature: float = 0.7) -> Samples:
    return sample(
        small.causal(family), QUERIES, max_new_tokens=12, temperature=temperature, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_row_do_not_depend_on_rows_that_ended_earlier(family: Family) -> None:
    found, model = samples(family), small.causal(family)
    lengths = set(map(len, found.responses))
    assert len(lengths) > 3, "rows must leave at different times for this to show anything"
    for query, response, logprobs in zip(QUERIES, found.responses, found.logprobs, strict=True):
        alone = (small.logits_alone(model, query, response) / 0.7).log_softmax(-1)
        alone = alone[range(len(response)), response]
        torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_the_training_forward_pass(family: Family) -> None:
    found = samples(family)
    with torch.no_grad():
        again = logprobs_of(small.causal(family), collate(QUERIES, found.responses, PAD), 0.7)
    for row, logprobs in enumerate(found.logprobs):
        torch.testing.assert_close(logprobs, again[row, -len(logprobs) :], atol=1e-5, rtol=0)


def test_a_response_ends_at_its_first_eos_or_at_the_limit() -> None:
    responses = samples().responses
    assert {r[-1] == EOS for r in responses} == {True, False}
    for response in responses:
        assert EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == 12


def test_pad_may_equal_eos_while_sampling() -> None:
    def with_pad(pad: int) -> list[list[int]]:
        return sample(
            small.causal(), QUERIES, max_new_tokens=12, temperature=1.0, stop=EOS, pad=pad,
            generator=torch.Generator().manual_seed(3),
        ).responses  # fmt: skip

    assert with_pad(EOS) == with_pad(PAD)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    count, query = 4000, [4, 9, 5]
    model = small.causal()
    found = sample(
        model, [query] * count, max_new_tokens=1, temperature=temperature, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    seen = torch.bincount(torch.tensor(found.responses).flatten(), minlength=small.VOCAB) / count
    p = (small.logits_alone(model, query, [4])[0] / temperature).softmax(-1)
    assert ((seen - p).abs() <= 4.5 * (p * (1 - p) / count).sqrt() + 1e-3).all()
    assert (p.max() - p.min()) > 0.05, "a flat distribution would show no temperature"


def test_the_same_seed_samples_the_same_responses() -> None:
    assert samples(seed=1).responses == samples(seed=1).responses
    assert samples(seed=1).responses != samples(seed=2).responses


@pytest.mark.parametrize("batch_size", [1, 5, 256])
def test_responses_are_in_the_order_of_their_prompts(batch_size: int) -> None:
    model, words = small.causal(), small.tokenizer()
    prompts = [str(words.decode(query)) for query in QUERIES]
    found = answer(
        model, words, prompts, max_new_tokens=6, temperature=1e-4, seed=1, batch_size=batch_size
    )  # so cold that the likeliest token always comes
    for query, response in zip(QUERIES, found, strict=True):
        greedy = small.logits_alone(model, query, response).argmax(-1).tolist()
        assert response == greedy


def test_text_excludes_only_the_final_eos() -> None:
    words = small.tokenizer()
    first, second = (str(words.decode([token])) for token in (3, 4))
    assert text_of(words, [3, 4, EOS]) == f"{first} {second}"
    assert text_of(words, [3, EOS, 4]) == f"{first} <eos> {second}"
    assert text_of(words, [EOS]) == ""

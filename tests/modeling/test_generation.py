"""Pure sampling: the log-probs kept are the training forward's, whatever left the batch and when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rlhf_tasks.data.batches import collate, text_of
from rlhf_tasks.modeling.sampling import (
    GPU_CHECK,
    Samples,
    _decode,
    _make_cache,
    sample,
    sample_responses,
    sample_token,
)
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.rollout import logprobs_of
from tests import small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, _ = small.rows(24, longest=7)


def samples(family: Family = "llama", seed: int = 4, temperature: float = 0.7) -> Samples:
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


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_caches_keys_as_they_are_attended_to(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation makes them float32; in bfloat16 they take half of the memory and give the same log-probs."""
    made, make = list[DynamicCache](), _make_cache

    def noted(*given: Any) -> DynamicCache:
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(generation, "_cache", noted)
    with torch.autocast("cpu", torch.bfloat16):
        ours = samples(family)
    kept: list[Any] = [layer for cache in made for layer in cache.layers]
    assert {x.dtype for layer in kept for x in (layer.keys, layer.values)} == {torch.bfloat16}
    monkeypatch.setattr(generation, "_cache", lambda model, room: DynamicCache(config=model.config))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = samples(family)
    assert ours.responses == theirs.responses
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-6, rtol=0)


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


def test_the_first_token_whose_cumulative_probability_exceeds_the_number_is_drawn() -> None:
    logits = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0]).log().expand(7, 6)
    almost = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()
    tokens, logprobs = sample_token(logits, torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.99, almost]))
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4, 4], "a token of probability 0 is never drawn"
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]))


def test_cumulative_probabilities_of_a_large_vocabulary_do_not_drift() -> None:
    """The token that a number draws is the one that float64 gives, but for a millionth of the probability."""
    size, rows = 50_000, 100
    logits = torch.randn(size, generator=torch.Generator().manual_seed(5))
    numbers = torch.arange(rows) / rows
    tokens, logprobs = sample_token(logits.expand(rows, size), numbers)
    exact = logits.double().softmax(-1)
    above = exact.cumsum(0)[tokens]
    assert (numbers < above + 1e-6).all()
    assert (numbers >= above - exact[tokens] - 1e-6).all()
    torch.testing.assert_close(logprobs, exact[tokens].log().float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error(bad: float) -> None:
    model = small.causal()
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 0] = bad
    with pytest.raises(NonFiniteError, match="logits"):
        sample(
            model, QUERIES, max_new_tokens=3, temperature=1.0, stop=EOS, pad=PAD,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 5, None])
def test_a_response_depends_on_no_other_row(family: Family, batch_size: int | None) -> None:
    """Each row alone, or in batches in which rows end at other times, gives the same response."""
    found = sample(
        small.causal(family), QUERIES, max_new_tokens=12, temperature=0.7, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(4), batch_size=batch_size,
    )  # fmt: skip
    assert found.responses == samples(family).responses


def test_the_draw_is_checked_seldom_on_a_gpu_to_the_same_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = samples()
    monkeypatch.setattr(generation, "CPU_CHECK", GPU_CHECK)
    assert samples().responses == usual.responses


def test_a_sliding_window_hides_the_same_tokens_as_in_training() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mistral", vocab_size=small.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=4, initializer_range=0.5,
        bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = sample(
        model, QUERIES, max_new_tokens=12, temperature=0.7, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert max(map(len, found.responses)) > 8
    for query, response, logprobs in zip(QUERIES, found.responses, found.logprobs, strict=True):
        alone = (small.logits_alone(model, query, response) / 0.7).log_softmax(-1)
        torch.testing.assert_close(logprobs, alone[range(len(response)), response], atol=1e-5, rtol=0)


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
    found = sample_responses(
        model, words, prompts, max_new_tokens=6, temperature=1e-4, seed=1, batch_size=batch_size
    )  # so cold that the likeliest token always comes
    for query, response in zip(QUERIES, found, strict=True):
        greedy = small.logits_alone(model, query, response).argmax(-1).tolist()
        assert response == greedy


def test_half_as_many_rows_are_sampled_where_the_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, prompts = small.causal(), small.tokenizer(), ["w1 w2", "w3", "w4 w5 w6", "w7", "w8"]
    sampling = partial(sample_responses, model, tokenizer, prompts, max_new_tokens=4, temperature=1.0, seed=3)
    expected, decoded, tried = sampling(), _decode, list[int]()

    def hungry(model: Any, batch: Any, query_of: Tensor, *rest: Any) -> Any:
        tried.append(len(query_of))
        if len(query_of) > 2:
            raise torch.OutOfMemoryError("planted")
        return decoded(model, batch, query_of, *rest)

    monkeypatch.setattr(generation, "_decoded", hungry)
    assert sampling(batch_size=8) == expected
    assert tried == [5, 4, 2, 2, 1]
    monkeypatch.setattr(generation, "_decoded", lambda *given: hungry(*given[:2], torch.zeros(9)))
    with pytest.raises(torch.OutOfMemoryError):
        sampling()


def test_text_excludes_only_the_final_eos() -> None:
    words = small.tokenizer()
    first, second = (str(words.decode([token])) for token in (3, 4))
    assert text_of(words, [3, 4, EOS]) == f"{first} {second}"
    assert text_of(words, [3, EOS, 4]) == f"{first} <eos> {second}"
    assert text_of(words, [EOS]) == ""


# -------------------- several samples of a query


def repeated(family: Family, num_samples: int, batch_size: int | None = None) -> Samples:
    return sample(
        small.causal(family), QUERIES, max_new_tokens=12, temperature=0.7, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(4), num_samples=num_samples, batch_size=batch_size,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [7, None])
def test_samples_of_a_query_that_is_computed_once_are_those_of_repeated_queries(
    family: Family, batch_size: int | None
) -> None:
    """The same numbers draw the same tokens; log-probs differ by rounding."""
    found = repeated(family, 3, batch_size)
    again = sample(
        small.causal(family), QUERIES * 3, max_new_tokens=12, temperature=0.7, stop=EOS, pad=PAD,
        generator=torch.Generator().manual_seed(4),
    )  # fmt: skip
    assert found.responses == again.responses
    assert len({tuple(response) for response in found.responses[:: len(QUERIES)]}) > 1
    for one, other in zip(found.logprobs, again.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("num_samples", "batch_size", "times"), [(1, None, 1), (4, None, 1), (4, 2, 2)])
def test_a_query_is_computed_once_for_all_of_its_samples_in_a_batch(
    num_samples: int, batch_size: int | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def collated(queries: list[list[int]], *rest: Any) -> Any:
        counted.extend(map(len, queries))
        return collate(queries, *rest)

    monkeypatch.setattr(generation, "collate", collated)
    found = repeated("llama", num_samples, batch_size)
    assert len(found.responses) == num_samples * len(QUERIES)
    assert sum(counted) == times * sum(map(len, QUERIES)), f"not {num_samples} times"

"""Pure sampling: the log-probs kept are the training forward's, whatever left the batch and when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf_tasks.data.tokenizer import Ids, encode, response_texts
from rlhf_tasks.models import sampling
from rlhf_tasks.models.fast_cpu import accelerate
from rlhf_tasks.models.sampling import Samples, Share, sample, sample_responses, sample_token
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.sampler import LocalSampler
from tests import families, small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, _ = small.rows(24, longest=7)


def draw(
    model: PreTrainedModel | Family = "llama", queries: list[Ids] = QUERIES, seed: int = 4, **changes: Any
) -> Samples:
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 0.7,
        "ends": (EOS,),
        "pad": PAD,
    } | changes
    if isinstance(model, str):
        model = small.causal(model)
    return sample(model, queries, generator=torch.Generator().manual_seed(seed), **settings)


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def logprobs_alone(model: PreTrainedModel, samples: Samples) -> list[Tensor]:
    """Each response's log-probs in a pass without a cache, padding or other rows."""
    rows = zip(QUERIES, samples.responses, strict=True)
    return [
        (small.logits_alone(model, query, response) / 0.7).log_softmax(-1)[range(len(response)), response]
        for query, response in rows
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_row_are_those_of_the_row_alone_whenever_others_ended(family: Family) -> None:
    found = draw(family)
    assert len(set(map(len, found.responses))) > 3, "rows must leave at different times to show anything"
    assert_close(found.logprobs, logprobs_alone(small.causal(family), found))


def test_a_sliding_window_hides_the_same_tokens_as_in_training() -> None:
    model = families.causal("mistral", vocab_size=small.VOCAB, sliding_window=4)
    found = draw(model, seed=1)
    assert max(map(len, found.responses)) > 8
    assert_close(found.logprobs, logprobs_alone(model, found))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_autocast", [False, True])
def test_the_preallocated_cache_gives_the_log_probs_of_transformers_own(
    family: Family, has_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast, rotation makes keys float32, and they are cached in bfloat16."""
    accelerate(torch.nn.Linear(1, 1))  # which attention computes as all passes do
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        ours = draw(family)
        monkeypatch.setattr(sampling, "_make_cache", lambda model, _: DynamicCache(config=model.config))
        theirs = draw(family)
    assert ours.responses == theirs.responses
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-6, rtol=0)


def test_a_response_ends_at_its_first_eos_or_at_the_limit() -> None:
    responses = draw().responses
    assert {r[-1] == EOS for r in responses} == {True, False}
    for response in responses:
        assert EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == 12


# ------------------------------------------------------------------------------------ one token


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


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    count, query = 4000, [4, 9, 5]
    found = draw(queries=[query] * count, seed=2, max_new_tokens=1, temperature=temperature)
    seen = torch.bincount(torch.tensor(found.responses).flatten(), minlength=small.VOCAB) / count
    p = (small.logits_alone(small.causal(), query, [4])[0] / temperature).softmax(-1)
    assert ((seen - p).abs() <= 4.5 * (p * (1 - p) / count).sqrt() + 1e-3).all()
    assert (p.max() - p.min()) > 0.05, "a flat distribution would show no temperature"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error(bad: float) -> None:
    model = small.causal()
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 0] = bad
    with pytest.raises(NonFiniteError, match="logits"):
        draw(model)


# ------------------------------------------------------------------- rows, batches, ranks, samples


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_response_depends_on_no_other_row(family: Family, batch_size: int) -> None:
    """Each row alone, or in batches in which rows end at other times, gives the same response."""
    assert draw(family, batch_size=batch_size).responses == draw(family).responses


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_response_does_not_depend_on_the_rank_that_samples_it(rank: int) -> None:
    found = draw(queries=QUERIES[rank::3], share=Share(rank, 3, len(QUERIES)))
    assert found.responses == draw().responses[rank::3]


def test_the_seed_decides_the_responses_and_not_the_padding_or_how_often_the_end_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = draw(seed=1).responses
    assert draw(seed=2).responses != usual == draw(seed=1, pad=EOS).responses
    monkeypatch.setattr(sampling, "CPU_CHECK", sampling.GPU_CHECK)
    assert draw(seed=1).responses == usual


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [7, None])
def test_samples_of_a_query_that_is_computed_once_are_those_of_repeated_queries(
    family: Family, batch_size: int | None
) -> None:
    """The same numbers draw the same tokens; log-probs differ by rounding."""
    alone = draw(family, QUERIES * 3, batch_size=1)
    assert len({tuple(response) for response in alone.responses[:: len(QUERIES)]}) > 1
    for found in (
        draw(family, num_samples=3, batch_size=batch_size),
        draw(family, QUERIES * 3, batch_size=batch_size),
    ):
        assert found.responses == alone.responses
        assert_close(found.logprobs, alone.logprobs)


def test_what_ranks_send_each_other_is_the_log_probs_and_no_more() -> None:
    """A view would be sent with the storage of the whole batch."""
    found = draw()
    num_floats = sum(map(len, found.logprobs))
    assert sum(one.untyped_storage().nbytes() for one in found.logprobs) == 4 * num_floats


def test_a_cache_that_loses_rows_keeps_no_old_buffers() -> None:
    layer, states = sampling._PreallocatedLayer(5), torch.randn(4, 2, 3, 8)
    layer.update(states, states)
    layer.reorder_cache(torch.tensor([0, 3]))
    for kept in (layer.keys, layer.values):
        assert kept is not None
        assert torch.equal(kept, states[[0, 3]])
        assert kept.untyped_storage().nbytes() == 4 * 2 * 2 * 5 * 8


def test_a_query_that_is_given_several_times_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, read = sampling._decode, list[int]()

    def counted(model: Any, batch: Any, *rest: Any) -> Any:
        read.append(len(batch.query_response))
        return decode(model, batch, *rest)

    monkeypatch.setattr(sampling, "_decode", counted)
    draw(queries=[*QUERIES, *QUERIES])
    assert read == [len(QUERIES)]


# ------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("batch_size", [1, 5, 256])
def test_responses_are_in_the_order_of_their_prompts(batch_size: int) -> None:
    model, words = small.causal(), small.tokenizer()
    prompts = [str(words.decode(query)) for query in QUERIES]
    found = sample_responses(
        model, words, prompts, max_new_tokens=6, temperature=1e-4, seed=1, batch_size=batch_size
    )  # so cold that the likeliest token always comes
    for query, response in zip(QUERIES, found, strict=True):
        assert response == small.logits_alone(model, query, response).argmax(-1).tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_that_samples_alone_computes_in_its_precision(precision: str) -> None:
    model, seen = small.causal().requires_grad_(False), set[torch.dtype]()
    model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    sample_responses(
        model, small.tokenizer(), ["the bird"], max_new_tokens=3, temperature=1.0, seed=1, precision=precision
    )
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert not any(weight.requires_grad for weight in model.parameters()), "as before"


def test_half_as_many_rows_are_sampled_where_the_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w7", "w8"]
    how: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "seed": 3}
    respond = partial(sample_responses, small.causal(), small.tokenizer(), prompts, **how)
    expected, decode, tried, largest = respond(), sampling._decode, list[int](), 2

    def hungry(model: Any, batch: Any, query_of: Tensor, *rest: Any) -> Any:
        tried.append(len(query_of))
        if len(query_of) > largest:
            raise torch.OutOfMemoryError("planted")
        return decode(model, batch, query_of, *rest)

    monkeypatch.setattr(sampling, "_decode", hungry)
    assert respond(batch_size=8) == expected
    assert tried == [5, 2, 2, 1]
    tried.clear()
    queries = encode(small.tokenizer(), prompts)
    sampler = LocalSampler(
        small.distributed(),
        small.causal(),
        torch.Generator().manual_seed(3),
        num_samples=1,
        batch_size=None,
        max_new_tokens=4,
        temperature=1.0,
        ends=ends_of(small.causal(), small.tokenizer()),
        pad=PAD,
    )
    assert sampler.sample(queries, 0).responses == expected
    sampler.sample(queries, 1)
    assert tried == [5, 2, 2, 1, 2, 2, 1], "the next rollout begins with what fits"
    largest = 0
    with pytest.raises(torch.OutOfMemoryError):
        respond()


def test_text_excludes_only_the_final_eos() -> None:
    words = small.tokenizer()
    first, second = (str(words.decode([token])) for token in (3, 4))
    responses = [[3, 4, EOS], [3, EOS, 4], [EOS]]
    expected = [f"{first} {second}", f"{first} <eos> {second}", ""]
    assert response_texts(words, [[3]] * 3, responses) == expected

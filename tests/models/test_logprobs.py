"""Statistics of response tokens within a model: against its logits, in every family, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from rlhf_tasks.data.batches import collate, collate_groups, group_rows
from rlhf_tasks.models import logprobs
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.heads import score_head, supports_shared_prefix
from rlhf_tasks.models.logprobs import TokenStats, head_width, token_stats
from tests import small
from tests.small import FAMILIES, PAD, VOCAB

QUERIES, RESPONSES = small.rows(6, longest=7)
BATCH = collate(QUERIES, RESPONSES, PAD)
MASK = BATCH.response_mask
NUM_TOKENS = int(MASK.sum())
ADJUSTING = ("gemma2", "cohere", "granite")
Stats = tuple[Tensor, Tensor, Tensor]  # log-prob, entropy, and whether it is the likeliest, (N,) each


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are several chunks, the last one shorter."""
    monkeypatch.setattr(logprobs, "CPU_LOGITS", 4 * VOCAB)
    assert NUM_TOKENS > 8


def model_of(family: str) -> PreTrainedModel:
    return small.other(family) if family in small.OTHERS else small.causal(family)  # type: ignore[arg-type]


def packed(stats: TokenStats) -> Stats:
    """The statistics of the response tokens alone, row after row."""
    return stats.logprobs[BATCH.mask], stats.entropy[BATCH.mask], stats.is_top[BATCH.mask]


def plain(model: Any, temperature: float = 1.0) -> Stats:
    """The same from all logits at once."""
    logits = small.response_logits(model, BATCH)[MASK] / temperature
    labels, exact = BATCH.responses[MASK], Categorical(logits=logits)
    return exact.log_prob(labels), exact.entropy(), (logits.argmax(-1) == labels).to(logits.dtype)


def weighted(stats: Stats, entropy_coef: float = 0.3) -> Tensor:
    """A loss with another weight for each token."""
    weights = torch.arange(NUM_TOKENS) % 5 - 1.5
    return (weights * stats[0] + entropy_coef * stats[1]).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_query_that_is_read_once_gives_its_responses_the_same_statistics(family: str) -> None:
    """And weights the same gradients, with three, two and one response to a query."""
    queries = [QUERIES[0], QUERIES[1], QUERIES[0], QUERIES[0], QUERIES[1], QUERIES[2]]
    groups = group_rows(queries, RESPONSES, range(6), 10**6, shares=True)
    assert groups == [[0, 2, 3], [1, 4], [5]]
    order = [0, 2, 3, 1, 4, 5]
    plain = collate([queries[i] for i in order], [RESPONSES[i] for i in order], PAD)
    found = []
    for batch in (plain, collate_groups(queries, RESPONSES, groups, PAD)):
        model = model_of(family)
        assert supports_shared_prefix(model)
        stats = token_stats(model, batch, 0.7, entropy_grad=True)
        weighted((stats.logprobs[batch.mask], stats.entropy[batch.mask], stats.is_top)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        states = batch.states(stats.states)[F.pad(batch.response_mask, (0, 1), value=True)]
        found.append((*stats[:3], states, gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 10**6])
@pytest.mark.parametrize("family", [*FAMILIES, *ADJUSTING])
def test_statistics_in_a_model_are_those_of_its_logits(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model changes its logits after the head, and in chunks of any number of tokens."""
    monkeypatch.setattr(logprobs, "CPU_LOGITS", chunk * VOCAB)
    model = model_of(family)
    with torch.no_grad():
        expected = plain(model, 0.7)
        for _ in range(2):  # the first pass finds out whether the logits are changed
            stats = token_stats(model, BATCH, 0.7)
            for found, exact in zip(packed(stats), expected, strict=True):
                torch.testing.assert_close(found, exact)
            for padded in stats[:3]:
                assert not padded[~BATCH.mask].any()
    assert (model.get_output_embeddings() in logprobs._ADJUSTED) == (family in ADJUSTING)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("family", [*FAMILIES, *ADJUSTING])
@pytest.mark.parametrize("has_autocast", [False, True])
def test_every_weight_gets_the_gradient_that_full_logits_give(family: str, has_autocast: bool) -> None:
    """In bfloat16 the head's logits are float32; below it, the last bit of both may round to neighbors."""
    gradients = []
    for is_chunked in (True, False):
        model = model_of(family)
        head: Any = model.get_output_embeddings()
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            if is_chunked:
                stats = packed(token_stats(model, BATCH, 0.7, entropy_grad=True))
            else:
                with mock.patch.object(head, "forward", exact_head(head)):
                    stats = plain(model, 0.7)
        weighted(stats).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    if has_autocast and family in ADJUSTING:
        return  # their logits are the model's own, in bfloat16
    for name, gradient in gradients[0].items():
        bound = 1e-2 if has_autocast and "head" not in name else 1e-4  # 2⁻⁷ is a step of bfloat16 at 1
        torch.testing.assert_close(gradient, gradients[1][name], atol=bound, rtol=bound)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_for_gpus_computes_what_a_linear_layer_does(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes it in float32; the precision that it asks for ends with each matmul."""
    generator, known = torch.Generator().manual_seed(1), torch.backends.cuda.matmul.allow_tf32
    contexts = mock.Mock(wraps=logprobs._tf32)
    monkeypatch.setattr(logprobs, "_tf32", contexts)
    draw = partial(torch.randn, generator=generator, requires_grad=True)
    inputs = [draw(shape), draw(7, 8), *([draw(7)] if has_bias else [])]
    apply: Any = logprobs._Tf32Linear.apply
    found = apply(*inputs, *([] if has_bias else [None]))
    expected = F.linear(*inputs)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=generator)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected)))
    assert contexts.call_count == 2
    assert torch.backends.cuda.matmul.allow_tf32 == known


@pytest.mark.parametrize("family", ["llama", *ADJUSTING])
def test_a_pass_of_16_bits_takes_that_head(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = packed(token_stats(model_of(family), BATCH, 0.7))
    monkeypatch.setattr(logprobs, "_uses_tf32", lambda hidden, weight: True)
    calls = mock.Mock(wraps=logprobs._Tf32Linear.apply)
    monkeypatch.setattr(logprobs._Tf32Linear, "apply", calls)
    torch.testing.assert_close(packed(token_stats(model_of(family), BATCH, 0.7)), expected)
    assert calls.called


def exact_head(head: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(hidden.float(), head.weight, head.bias)

    return forward


@pytest.mark.parametrize("has_entropy_grad", [False, True])
def test_gradients_are_exact_in_float64(has_entropy_grad: bool) -> None:
    """Also where a token is nearly certain or impossible: the logits are spread 40 times as far."""
    for spread in (1, 40):
        found, expected = (small.causal("gpt_neox").double() for _ in range(2))
        for model in (found, expected):
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(spread)
        coef = 0.3 if has_entropy_grad else 0.0
        weighted(packed(token_stats(found, BATCH, 0.7, entropy_grad=has_entropy_grad)), coef).backward()
        weighted(plain(expected, 0.7), coef).backward()
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_no_tensor_has_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In neither pass; what is kept between them is a number or two for each token."""
    model, sizes = small.causal(), list[int]()

    def counted(*given: Any) -> Tensor:
        out = F.linear(*given)
        sizes.append(out.numel())
        return out

    kept = list[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1:] == (VOCAB,) and not isinstance(tensor, torch.nn.Parameter):
            kept.append(tensor.numel())
        return tensor

    monkeypatch.setitem(logprobs._LINEAR, torch.nn.Linear.forward, counted)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stats = token_stats(model, BATCH, entropy_grad=True)
    num_forward = len(sizes)
    weighted(packed(stats)).backward()
    assert max(sizes) <= logprobs.CPU_LOGITS
    assert not kept, "no chunk's logits outlive it"
    assert len(sizes) == 2 * num_forward > 2
    assert sum(sizes[:num_forward]) == NUM_TOKENS * VOCAB, "padding has no logits"


@pytest.mark.parametrize("family", sorted(small.OTHERS))
def test_statistics_of_any_family_are_those_of_its_logits_in_float64(family: str) -> None:
    model, exact = small.other(family), small.in_float64(family)
    with torch.no_grad():
        stats = token_stats(model, BATCH)
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        expected = Categorical(logits=small.logits_alone(exact, query, response).double())
        found = stats.logprobs[row, : len(response)].double()
        torch.testing.assert_close(found, expected.log_prob(torch.tensor(response)), atol=2e-5, rtol=1e-5)
    assert stats.states.shape[2] == head_width(model)


def halved(forward: Callable[..., Any], given: dict[str, Any]) -> CausalLMOutput:
    """As softcapping may: it frees the head's tensor, and another one may then take its address."""
    logits = forward(**given).logits
    half = logits * 0.5
    del logits
    return CausalLMOutput(logits=half.clone())


def halved_in_place(forward: Callable[..., Any], given: dict[str, Any]) -> CausalLMOutput:
    out: CausalLMOutput = forward(**given)
    out.logits.mul_(0.5)  # type: ignore[union-attr]
    return out


@pytest.mark.parametrize("change", [halved, halved_in_place])
def test_logits_that_the_model_changes_are_seen(change: Callable[..., CausalLMOutput]) -> None:
    model, large = small.causal(), collate(QUERIES * 16, RESPONSES * 16, pad=PAD)
    unchanged, forward = token_stats(model, BATCH), model.forward
    model.forward = lambda **given: change(forward, given)
    with torch.no_grad():
        for _ in range(20):
            logprobs._ADJUSTED.discard(model.get_output_embeddings())
            token_stats(model, large)
            assert model.get_output_embeddings() in logprobs._ADJUSTED
        found = token_stats(model, BATCH)
        torch.testing.assert_close(packed(found)[0], plain(model)[0])
    assert not torch.allclose(found.logprobs, unchanged.logprobs, atol=1e-3)


def test_a_model_that_never_runs_its_head_is_refused() -> None:
    model = small.causal()
    with (
        mock.patch.object(model, "get_output_embeddings", return_value=torch.nn.Linear(16, 23)),
        pytest.raises(ContractError, match=r"family llama\) makes its logits without its output layer"),
    ):
        token_stats(model, BATCH)


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    """A frozen model's statistics have none, and values do not depend on whether gradients are on."""
    model = small.causal()
    with torch.no_grad():
        quiet = packed(token_stats(model, BATCH, 0.7))
    for wanted in (False, True):
        stats = packed(token_stats(model, BATCH, 0.7, entropy_grad=wanted))
        assert all(torch.equal(one, other) for one, other in zip(stats, quiet, strict=True))
        stats[1].sum().backward()
        reached = [p for p in model.parameters() if p.grad is not None and p.grad.any()]
        assert bool(reached) == wanted
        assert not stats[2].requires_grad
    model.requires_grad_(False)
    assert not any(x.requires_grad for x in token_stats(model, BATCH))


def test_a_head_that_is_held_in_16_bits_gives_scores_in_float32() -> None:
    """As DeepSpeed holds it."""
    scores, rows = small.scores(seed=3), collate(*small.rows(4), PAD)
    score_head(scores.model).bfloat16()
    found = scores(rows)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    score_head(scores.model).float()
    torch.testing.assert_close(scores(rows), found, rtol=0, atol=1e-6)

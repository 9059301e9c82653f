"""The vocabulary head by slices: against full logits in float64, in every family, with gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling import head
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.modeling.head import (
    head_logprobs,
    head_states,
    head_width,
    label_stats,
    reads_trunk,
    stats_of_logits,
    token_stats,
)
from rlhf_tasks.modeling.models import response_logits
from tests import small
from tests.small import FAMILIES, PAD, Family

QUERIES, RESPONSES = small.rows(6, longest=7)
BATCH = collate(QUERIES, RESPONSES, PAD)
N, H, V = 5, 4, 600  # three slices of 256 tokens or less
LABELS = torch.tensor([0, 255, 256, 599, 300])


def parts(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, torch.nn.Linear]:
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(H, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(0.0, 1.5, generator=generator)
    return torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_(), linear


@pytest.fixture(autouse=True)
def _narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_SLICE", 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_coef", [None, 0.0, 0.7])
def test_slices_give_the_values_and_gradients_of_a_categorical(
    bias: bool, entropy_coef: float | None
) -> None:
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)  # a different gradient for each token
    found = []
    for by_slices in (True, False):
        hidden, linear = parts(bias)
        if by_slices:
            logprobs, entropy, likeliest = label_stats(linear, hidden, LABELS, 0.7)
        else:
            logits = linear(hidden) / 0.7
            exact = Categorical(logits=logits)
            logprobs, entropy = exact.log_prob(LABELS), exact.entropy()
            likeliest = (logits.argmax(1) == LABELS).double()
        loss = (weights * logprobs).sum()
        if entropy_coef is not None:
            loss = loss + entropy_coef * (weights**2 * entropy).sum()
        loss.backward()
        found.append([logprobs, entropy, likeliest, hidden.grad, *(p.grad for p in linear.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_the_likeliest_token_is_found_in_any_slice() -> None:
    hidden, linear = parts(bias=False)
    best = linear(hidden).argmax(1)
    assert len({int(token) // 256 for token in best}) > 1
    assert label_stats(linear, hidden, best)[2].tolist() == [1.0] * N


def test_frozen_weights_get_no_gradient_and_states_still_do() -> None:
    hidden, linear = parts(bias=True)
    linear.requires_grad_(False)
    label_stats(linear, hidden, LABELS)[0].sum().backward()
    assert hidden.grad is not None
    assert linear.weight.grad is None


def test_low_precision_logits_are_summed_in_float32() -> None:
    hidden, linear = parts(bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = label_stats(linear, hidden, LABELS, 0.7)
        logits = linear(hidden)
    assert logits.dtype == torch.bfloat16
    for mine, plain in zip(ours, stats_of_logits(logits.float() / 0.7, LABELS), strict=True):
        torch.testing.assert_close(mine, plain)
        assert mine.dtype == torch.float32
    ours[0].sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_nan_in_one_token_is_seen_in_its_log_prob_only() -> None:
    hidden, linear = parts(bias=False)
    with torch.no_grad():
        hidden[2, 0] = torch.nan
    assert label_stats(linear, hidden, LABELS)[0].isnan().tolist() == [False, False, True, False, False]


# ------------------------------------------------------------------------------------- within a model

ADJUSTING = ("gemma2", "cohere", "granite")


def model_of(family: str) -> PreTrainedModel:
    return small.other(family) if family in ADJUSTING else small.causal(family)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*FAMILIES, *ADJUSTING])
def test_statistics_in_a_model_are_those_of_its_logits(family: str) -> None:
    """Also where the model changes its logits after the head."""
    model, mask = model_of(family), BATCH.response_mask
    with torch.no_grad():
        exact = Categorical(logits=response_logits(model, BATCH) / 0.7)
        for _ in range(2):  # the first pass finds out whether the logits are changed
            stats = token_stats(model, BATCH, 0.7)
            torch.testing.assert_close(stats.logprobs[mask], exact.log_prob(BATCH.responses)[mask])
            torch.testing.assert_close(stats.entropy[mask], exact.entropy()[mask])
            assert not stats.logprobs[~mask].any()
            assert not stats.entropy[~mask].any()
        right = (exact.logits.argmax(-1) == BATCH.responses) & mask
        assert torch.equal(stats.likeliest, right.float())
    assert (model.get_output_embeddings() in head._ADJUSTED) == (family in ADJUSTING)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("family", [*FAMILIES, *ADJUSTING])
def test_every_weight_gets_the_gradient_that_full_logits_give(family: str) -> None:
    mask, gradients = BATCH.response_mask, []
    for by_slices in (True, False):
        model = model_of(family)
        if by_slices:
            stats = token_stats(model, BATCH, 0.7, entropy_gradient=True)
            logprobs, entropy = stats.logprobs, stats.entropy
        else:
            exact = Categorical(logits=response_logits(model, BATCH) / 0.7)
            logprobs, entropy = exact.log_prob(BATCH.responses), exact.entropy()
        (logprobs[mask].sum() + 0.3 * entropy[mask].sum()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(small.OTHERS))
def test_statistics_of_any_family_are_those_of_its_logits_in_float64(family: str) -> None:
    model, exact = small.other(family), small.in_float64(family)
    with torch.no_grad():
        stats = token_stats(model, BATCH)
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        expected = Categorical(logits=small.logits_alone(exact, query, response).double())
        torch.testing.assert_close(
            stats.logprobs[row, -len(response) :].double(), expected.log_prob(torch.tensor(response)),
            atol=2e-5, rtol=1e-5,
        )  # fmt: skip
    assert stats.states.shape[2] == head_width(model)


def test_logits_that_are_changed_in_place_are_seen() -> None:
    model = small.causal()
    plain, forward = token_stats(model, BATCH), model.forward

    def scaled(**given: Any) -> Any:
        out = forward(**given)
        out.logits.mul_(0.5)
        return out

    model.forward = scaled
    with torch.no_grad():
        found, exact = token_stats(model, BATCH), Categorical(logits=response_logits(model, BATCH))
    mask = BATCH.response_mask
    torch.testing.assert_close(found.logprobs[mask], exact.log_prob(BATCH.responses)[mask])
    assert not torch.allclose(found.logprobs[mask], plain.logprobs[mask], atol=1e-3)


def test_logits_that_are_changed_into_the_memory_of_the_first_ones_are_seen() -> None:
    """As softcapping does: it frees the head's tensor, and another one may then take its address."""
    batch = collate(QUERIES * 16, RESPONSES * 16, pad=PAD)
    model = small.causal()
    forward = model.forward

    def scaled(**given: Any) -> Any:
        logits = forward(**given).logits
        half = logits * 0.5
        del logits
        return CausalLMOutput(logits=half.clone())

    model.forward = scaled
    with torch.no_grad():
        for _ in range(50):
            head._ADJUSTED.discard(model.get_output_embeddings())
            token_stats(model, batch)
            assert model.get_output_embeddings() in head._ADJUSTED


def test_a_head_that_computes_more_than_a_product_is_not_cut_into_slices() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = small.causal()
    model.get_output_embeddings().__class__ = Doubled
    with torch.no_grad():
        found, exact = token_stats(model, BATCH), Categorical(logits=response_logits(model, BATCH))
    mask = BATCH.response_mask
    torch.testing.assert_close(found.logprobs[mask], exact.log_prob(BATCH.responses)[mask])


def test_a_model_that_never_runs_its_head_is_refused() -> None:
    model = small.causal()
    with (
        mock.patch.object(model, "get_output_embeddings", return_value=torch.nn.Linear(16, 23)),
        pytest.raises(ContractError, match=r"family llama\) makes its logits without its output layer"),
    ):
        token_stats(model, BATCH)


@pytest.mark.parametrize("family", [*FAMILIES, *sorted(small.OTHERS)])
def test_only_a_head_on_the_trunks_own_states_reads_the_trunk(family: str) -> None:
    """The models of `CHANGING` change the states before the head, or the logits after it."""
    model = small.other(family) if family in small.OTHERS else small.causal(family)  # type: ignore[arg-type]
    assert reads_trunk(model) == (family not in small.CHANGING)


def test_without_entropy_gradient_the_entropy_is_a_number_only() -> None:
    model = small.causal()
    stats = token_stats(model, BATCH)
    stats.entropy.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_last_layers_at_the_response(family: Family) -> None:
    model, columns = small.causal(family), BATCH.num_response_columns + 1
    with torch.no_grad():
        states = token_stats(model, BATCH).states
        assert torch.equal(states, head_states(model, BATCH))
        last = model.base_model(
            input_ids=BATCH.query_response,
            attention_mask=BATCH.attention_mask,
            position_ids=BATCH.position_ids,
        ).last_hidden_state[:, -columns:]
        torch.testing.assert_close(states, last)
        logprobs = head_logprobs(model.get_output_embeddings(), last, BATCH)
    torch.testing.assert_close(logprobs, token_stats(model, BATCH).logprobs)

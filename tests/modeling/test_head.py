"""Statistics and losses of tokens within a model: against its logits, in every family, with gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from rlhf_tasks.modeling.head import (
    head_loss,
    head_states,
    head_width,
    reads_trunk,
    token_stats,
)
from torch import Tensor
from torch.distributions import Categorical
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling import head
from rlhf_tasks.modeling.contracts import ContractError
from tests import small
from tests.small import FAMILIES, PAD, Family

QUERIES, RESPONSES = small.rows(6, longest=7)
BATCH = collate(QUERIES, RESPONSES, PAD)

ADJUSTING = ("gemma2", "cohere", "granite")


def weighted(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
    """A loss with another weight for each token."""
    weights = torch.arange(tokens.start or 0, tokens.stop) % 5 - 1.5
    return (weights * logprobs + 0.3 * entropy).sum()


def model_of(family: str) -> PreTrainedModel:
    return small.other(family) if family in ADJUSTING else small.causal(family)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*FAMILIES, *ADJUSTING])
def test_statistics_in_a_model_are_those_of_its_logits(family: str) -> None:
    """Also where the model changes its logits after the head."""
    model, mask = model_of(family), BATCH.response_mask
    with torch.no_grad():
        exact = Categorical(logits=small.response_logits(model, BATCH) / 0.7)
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
            loss = token_stats(model, BATCH, 0.7, weighted).loss
        else:
            exact = Categorical(logits=small.response_logits(model, BATCH) / 0.7)
            logprobs, entropy = exact.log_prob(BATCH.responses), exact.entropy()
            loss = weighted(logprobs[mask], entropy[mask], slice(int(mask.sum())))
        loss.backward()
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
        found, exact = token_stats(model, BATCH), Categorical(logits=small.response_logits(model, BATCH))
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
        found, exact = token_stats(model, BATCH), Categorical(logits=small.response_logits(model, BATCH))
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


def test_without_a_loss_nothing_has_a_gradient() -> None:
    stats = token_stats(small.causal(), BATCH)
    assert not any(x.requires_grad for x in (stats.logprobs, stats.entropy, stats.likeliest, stats.loss))


def test_a_loss_has_a_value_where_gradients_are_off() -> None:
    model = small.causal()
    with torch.no_grad():
        quiet = token_stats(model, BATCH, 0.7, weighted).loss
    loss = token_stats(model, BATCH, 0.7, weighted).loss
    assert loss.requires_grad
    assert not quiet.requires_grad
    assert loss.item() == quiet.item()


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
        found = head_loss(model.get_output_embeddings(), last, BATCH, weighted)
        torch.testing.assert_close(found, token_stats(model, BATCH, loss=weighted).loss)

"""The last layer's states of prompts are not computed; nothing that is read changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch, collate, fork
from rlhf_tasks.modeling import last_layer
from rlhf_tasks.modeling.checkpointing import recompute_activations
from rlhf_tasks.modeling.head import token_stats
from rlhf_tasks.modeling.load import TokenScores
from tests import small
from tests.small import FAMILIES, PAD, Family

QUERIES, RESPONSES = small.rows(6, longest=7)
BATCH = collate(QUERIES, RESPONSES, PAD)


@contextmanager
def all_columns() -> Iterator[None]:
    with mock.patch.dict(last_layer.LAYERS, clear=True):
        yield


def read(model: nn.Module, batch: Batch) -> Tensor:
    """What is read of a model's answer, with its gradients: a vector."""

    def loss(found: Tensor, *_: Any) -> Tensor:
        return (found * torch.linspace(-1, 1, len(found))).sum()

    model.zero_grad()
    if isinstance(model, TokenScores):
        found = model(batch)[:, 1:][batch.response_mask]
        loss(found).backward()
    else:
        stats = token_stats(model, batch, loss=loss)
        found = stats.logprobs[batch.response_mask]
        stats.loss.backward()
    return torch.cat([found.detach(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def mlp_columns(model: PreTrainedModel) -> list[int]:
    """The number of columns that each layer's MLP gets, from now on."""
    layers, _, mlp = last_layer.LAYERS[model.config.model_type]
    counts = list[int]()
    for layer in getattr(model.base_model, layers):
        first = next(x for x in layer.get_submodule(mlp).modules() if not list(x.children()))
        first.register_forward_pre_hook(lambda _, given: counts.append(given[0].shape[1]))
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_and_its_gradients_are_those_of_all_columns(family: Family) -> None:
    policy, scores = small.causal(family), small.scores(family)
    forked = fork(QUERIES, RESPONSES, RESPONSES[::-1], PAD)
    for model, batch in ((policy, BATCH), (scores, BATCH), (scores, forked)):
        spared = read(model, batch)
        with all_columns():
            torch.testing.assert_close(spared, read(model, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_last_layer_is_spared_columns(family: Family) -> None:
    whole, columns = BATCH.query_response.shape[1], BATCH.num_response_columns + 1
    assert columns < whole
    model = small.causal(family)
    seen = mlp_columns(model)
    token_stats(model, BATCH)
    assert (set(seen[:-1]), seen[-1]) == ({whole}, columns)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_alone_have_the_scores_and_gradients_that_they_have_beside_all_others(
    family: Family,
) -> None:
    for count, batch in {1: BATCH, 2: fork(QUERIES, RESPONSES, RESPONSES[::-1], PAD)}.items():
        scores = small.scores(family)
        seen = mlp_columns(scores.model)
        found = scores(batch, ends_only=True)
        assert (found.shape, seen[-1]) == ((len(QUERIES), count), count)
        from_the_end = batch.ends - batch.query_response.shape[1]
        with all_columns():
            everywhere = scores(batch)
        expected = everywhere.take_along_dim(everywhere.shape[1] + from_the_end, 1)
        torch.testing.assert_close(found, expected)
        weights = torch.linspace(-1, 1, found.numel()).view_as(found)
        ours, theirs = (
            torch.autograd.grad((x * weights).sum(), list(scores.parameters()), allow_unused=True)
            for x in (found, expected)
        )
        for gradient, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(gradient, other)


def test_the_ends_of_a_forked_row_are_the_last_tokens_of_both_responses() -> None:
    assert BATCH.ends.tolist() == [[BATCH.query_response.shape[1] - 1]] * len(QUERIES)
    pairs = fork([[5, 6], [7]], [[8], [9, 10]], [[11, 12], [13]], PAD)
    assert pairs.query_response.take_along_dim(pairs.ends, 1).tolist() == [[8, 12], [10, 13]]


def test_checkpointed_layers_compute_all_columns() -> None:
    model = small.causal("gpt_neox")
    plain = read(model, BATCH)
    recompute_activations(model)
    torch.testing.assert_close(read(model, BATCH), plain)

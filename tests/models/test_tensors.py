"""Masked arithmetic against numpy-like loops and hand-worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.models.tensors import copy_to_cpu, distinct, masked_mean, masked_moments, masked_sum, whiten

X = torch.tensor([[1.0, 2.0, 6.0], [3.0, 8.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])  # 1, 2, 3: mean 2, variance 2/3
JUNK = (torch.nan, torch.inf, 1e30, -7.0)


def with_junk(junk: float) -> Tensor:
    return torch.where(MASK, X, junk)


@pytest.mark.parametrize("junk", JUNK)
def test_padding_content_changes_no_mean_and_no_variance(junk: float) -> None:
    x = with_junk(junk)
    assert masked_sum(x, MASK) == 6
    assert masked_mean(x, MASK) == 2
    mean, variance = masked_moments(x, MASK)
    assert mean.item() == 2
    assert variance.item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("junk", JUNK)
def test_whitening_gives_mean_0_and_variance_1_and_zero_on_padding(junk: float) -> None:
    white = whiten(with_junk(junk), MASK)
    side = 1.5**0.5  # 1, 2, 3 less their mean, over √(2/3)
    torch.testing.assert_close(white, torch.tensor([[-side, 0.0, 0.0], [side, 0.0, 0.0]]))


def test_whitening_without_a_shift_keeps_the_mean() -> None:
    white = whiten(with_junk(torch.nan), MASK, shift_mean=False)
    side = 1.5**0.5
    torch.testing.assert_close(white, torch.tensor([[2 - side, 2.0, 0.0], [2 + side, 0.0, 0.0]]))


def test_distinct_ngrams_by_hand() -> None:
    # a b a b: 2 of 4 words differ, ab ba ab: 2 of 3 pairs; one word has no pair
    found = [[5, 6, 5, 6], [7]]
    torch.testing.assert_close(distinct(found, 1), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(distinct(found, 2), torch.tensor([2 / 3, 1.0]))


def test_a_copied_state_shares_nothing_with_its_source_and_copies_a_tied_weight_once() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    source: dict[str, Any] = {
        "tied": [weight, weight],
        "row": weight[1],
        "plain": (1, "a", None),
        "rows": [[1]],
    }
    copied = copy_to_cpu(source)
    weight.zero_()
    source["rows"][0].append(2)
    assert copied["tied"][0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copied["tied"][1] is copied["tied"][0]
    assert copied["row"].tolist() == [3.0, 4.0, 5.0]
    assert (copied["plain"], copied["rows"]) == ((1, "a", None), [[1]])

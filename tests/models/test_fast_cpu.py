"""oneDNN's matmuls of float32, and attention in float32 under autocast, are right to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_tasks.data.batches import collate
from rlhf_tasks.models import fast_cpu
from rlhf_tasks.models.fast_cpu import OneDnnLinear, accelerate
from rlhf_tasks.models.logprobs import token_stats
from tests import small
from tests.small import Family

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN"
)


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where MKL is fast, and for small matmuls."""
    monkeypatch.setattr(fast_cpu, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(fast_cpu, "SMALLEST", 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the layer that `accelerate` makes, with these very tensors."""
    layer = accelerate(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None))
    given = {"weight": weight} | ({} if bias is None else {"bias": bias})
    result: Tensor = torch.func.functional_call(layer, given, (x,))
    return result


def with_gradients(multiply: Callable[..., Tensor], *given: Tensor | None, g: Tensor) -> list[Tensor]:
    own = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    y = multiply(*own)
    y.backward(g.to(y.dtype))
    return [y.detach(), *(x.grad for x in own if x is not None and x.grad is not None)]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By a sum of outer products in float64."""
    parts = (x[..., i, None].double() * weight[:, i].double() for i in range(weight.shape[1]))
    return sum(parts, torch.zeros(())) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("shape", [(5,), (2, 3, 64)])
@pytest.mark.parametrize(("size_in", "size_out"), [(48, 96), (96, 48), (7, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_and_its_gradients_are_exact_to_rounding(
    shape: tuple[int, ...], size_in: int, size_out: int, has_bias: bool
) -> None:
    given = [numbers(*shape, size_in), numbers(size_out, size_in), numbers(size_out) if has_bias else None]
    g = numbers(*shape, size_out, seed=1)
    ours, right = (with_gradients(multiply, *given, g=g) for multiply in (linear, exact))
    for one, other in zip(ours, right, strict=True):  # sums of up to 384 numbers
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-4)


def test_tensors_that_are_not_contiguous_are_multiplied_right() -> None:
    bias = torch.stack([numbers(40), numbers(40) + 9], 1)[:, 0]
    given = numbers(24, 3, 16).transpose(0, 1), numbers(16, 40).t(), bias
    spread = torch.ones(1, 1, 1).expand(3, 24, 40)  # the gradient of a sum
    ours, right = (with_gradients(multiply, *given, g=spread) for multiply in (linear, F.linear))
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_autocast_and_no_rows_have_torchs_own_matmuls(dtype: torch.dtype) -> None:
    x, weight = numbers(4, 8).to(dtype), numbers(3, 8).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert linear(numbers(0, 8), numbers(3, 8)).shape == (0, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(numbers(4, 8), numbers(3, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("family", small.FAMILIES)
def test_an_accelerated_model_gives_the_same_log_probs_and_gradients(family: Family) -> None:
    batch = collate(*small.rows(6, longest=9), small.PAD)

    def found(model: Any) -> list[Tensor]:
        stats = token_stats(model, batch, entropy_grad=True)
        (stats.logprobs - stats.entropy).sum().backward()
        return [stats.logprobs.detach(), *(w.grad for w in model.parameters())]

    fast = accelerate(small.causal(family))
    assert OneDnnLinear in {type(module) for module in fast.modules()}
    torch.testing.assert_close(found(fast), found(small.causal(family)), rtol=1e-4, atol=1e-5)


def test_elsewhere_no_layer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_cpu, "_onednn_is_faster", lambda: False)
    model = accelerate(small.causal())
    assert not any(isinstance(module, OneDnnLinear) for module in model.modules())


def _attend(given: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients of transformers' `sdpa` under autocast, as an accelerated model calls it."""
    accelerate(torch.nn.Linear(1, 1))
    own = [x.detach().clone().requires_grad_() for x in given]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](torch.nn.Module(), *own, attention_mask=mask)
    found.float().square().sum().backward()
    return [found, *(x.grad for x in own if x.grad is not None)]


@pytest.mark.parametrize("has_mask", [True, False])
def test_attention_under_autocast_is_that_of_float32(has_mask: bool) -> None:
    """(B, heads, T, width) in bfloat16, as the layers before give them; softmax(q kᵀ) v by its definition."""
    query, key, value = (numbers(2, 3, 5, 8, seed=seed).bfloat16() for seed in range(3))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    found, *gradients = _attend([query, key, value], causal.expand(2, 1, 5, 5) if has_mask else None)
    q, k, v = (x.double().requires_grad_() for x in (query, key, value))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~causal, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)  # (B, T, heads, width)
    expected.square().sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient, one in zip(gradients, (q, k, v), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(gradient.double(), one.grad, rtol=1e-2, atol=1e-2)  # bfloat16 again


def test_single_steps_and_added_masks_have_torchs_own_attention() -> None:
    query, key, value = (numbers(2, 3, 5, 8, seed=seed).bfloat16() for seed in range(3))
    assert _attend([query[:, :, -1:], key, value], None)[0].dtype == torch.bfloat16
    assert _attend([query, key, value], torch.zeros(2, 1, 5, 5).bfloat16())[0].dtype == torch.bfloat16

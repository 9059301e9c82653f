"""oneDNN's products of float32 matrices are those of torch, with their gradients, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rlhf_tasks.modeling.head import token_stats
from torch import Tensor
from torch.nn import functional as F

from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling import onednn, products
from tests import small
from tests.small import Family

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN"
)


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where MKL is fast, and for small products."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "SMALLEST", 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(multiply: Callable[..., Tensor], *given: Tensor | None, g: Tensor) -> list[Tensor]:
    own = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    y = multiply(*own)
    y.backward(g.to(y.dtype))
    return [y.detach(), *(x.grad for x in own if x is not None and x.grad is not None)]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By a sum of outer products in float64."""
    parts = (x[..., i, None].double() * weight[:, i].double() for i in range(weight.shape[1]))
    return sum(parts, torch.zeros(())) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 64)])
@pytest.mark.parametrize(("size_in", "size_out"), [(48, 96), (96, 48), (32, 32), (7, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_and_its_gradients_are_exact_to_rounding(
    shape: tuple[int, ...], size_in: int, size_out: int, has_bias: bool
) -> None:
    given = [numbers(*shape, size_in), numbers(size_out, size_in), numbers(size_out) if has_bias else None]
    g = numbers(*shape, size_out, seed=1)
    ours, right = (with_gradients(multiply, *given, g=g) for multiply in (onednn.linear, exact))
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(
            one, other.to(one.dtype), rtol=1e-5, atol=1e-4
        )  # sums of up to 384 numbers


def test_tensors_that_are_not_contiguous_are_multiplied_right() -> None:
    x, weight = numbers(24, 3, 16).transpose(0, 1), numbers(16, 40).t()
    spread = torch.ones(1, 1, 1).expand(3, 24, 40)  # the gradient of a sum
    ours = with_gradients(onednn.linear, x, weight, g=spread)
    right = with_gradients(F.linear, x, weight, g=spread)
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(onednn.product(x[0], weight), F.linear(x[0], weight), rtol=1e-5, atol=1e-5)


def test_a_bias_that_is_not_contiguous_is_added_right() -> None:
    x, weight, bias = numbers(5, 8), numbers(6, 8), torch.stack([numbers(6), numbers(6) + 9], 1)[:, 0]
    torch.testing.assert_close(
        onednn.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5
    )


def test_autocast_has_its_own_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert onednn.linear(numbers(4, 8), numbers(3, 8)).dtype == torch.bfloat16


def test_compiled_layers_have_the_products_of_the_compiler() -> None:
    x, layer = numbers(4, 8), torch.nn.Linear(8, 3)
    right = layer(x)
    products.speed_up(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), right, rtol=1e-5, atol=1e-5)


def test_a_sum_of_products_is_added_to_in_place() -> None:
    total, x, weight = numbers(6, 5), numbers(9, 6).t(), numbers(9, 5, seed=1).t()
    right = total + x @ weight.t()
    onednn.add_product(total, x, weight)
    torch.testing.assert_close(total, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_and_no_rows_have_torchs_own_products(dtype: torch.dtype) -> None:
    x, weight = numbers(4, 8).to(dtype), numbers(3, 8).to(dtype)
    assert torch.equal(onednn.linear(x, weight), F.linear(x, weight))
    assert onednn.linear(numbers(0, 8), numbers(3, 8)).shape == (0, 3)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_models_give_the_same_losses_and_gradients_with_either_library(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = collate(*small.rows(6, longest=9), small.PAD)

    def found(model: Any) -> list[Tensor]:
        stats = token_stats(model, batch, loss=lambda logprobs, entropy, _: (logprobs - entropy).sum())
        stats.loss.backward()
        return [stats.loss.detach(), *(w.grad for w in model.parameters())]

    fast = small.causal(family)
    products.speed_up(fast)
    kinds = {type(module) for module in fast.modules()}
    assert kinds & {products.FastLinear, products.FastConv1D}
    ours = found(fast)
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    for one, other in zip(ours, found(small.causal(family)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_head_of_a_reward_model_is_left_as_it_is() -> None:
    scores = small.scores("gpt_neox")
    products.speed_up(scores)
    single = [m for m in scores.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1]
    assert single
    assert all(type(module) is torch.nn.Linear for module in single)

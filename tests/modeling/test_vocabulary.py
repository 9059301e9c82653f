"""The vocabulary head by groups of tokens and slices of the vocabulary: against full logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from rlhf_tasks.modeling import vocabulary
from rlhf_tasks.modeling.products import RoundedLinear
from rlhf_tasks.modeling.vocabulary import Stats, label_loss, label_stats, stats_of_logits

N, H, V = 5, 4, 600  # three slices of 256 columns or less
LABELS = torch.tensor([0, 255, 256, 599, 300])
WEIGHTS = torch.linspace(-1, 2, N, dtype=torch.float64)  # a different gradient for each token


def parts(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, torch.nn.Linear]:
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(H, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(0.0, 1.5, generator=generator)
    return torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_(), linear


def of_logprobs(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
    return logprobs.sum()


@pytest.fixture(autouse=True)
def _narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CPU_SLICE", 1)


@pytest.mark.parametrize("num_logits", [1, 2 * V, vocabulary.CPU_LOGITS], ids=["one", "two", "all"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_coef", [None, 0.0, 0.7])
def test_groups_and_slices_give_the_values_and_gradients_of_a_categorical(
    bias: bool, entropy_coef: float | None, num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "CPU_LOGITS", num_logits)

    def loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        weights = WEIGHTS[tokens]
        total = (weights * logprobs).sum()
        return total if entropy_coef is None else total + entropy_coef * (weights**2 * entropy).sum()

    found = []
    for by_slices in (True, False):
        hidden, linear = parts(bias)
        if by_slices:
            total, stats = label_loss(linear, hidden, LABELS, loss, 0.7)
        else:
            logits = linear(hidden) / 0.7
            exact = Categorical(logits=logits)
            stats = Stats(exact.log_prob(LABELS), exact.entropy(), (logits.argmax(1) == LABELS).double())
            total = loss(stats.logprobs, stats.entropy, slice(N))
        (0.3 * total).backward()
        gradients = [hidden.grad, *(p.grad for p in linear.parameters())]
        found.append([total.detach(), *(x.detach() for x in stats), *gradients])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_statistics_are_the_same_bits_with_a_loss_and_without() -> None:
    hidden, linear = parts(bias=True, dtype=torch.float32)
    _, with_loss = label_loss(linear, hidden, LABELS, of_logprobs, 0.7)
    for mine, plain in zip(with_loss, label_stats(linear, hidden, LABELS, 0.7), strict=True):
        assert torch.equal(mine, plain)
        assert not mine.requires_grad


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_gradients_hold_where_a_token_is_nearly_certain_or_impossible(entropy_coef: float) -> None:
    """Shares of slices go down to e⁻³⁰⁰⁰ here, far below what a float32 can hold."""

    def loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        bonus = entropy_coef * entropy.sum() if entropy_coef else 0.0
        return (WEIGHTS[tokens].to(logprobs.dtype) * logprobs).sum() + bonus

    found = []
    for dtype in (torch.float32, torch.float64):
        hidden, linear = parts(bias=False)
        with torch.no_grad():
            linear.weight.mul_(400)
            labels = linear(hidden).argmax(1)
            labels[::2] = LABELS[::2]
        hidden, linear = hidden.detach().to(dtype).requires_grad_(), linear.to(dtype)
        if dtype == torch.float32:
            label_loss(linear, hidden, labels, loss)[0].backward()
        else:
            stats = stats_of_logits(linear(hidden), labels)
            loss(stats.logprobs, stats.entropy, slice(N)).backward()
        found.append([hidden.grad, linear.weight.grad])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-2)


def test_a_likely_token_keeps_its_small_gradient_in_bfloat16() -> None:
    hidden, linear = parts(bias=False, dtype=torch.float32)
    with torch.no_grad():
        linear.weight.mul_(3)
        labels = linear(hidden).argmax(1)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.bfloat16())
        hidden.copy_(hidden.bfloat16())
    plain = linear(hidden).log_softmax(1).gather(1, labels[:, None]).sum()
    expected = torch.autograd.grad(plain, [hidden, linear.weight])
    linear.__class__ = RoundedLinear
    total, stats = label_loss(linear, hidden, labels, of_logprobs)
    assert stats.logprobs.max() > -0.05
    for ours, exact in zip(torch.autograd.grad(total, [hidden, linear.weight]), expected, strict=True):
        for mine, row in zip(ours, exact, strict=True):
            assert (mine - row).norm() <= 0.02 * row.norm() + 1e-6


def test_the_likeliest_token_is_found_in_any_slice() -> None:
    hidden, linear = parts(bias=False)
    best = linear(hidden).argmax(1)
    assert len({int(token) // 256 for token in best}) > 1
    assert label_stats(linear, hidden, best).likeliest.tolist() == [1.0] * N


def test_frozen_weights_get_no_gradient_and_states_still_do() -> None:
    hidden, linear = parts(bias=True)
    linear.requires_grad_(False)
    label_loss(linear, hidden, LABELS, of_logprobs)[0].backward()
    assert hidden.grad is not None
    assert linear.weight.grad is None


def test_a_loss_that_depends_on_no_token_gives_gradients_of_zero() -> None:
    hidden, linear = parts(bias=True)
    label_loss(linear, hidden, LABELS, lambda logprobs, *_: torch.zeros(()))[0].backward()
    assert all(x.grad is not None and not x.grad.any() for x in (hidden, *linear.parameters()))


def test_no_tokens_have_a_loss_of_zero() -> None:
    hidden, linear = parts(bias=True)
    total, stats = label_loss(linear, hidden[:0], LABELS[:0], of_logprobs)
    total.backward()
    assert total.item() == 0
    assert stats.logprobs.shape == (0,)


def test_on_a_cpu_rounded_factors_have_a_product_in_float32() -> None:
    """Weights in bfloat16, autocast, and products that are rounded: the logits are not."""
    hidden, linear = parts(bias=True, dtype=torch.float32)
    exact = hidden.bfloat16().float() @ linear.weight.bfloat16().float().t() + linear.bias.bfloat16().float()
    plain = stats_of_logits(exact.detach() / 0.7, LABELS)
    _, rounded = parts(bias=True, dtype=torch.float32)
    rounded.__class__ = RoundedLinear
    _, low = parts(bias=True, dtype=torch.float32)
    low.bfloat16()
    for head, states, autocast in (
        (linear, hidden, True),
        (rounded, hidden, False),
        (low, hidden.detach().bfloat16().requires_grad_(), False),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total, ours = label_loss(head, states, LABELS, of_logprobs, 0.7)
        for mine, expected in zip(ours, plain, strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, expected)
        total.backward()
        for x in (states, *head.parameters()):
            assert x.grad is not None
            assert x.grad.dtype == x.dtype


def test_a_loss_has_one_backward_pass() -> None:
    hidden, linear = parts(bias=True)
    total, _ = label_loss(linear, hidden, LABELS, of_logprobs)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has had its backward pass"):
        total.backward()


def test_nan_in_one_token_is_seen_in_its_log_prob_only() -> None:
    hidden, linear = parts(bias=False)
    with torch.no_grad():
        hidden[2, 0] = torch.nan
    assert label_stats(linear, hidden, LABELS)[0].isnan().tolist() == [False, False, True, False, False]

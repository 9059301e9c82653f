"""The KL estimators against sums over a vocabulary; their coefficients against hand-computed values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_tasks.config.ppo import AdaptiveKl
from rlhf_tasks.ppo.kl import ESTIMATORS, adapt_kl_coef, adapt_penalty, k1, k2, k3

GENERATOR = torch.Generator().manual_seed(2)
LOG_P, LOG_Q = torch.randn(2, 7, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
EXACT = float((LOG_P.exp() * (LOG_P - LOG_Q)).sum())


def test_estimators_equal_hand_computed_values() -> None:
    p, q = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert k1(p, q).item() == 2
    assert k1(q, p).item() == -2
    assert k2(p, q).item() == k2(q, p).item() == 2
    assert k3(p, q).item() == pytest.approx(0.1353353 - 1 + 2)
    assert k3(q, p).item() == pytest.approx(7.389056 - 1 - 2)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_under_samples_of_the_policy(name: str) -> None:
    mean = float((LOG_P.exp() * ESTIMATORS[name](LOG_P, LOG_Q)).sum())
    assert mean == pytest.approx(EXACT, rel=1e-9)


def test_the_gradient_of_k1_is_zero_in_expectation_and_that_of_k2_is_the_gradient_of_the_kl() -> None:
    """Therefore `kl_in: loss` does not allow k1. The KL's gradient is by the sum over the vocabulary."""

    def gradient(name: str | None) -> Tensor:
        logits = LOG_P.clone().requires_grad_(True)
        log_p = logits.log_softmax(-1)
        if name is None:
            (log_p.exp() * (log_p - LOG_Q)).sum().backward()
        else:
            (log_p.detach().exp() * ESTIMATORS[name](log_p, LOG_Q)).sum().backward()
        assert logits.grad is not None
        result: Tensor = logits.grad
        return result

    torch.testing.assert_close(gradient("k1"), torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient("k2"), gradient(None), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 256 / 10_000)),
        (60.0, 0.2 * (1 + 0.2 * 256 / 10_000)),  # the error is clipped at 0.2
        (0.0, 0.2 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_the_adaptive_coefficient_equals_hand_computed_values(kl: float, coef: float) -> None:
    adaptive = AdaptiveKl(target=6.0, horizon=10_000, clip=0.2)
    assert adapt_kl_coef(0.2, kl, 256, adaptive) == pytest.approx(coef)
    assert adapt_kl_coef(0.2, kl, 256, None) == 0.2


@pytest.mark.parametrize(("divergence", "beta"), [(0.031, 2.0), (0.029, 1.0), (0.014, 1.0), (0.013, 0.5)])
def test_beta_doubles_and_halves_around_its_target(divergence: float, beta: float) -> None:
    assert adapt_penalty(1.0, divergence, 0.02) == beta

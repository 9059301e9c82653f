"""Advantages: by a critic token by token (GAE), or by the other responses to the same prompt (RLOO, group).

Without a critic, a whole response is one action. Its return is the sum of its token rewards, KL penalty
included, and all of its tokens have the same advantage. The k responses to a prompt are rows i, i + B / k, …,
as in `Samples`.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.tensors import last_token
from rlhf_tasks.ppo.metrics import explained_variance
from rlhf_tasks.project.imports import call

if TYPE_CHECKING:
    from rlhf_tasks.ppo.rollout import Rollout

ROUNDING = 1e-4
"""Relative tolerance below which returns in a group count as equal."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, R), zero on padding.

        δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   return_t = A_t + V_t

    λ is one for all, or (B,). `values[t]` is the value of the state before token t. `bootstrap_values` (B,)
    are those of the state after the last real token; without them, or where one is 0, that state is terminal.
    Schulman et al. 2016, arXiv 1506.02438, eq. 16.
    """
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    if bootstrap_values is not None:
        next_values = torch.where(last_token(mask), bootstrap_values[:, None], next_values)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return torch.where(mask, advantages, 0), torch.where(mask, advantages + values, 0)


def response_returns(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) float64: the sum of the token rewards (B, R) of each response."""
    return torch.where(mask, rewards, 0).double().sum(1)


def rloo(returns: Tensor, num_samples: int) -> Tensor:
    """(B,): each return minus the mean of the other returns of its group.

        A_i = G_i − 1/(k − 1) · Σ_{j≠i} G_j = k/(k − 1) · (G_i − mean G)

    Ahmadian et al. 2024, arXiv 2402.14740, eq. 6.
    """
    rows = returns.view(num_samples, -1)
    return num_samples / (num_samples - 1) * (rows - rows.mean(0)).flatten()


def group(returns: Tensor, num_samples: int) -> Tensor:
    """(B,): (G_i − mean G) / std G over its group.

    Shao et al. 2024, arXiv 2402.03300, 4.1.2. The deviation has the divisor k − 1, as in most
    implementations. A small part of the largest |G| is added to it: where responses are equal, rounding
    would else have advantages of ±1.
    """
    rows = returns.view(num_samples, -1)
    deviation = group_deviations(returns, num_samples) + ROUNDING * rows.abs().amax(0)
    return torch.where(deviation > 0, (rows - rows.mean(0)) / deviation, 0).flatten()


def group_deviations(returns: Tensor, num_samples: int) -> Tensor:
    """(B / k,): the standard deviation of the returns of each group, with the divisor k − 1."""
    return returns.view(num_samples, -1).std(0)


def equal_groups(returns: Tensor, num_samples: int) -> Tensor:
    """(B,) bool: all responses to the prompt have the same return, up to rounding."""
    largest = returns.view(num_samples, -1).abs().amax(0)
    return (group_deviations(returns, num_samples) <= ROUNDING * largest).repeat(num_samples)


# ------------------------------------------------------------------- estimators, as the loop calls them


def estimate_gae(rewards: Tensor, rollout: Rollout, config: Ppo) -> tuple[Tensor, Tensor]:
    """`gae` of token rewards (B, R): advantages and returns, (B, R) each, with a λ of its own for each.

    Where the critic explains nothing, the advantages are those of whole responses: the return minus the mean.
    """
    settings, mask = config.advantages, rollout.mask
    assert settings.kind == "gae"
    lam: float | Tensor = settings.lam
    if settings.lam_length is not None:  # arXiv 2504.05118, eq. 7
        lam = (1 - 1 / (settings.lam_length * mask.sum(1))).clamp_min(0)  # (B,)
    estimate = partial(gae, rewards, rollout.values, mask, settings.gamma)
    advantages, returns = estimate(lam, rollout.bootstrap_values)
    if settings.lam_value is not None or settings.lam_length is not None:
        lam_value = settings.lam if settings.lam_value is None else settings.lam_value
        returns = estimate(lam_value, rollout.bootstrap_values)[1]
    if settings.fallback is None:
        return advantages, returns
    by_outcome = monte_carlo_returns(rewards, rollout, settings.gamma)
    if explained_variance(by_outcome, rollout.values, mask) <= 0:
        whole = response_returns(rewards, mask)
        by_mean = (
            whole - whole.mean() if settings.fallback == "batch" else rloo(whole, config.samples_per_prompt)
        )
        advantages = by_mean.float()[:, None] * mask
    return advantages, returns


def monte_carlo_returns(rewards: Tensor, rollout: Rollout, gamma: float) -> Tensor:
    """(B, R) discounted sums of the token rewards (B, R) to come: no value enters but that of a cut end."""
    return gae(rewards, rollout.values, rollout.mask, gamma, 1.0, rollout.bootstrap_values)[1]


def estimate_by_group(
    of_returns: Callable[[Tensor, int], Tensor], rewards: Tensor, rollout: Rollout, config: Ppo
) -> tuple[Tensor, Tensor]:
    """`rloo` or `group`: every token of a response has its advantage, and the response's return."""
    returns, mask = response_returns(rewards, rollout.mask), rollout.mask
    advantages = of_returns(returns, config.samples_per_prompt)
    return advantages.float()[:, None] * mask, returns.float()[:, None] * mask


def call_user_estimator(
    function: Callable[..., Any], name: str, rewards: Tensor, rollout: Rollout, config: Ppo
) -> tuple[Tensor, Tensor]:
    """An estimator of the user's, and a check of what it returns; `name` is its name in messages.

    Raises:
        UserError: if it raises, or does not return what an `Estimator` does.
    """
    read = [rewards, *(one for one in vars(rollout).values() if isinstance(one, Tensor))]
    versions = [one._version for one in read]
    returned = call(name, function, rewards, rollout, config)
    if [one._version for one in read] != versions:
        raise UserError(f"{name} changes its arguments, which PPO still reads: write x = x - y, not x -= y")
    several = returned if isinstance(returned, tuple | list) else (returned,)
    given = [list(x.shape) if isinstance(x, Tensor) else repr(x)[:80] for x in several]
    if given != 2 * [list(rewards.shape)]:
        raise UserError(
            f"{name} must return (advantages, returns), two tensors of {list(rewards.shape)}, but gave "
            f"{given}"
        )
    advantages, returns = (one.detach().float() for one in several)
    if not all(bool(one[rollout.mask].isfinite().all()) for one in (advantages, returns)):
        raise UserError(f"{name} gave NaN or infinity for a token of a response")
    return advantages, returns


Estimator = Callable[[Tensor, "Rollout", Ppo], tuple[Tensor, Tensor]]
"""(rewards, rollout, config) → (advantages, returns), (B, R) each. `rollout` is that of all ranks; its
`values` and `bootstrap_values` are 0 without a critic."""

ESTIMATORS: Mapping[str, Estimator] = {
    "gae": estimate_gae,
    "rloo": partial(estimate_by_group, rloo),
    "group": partial(estimate_by_group, group),
}
"""By the `kind` of `ppo.advantages`."""

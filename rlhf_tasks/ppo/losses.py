"""PPO's losses as pure functions: per token, and the total that an optimiser step minimises.

B batch · R response; every tensor is (B, R) unless its docstring names another shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.modeling.tensors import masked_sum
from rlhf_tasks.modeling.vocabulary import Loss
from rlhf_tasks.ppo.kl import ESTIMATORS, k3

Sums = dict[str, Tensor]
"""Scalars by the name of their metric, each summed over the real response tokens."""


class MicroBatch(NamedTuple):
    """What the rollout holds for the same tokens; zero on padding."""

    mask: Tensor  # bool, True on real response tokens
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    importance: Tensor | None = None
    """Weights of the tokens' policy loss; None: 1, the rollout is the policy's own."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The weights, ranges and estimators of PPO's loss, under the papers' names."""

    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None
    cliprange_value: float | None = None
    ratio_from: Literal["rollout", "reference"] = "rollout"
    policy_coef: float = 1.0
    vf_coef: float | None
    """None: there is no critic."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """None: the KL to the reference is in the reward, and the loss has no such term."""
    beta: float | None = None
    """None: there is no PPO-penalty."""

    def for_critic_only(self) -> Coefficients:
        """The same, the policy's terms times 0: under data parallelism every weight needs a gradient."""
        beta = None if self.beta is None else 0.0
        return replace(self, policy_coef=0.0, entropy_coef=0.0, kl_coef=0.0, beta=beta)


def policy_terms(
    logprobs: Tensor, entropy: Tensor, batch: MicroBatch, coefficients: Coefficients
) -> tuple[Tensor, Sums]:
    """The terms of PPO's loss that depend on the policy, and their metrics.

        L_policy − entropy_coef · H + kl_coef · KL(π ‖ π_ref) + beta · KL(π_old ‖ π)

    All are summed over the real response tokens of a micro-batch. The caller adds `value_term`, and divides
    by the number of tokens of the whole minibatch. PPO-ptx adds `ptx_loss`, on other rows.
    """
    c, mask = coefficients, batch.mask
    absent, weights = torch.zeros_like(logprobs), batch.importance
    ratio_base = batch.ref_logprobs if c.ratio_from == "reference" else batch.logprobs
    tokens = policy_loss(logprobs - ratio_base, batch.advantages, c.cliprange, c.cliprange_high, c.dual_clip)
    kl_tokens = absent if c.kl_estimator is None else ESTIMATORS[c.kl_estimator](logprobs, batch.ref_logprobs)
    penalty_tokens = absent if c.beta is None else k3(batch.logprobs, logprobs)

    token_losses = tokens.loss if weights is None else tokens.loss * weights
    policy, bonus = masked_sum(token_losses, mask), masked_sum(entropy, mask)
    kl, penalty = masked_sum(kl_tokens, mask), masked_sum(penalty_tokens, mask)
    loss = c.policy_coef * policy + c.kl_coef * kl + (c.beta or 0.0) * penalty
    if c.entropy_coef:  # else a gradient of zeros would be computed for it
        loss = loss - c.entropy_coef * bonus

    sums = {"loss/policy_avg": policy} | _policy_sums(logprobs.detach(), batch, tokens.clipped)
    sums["policy/entropy_avg"] = bonus
    if c.kl_estimator is not None:
        sums["loss/kl_avg"] = kl
    if c.beta is not None:
        sums["policy/penalty_kl_avg"] = penalty
    return loss, {name: x.detach() for name, x in sums.items()}


def token_loss(batch: MicroBatch, coefficients: Coefficients) -> Loss:
    """The loss of `policy_terms` as `token_stats` takes it: of some of the real tokens, row after row."""
    flat = [None if x is None else x[batch.mask] for x in batch]

    def loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        own = MicroBatch._make(None if x is None else x[tokens] for x in flat)
        return policy_terms(logprobs, entropy, own, coefficients)[0]

    return loss


def value_term(values: Tensor, batch: MicroBatch, coefficients: Coefficients) -> tuple[Tensor, Sums]:
    """vf_coef · L_value, the one term of PPO's loss that depends on the critic, and its metrics."""
    tokens = value_loss(values, batch.values, batch.returns, coefficients.cliprange_value)
    value = masked_sum(tokens.loss, batch.mask)
    sums = {"loss/value_avg": value.detach(), "val/clipfrac_avg": masked_sum(tokens.clipped, batch.mask)}
    assert coefficients.vf_coef is not None
    return coefficients.vf_coef * value, sums


def _policy_sums(logprobs: Tensor, batch: MicroBatch, clipped: Tensor) -> Sums:
    """The metrics of the policy that have no part in the loss."""
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.exp()
    per_token = {
        "policy/clipfrac_avg": clipped,
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "val/ratio": ratio,
        "ratio_off_squared": (ratio - 1) ** 2,  # Σ ratio² would lose the variance to rounding
        "num_tokens": batch.mask,
    }
    return {name: masked_sum(x, batch.mask) for name, x in per_token.items()}


def ptx_loss(nll: Tensor, num_tokens: float, coef: float) -> Tensor:
    """coef · mean −log p a token of other text, scalar: PPO-ptx (Ouyang et al. 2022, eq. 2).

    `nll` is the sum of −log p over a micro-batch, `num_tokens` the count of the whole minibatch.
    """
    return coef * nll / num_tokens


class TokenLoss(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """bool: the clipped term is the loss, and this token has no gradient."""


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(−A·ratio, −A·clip(ratio, 1 − cliprange, 1 + cliprange_high)), ratio = exp(log_ratio).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7. With `dual_clip`, where A < 0 the loss is at most
    dual_clip · |A|: an unlikely bad token that became likely must not dominate the step
    (arXiv 1912.09729, eq. 5).
    """
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high)
    loss, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
        loss, is_clipped = torch.minimum(loss, ceiling), is_clipped | (loss > ceiling)
    return TokenLoss(loss, is_clipped)


def importance_weights(logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_old / π_engine, cap) of each token: what makes samples of an engine count as samples of π_old.

    Truncated importance sampling (Ionides 2008): the cap bounds the variance, and gives a bias only to tokens
    above it. The ratio of `policy_loss` is to π_old, so that the clip range keeps its meaning when the engine
    had older weights (the decoupled objective of arXiv 2110.00641).
    """
    return (logprobs - engine_logprobs).exp().clamp_max(cap)


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float | None
) -> TokenLoss:
    """½·max((V − G)², (V_old + clip(V − V_old, ±cliprange_value) − G)²), G the return; None: no clip.

    The ½ is included, vf_coef is not, as in lm-human-preferences.
    """
    unclipped = (new_values - returns) ** 2
    if cliprange_value is None:
        return TokenLoss(0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool))
    value_change = new_values - values
    clipped = (values + value_change.clamp(-cliprange_value, cliprange_value) - returns) ** 2
    # within the range the two differ by rounding only, which is no clip
    is_clipped = (clipped > unclipped) & (value_change.abs() > cliprange_value)
    return TokenLoss(0.5 * torch.maximum(unclipped, clipped), is_clipped)

"""PPO's losses as pure functions: per token, and the total that an optimiser step minimises.

B batch · R response; every tensor is (B, R) unless its docstring names another shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.modeling.tensors import masked_sum
from rlhf_tasks.ppo.kl import ESTIMATORS, k3

Sums = dict[str, Tensor]
"""Scalars by the name of their metric, each summed over the real response tokens."""


class Outputs(NamedTuple):
    """What the models in training give for a micro-batch."""

    logprobs: Tensor
    values: Tensor
    entropy: Tensor


class MicroBatch(NamedTuple):
    """What the rollout holds for the same tokens; zero on padding."""

    mask: Tensor  # bool, True on real response tokens
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The weights, ranges and estimators of `ppo_loss`, under the papers' names."""

    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None
    cliprange_value: float | None = None
    ratio_from: Literal["rollout", "reference"] = "rollout"
    policy_coef: float = 1.0
    vf_coef: float
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


def ppo_loss(outputs: Outputs, batch: MicroBatch, coefficients: Coefficients) -> tuple[Tensor, Sums]:
    """PPO's total loss and its metrics, both summed over the real response tokens of a micro-batch.

        L = L_policy + vf_coef · L_value − entropy_coef · H + kl_coef · KL(π ‖ π_ref) + beta · KL(π_old ‖ π)

    The caller divides by the number of tokens of the whole minibatch. PPO-ptx adds `ptx_loss` to it, on
    other rows.
    """
    c, mask = coefficients, batch.mask
    absent = torch.zeros_like(outputs.logprobs)
    ratio_base = batch.ref_logprobs if c.ratio_from == "reference" else batch.logprobs
    policy_tokens = policy_loss(
        outputs.logprobs - ratio_base, batch.advantages, c.cliprange, c.cliprange_high, c.dual_clip
    )
    value_tokens = value_loss(outputs.values, batch.values, batch.returns, c.cliprange_value)
    kl_tokens, penalty_tokens = absent, absent
    if c.kl_estimator is not None:
        kl_tokens = ESTIMATORS[c.kl_estimator](outputs.logprobs, batch.ref_logprobs)
    if c.beta is not None:
        penalty_tokens = k3(batch.logprobs, outputs.logprobs)

    policy, value = masked_sum(policy_tokens.loss, mask), masked_sum(value_tokens.loss, mask)
    entropy, kl = masked_sum(outputs.entropy, mask), masked_sum(kl_tokens, mask)
    penalty = masked_sum(penalty_tokens, mask)
    loss = (
        c.policy_coef * policy
        + c.vf_coef * value
        - c.entropy_coef * entropy
        + c.kl_coef * kl
        + (c.beta or 0.0) * penalty
    )

    sums = {"loss/policy_avg": policy, "loss/value_avg": value}
    sums |= _token_sums(outputs, batch, policy_tokens.clipped, value_tokens.clipped)
    if c.kl_estimator is not None:
        sums["loss/kl_avg"] = kl
    if c.beta is not None:
        sums["policy/penalty_kl_avg"] = penalty
    return loss, {name: x.detach() for name, x in sums.items()}


def _token_sums(outputs: Outputs, batch: MicroBatch, policy_clipped: Tensor, value_clipped: Tensor) -> Sums:
    """The metrics that have no part in the loss."""
    log_ratio = outputs.logprobs.detach() - batch.logprobs
    ratio = log_ratio.exp()
    per_token = {
        "policy/clipfrac_avg": policy_clipped,
        "val/clipfrac_avg": value_clipped,
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "policy/entropy_avg": outputs.entropy.detach(),
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

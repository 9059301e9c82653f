"""PPO's losses as pure functions, a number for each token, and how these become one number.

A policy loss of one's own is a function with the signature of `ppo_clip`; `ppo.loss: "my_module:my_loss"`
names it. It sees whole responses. The loop adds the other terms that the parameters ask for:

    L = policy loss · importance + kl_coef · KL(π ‖ π_ref) + beta · KL(π_old ‖ π) − entropy_coef · H
        + vf_coef · value loss

b rows of a micro-batch · R response; every tensor is (b, R) unless its docstring names another shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import Constant
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import call
from rlhf_tasks.tracking import own


class MicroBatch(NamedTuple):
    """What the rollout holds for the same tokens; zero on padding."""

    mask: Tensor  # bool, True on real response tokens, EOS included
    logprobs: Tensor  # of the policy that the rollout was made with, π_old
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    importance: Tensor  # by what the policy loss is multiplied: 1 where the policy itself has sampled


PolicyLoss = Callable[[Tensor, MicroBatch, Ppo], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs, batch, config) → the loss and the metrics of each token, (b, R) each."""


def ppo_clip(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO, and its metrics for each token.

    `logprobs` are those of the policy in training. Metrics are logged as means over all real tokens.
    """
    base = batch.ref_logprobs if config.ratio_from == "reference" else batch.logprobs
    loss, is_clipped = clipped_surrogate(
        logprobs - base, batch.advantages, config.cliprange, config.cliprange_high, config.dual_clip
    )
    return loss, {"policy/clipfrac_avg": is_clipped}


def call_user_loss(
    function: Callable[..., Any], name: str, logprobs: Tensor, batch: MicroBatch, config: Ppo
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the user's, and a check of what it returns; `name` is its name in messages.

    Raises:
        UserError: if it raises, or does not return what `ppo_clip` does.
    """
    versions = [one._version for one in (logprobs, *batch)]
    returned = call(name, function, logprobs, batch, config)
    if [one._version for one in (logprobs, *batch)] != versions:
        raise UserError(f"{name} changes its arguments, which PPO still reads: write x = x - y, not x -= y")
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise UserError(
            f"{name} must return (losses, metrics), a tensor and a dict, but gave {returned!r:.80}"
        )
    losses, metrics = returned
    shape = list(logprobs.shape)
    must_be = f"must be a tensor with a number for each token, {shape}"
    if not isinstance(losses, Tensor) or list(losses.shape) != shape:
        given = list(losses.shape) if isinstance(losses, Tensor) else f"{losses!r:.80}"
        raise UserError(f"{name}: the losses {must_be}, and not {given}")
    for key, value in metrics.items():
        own.check_name(name, key)
        try:
            torch.broadcast_to(value, shape)
        except (TypeError, RuntimeError) as error:
            raise UserError(f"{name}: metric {key!r} {must_be}: {error}") from None
    if logprobs.requires_grad and not losses.requires_grad:
        raise UserError(f"{name}: the losses do not depend on the log-probs: nothing would be learned")
    return losses, metrics


def token_weights(mask: Tensor, reduction: Literal["token_mean", "response_mean"] | Constant) -> Tensor:
    """The weights by which the token losses of a whole minibatch are added up; zero on padding.

    `token_mean` is the mean over all tokens of all ranks. `response_mean` is the mean over responses of
    their own token means (GRPO, arXiv 2402.03300). A constant stands in place of each response's length
    (Dr. GRPO, arXiv 2503.20783). `mask` holds the rows of all ranks, so that the weights, and with
    them a step, do not depend on how the minibatch is cut.
    """
    tokens = mask.float()
    if reduction == "token_mean":
        return tokens / tokens.sum()
    if reduction == "response_mean":
        return tokens / tokens.sum(1, keepdim=True) / len(mask)
    return tokens / (reduction.constant * len(mask))


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """max(−A·ratio, −A·clip(ratio, 1 − cliprange, 1 + cliprange_high)), ratio = exp(log_ratio).

    The second result, bool, is True where the clipped term is the loss: this token has no gradient.
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
    return loss, is_clipped


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_old / π_sampler, cap) of each token: corrects for the mismatch of sampler and trainer.

    Truncated importance sampling (Ionides 2008): the cap bounds the variance, and gives a bias only to tokens
    above it. The ratio of `clipped_surrogate` is to π_old, so that the clip range keeps its meaning (the
    decoupled objective of arXiv 2110.00641).
    """
    return (logprobs - sampler_logprobs).exp().clamp_max(cap)


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float | None
) -> tuple[Tensor, Tensor]:
    """½·max((V − G)², (V_old + clip(V − V_old, ±cliprange_value) − G)²), G the return; None: no clip.

    The second result, bool, is True where the clipped term is the loss. The ½ is included, vf_coef is not, as
    in lm-human-preferences.
    """
    unclipped = (new_values - returns) ** 2
    if cliprange_value is None:
        return 0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    value_change = new_values - values
    clipped = (values + value_change.clamp(-cliprange_value, cliprange_value) - returns) ** 2
    # within the range the two differ by rounding only, which is no clip
    is_clipped = (clipped > unclipped) & (value_change.abs() > cliprange_value)
    return 0.5 * torch.maximum(unclipped, clipped), is_clipped

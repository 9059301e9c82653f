"""KL(policy ‖ reference) per token from the log-probs of sampled tokens, and what adapts its coefficients.

The penalty itself is applied in `train.py`: in the rewards (`kl.kind: in_reward`, step 4 of an update, by
`rewards.token_rewards`), or in the loss (`in_loss`, `token_losses`). `kl_penalty` and `target_kl` are other
things: they bound the step from the policy of the rollout.

B batch · R response. The estimators are those of Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rlhf_tasks.config.ppo import AdaptiveKl


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log π − log π_ref, (B, R): unbiased under samples of the policy; may be negative for a token."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """½ (log π − log π_ref)², (B, R): biased, never negative; its gradient is unbiased."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """π_ref/π − 1 − log(π_ref/π), (B, R): unbiased, never negative."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.expm1() - log_ratio


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def adapt_kl_coef(coef: float, kl: float, num_episodes: int, adaptive: AdaptiveKl | None) -> float:
    """kl_coef after a rollout of `num_episodes` with this mean KL of a response, in nats.

    Ziegler et al. 2019, 2.2. Without `adaptive` it stays as it is.
    """
    if adaptive is None:
        return coef
    error = min(max(kl / adaptive.target - 1, -adaptive.clip), adaptive.clip)
    return coef * (1 + error * num_episodes / adaptive.horizon)


def adapt_penalty(beta: float, divergence: float, target: float) -> float:
    """beta of PPO-penalty after the epochs on a rollout; `divergence` is the mean KL(π_old ‖ π) of a token.

    Schulman et al. 2017, eq. 8.
    """
    if divergence < target / 1.5:
        return beta / 2
    return beta * 2 if divergence > target * 1.5 else beta

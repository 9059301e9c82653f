"""KL(policy ‖ reference) per token from the log-probs of sampled tokens, and its controllers.

B batch · R response. The estimators are those of Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_tasks.config.ppo import AdaptiveKl, KlPenalty


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


@dataclass
class KlController:
    """Holds kl_coef, fixed or adaptive (Ziegler et al. 2019, 2.2)."""

    coef: float
    adaptive: AdaptiveKl | None = None

    def update(self, kl: float, num_episodes: int) -> None:
        """Adapt after a rollout of `num_episodes`; `kl` is its mean KL of a response, in nats."""
        if self.adaptive is not None:
            clip = self.adaptive.clip
            error = min(max(kl / self.adaptive.target - 1, -clip), clip)
            self.coef *= 1 + error * num_episodes / self.adaptive.horizon


@dataclass
class PenaltyController:
    """Holds beta of PPO-penalty, which is added to the clipped loss (Schulman et al. 2017, eq. 8)."""

    beta: float
    target: float

    @classmethod
    def of(cls, settings: KlPenalty | None) -> PenaltyController:
        """The controller of the settings; without them beta is 0, and doubling does not change it."""
        return cls(0.0, 0.0) if settings is None else cls(settings.beta, settings.target)

    def update(self, divergence: float) -> None:
        """Adapt after the epochs on a rollout; `divergence` is the mean KL(π_old ‖ π) of a token."""
        if divergence < self.target / 1.5:
            self.beta /= 2
        elif divergence > self.target * 1.5:
            self.beta *= 2

"""Estimators of KL(policy ‖ reference) per token, from the log-probs of sampled tokens.

B batch · R response.
"""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log π − log π_ref, (B, R): unbiased under samples of the policy; may be negative for a token.

    Schulman, "Approximating KL divergence" (2020).
    """
    return logprobs - ref_logprobs

"""GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio of PPO's clip is that of a whole response.

    ppo:
      loss: "examples.gspo:gspo"
      loss_reduction: response_mean
      cliprange: 0.0003
      cliprange_high: 0.0004

The paper's advantages are those of `group`.
"""

from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.losses import MicroBatch, clipped_surrogate


def gspo(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with s = exp(mean log-ratio of a response's tokens), eq. 5 and 7."""
    log_ratio = ((logprobs - batch.logprobs) * batch.mask).sum(1, keepdim=True)  # (b, 1)
    log_ratio = (log_ratio / batch.mask.sum(1, keepdim=True)).expand_as(logprobs)  # (b, R)
    loss, clipped = clipped_surrogate(log_ratio, batch.advantages, config.cliprange, config.cliprange_high)
    return loss, {"policy/clipfrac_avg": clipped}

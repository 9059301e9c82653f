"""RLOO whose clipped ratio is that of a whole response, as in TRL 1.12.

    ppo:
      loss: "examples.whole_response:clip"
      loss_reduction: response_mean

The advantages are those of the preset `rloo`.
"""

from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.losses import MicroBatch, clipped_surrogate


def clip(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with the product of a response's ratios, for each of its tokens."""
    log_ratio = ((logprobs - batch.logprobs) * batch.mask).sum(1, keepdim=True).expand_as(logprobs)  # (b, R)
    loss, clipped = clipped_surrogate(log_ratio, batch.advantages, config.cliprange, config.cliprange_high)
    return loss, {"policy/clipfrac_avg": clipped}

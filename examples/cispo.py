"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, and no token loses its gradient.

    ppo:
      loss: "examples.cispo:cispo"
      loss_reduction: token_mean
      cliprange_high: 2.0

The paper's advantages are those of `group`, without a KL penalty. It tunes the upper bound alone, 1 +
cliprange_high, and has no lower one.
"""

from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.losses import MicroBatch


def cispo(logprobs: Tensor, batch: MicroBatch, config: Ppo) -> tuple[Tensor, dict[str, Tensor]]:
    """−sg(min(ratio, 1 + cliprange_high)) · A · log π of each token, eq. 4 and 5; sg has no gradient."""
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    ratio = (logprobs.detach() - batch.logprobs).exp()  # (b, R)
    loss = -ratio.clamp(max=1 + high) * batch.advantages * logprobs
    return loss, {"policy/clipfrac_avg": ratio > 1 + high}

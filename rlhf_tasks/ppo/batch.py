"""The PPO batch: a rollout with its advantages and returns, which the epochs learn from.

B batch · R response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from rlhf_tasks.data.batches import realigned
from rlhf_tasks.ppo.losses import MicroBatch
from rlhf_tasks.ppo.rollout import Rollout


@dataclass(frozen=True)
class PPOBatch:
    rollout: Rollout
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R)
    kl_coef: float
    """The coefficient that this rollout was rewarded with."""

    def content(self) -> dict[str, Any]:
        """All of it by name, for a `NonFiniteError`."""
        return vars(self.rollout) | {"advantages": self.advantages, "returns": self.returns}

    def micro_batch(self, rows: Sequence[int], mask: Tensor) -> MicroBatch:
        """These rows, aligned as their `mask` and on its device; zero on padding."""
        rollout, own = self.rollout, list(rows)

        def cut(x: Tensor) -> Tensor:
            return realigned(x[own], rollout.mask[own], mask.cpu()).to(mask.device)

        return MicroBatch(
            mask, cut(rollout.logprobs), cut(rollout.ref_logprobs), cut(rollout.values),
            cut(self.advantages), cut(self.returns),
            None if rollout.importance is None else cut(rollout.importance),
        )  # fmt: skip


def merged(parts: Sequence[PPOBatch]) -> PPOBatch:
    """One batch in the rows' order, of parts by rank whose rows `Runtime.share` has dealt."""
    rollout = {
        field.name: interleaved([getattr(part.rollout, field.name) for part in parts])
        for field in fields(Rollout)
    }
    return PPOBatch(
        Rollout(**rollout), interleaved([part.advantages for part in parts]),
        interleaved([part.returns for part in parts]), parts[0].kl_coef,
    )  # fmt: skip


def interleaved(parts: Sequence[Any]) -> Any:
    """The inverse of `Runtime.share`: rows by rank → rows in order; tensors, lists, dicts, or None."""
    first, count = parts[0], len(parts)
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: interleaved([part[key] for part in parts]) for key in first}
    num_rows = sum(map(len, parts))
    whole: Any = (
        first.new_empty((num_rows, *first.shape[1:])) if isinstance(first, Tensor) else [None] * num_rows
    )
    for rank, part in enumerate(parts):
        whole[rank::count] = part
    return whole

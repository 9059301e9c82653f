"""A rollout: responses sampled from the policy, and every number that PPO learns from.

It is made on the CPU, and the epochs read a copy on the device. All ranks hold all of it: so the number of
ranks changes no advantage, no metric and no step.

B responses · R response length. In each (B, R) tensor a row starts with the first token of its response;
`mask` is True on real response tokens, EOS included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import CPU, Batch, collate_groups, group_rows, group_sizes
from rlhf_tasks.data.columns import Columns, take
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.lora import disable_adapters
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.losses import MicroBatch
from rlhf_tasks.training.distributed import Distributed, MicroRows

T = TypeVar("T")


@dataclass(frozen=True)
class Prompts:
    """Rows of prompts: their texts, the ids of these, and their kept columns."""

    texts: Sequence[str]
    queries: Sequence[Ids]
    columns: Columns

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Prompts:
        """These rows."""
        texts, queries = [self.texts[i] for i in rows], [self.queries[i] for i in rows]
        return Prompts(texts, queries, take(self.columns, rows))

    def repeat(self, num_samples: int) -> Prompts:
        """A row for each response, in the order of `Samples`."""
        return self.take([*range(len(self))] * num_samples)


@dataclass(frozen=True)
class Rollout:
    """The rollout of all ranks."""

    queries: Sequence[Ids]
    responses: list[Ids]
    ended: Tensor  # (B,) bool: the response has an end
    mask: Tensor  # (B, R) bool
    logprobs: Tensor  # (B, R), of the policy before this update
    ref_logprobs: Tensor  # (B, R)
    values: Tensor  # (B, R), of the state before each token; 0 without a critic
    bootstrap_values: Tensor  # (B,), of the state after the last token; 0 where the episode is over
    scores: Tensor  # (B,), the scorers' weighted sum, before scaling and the EOS rule
    parts: dict[str, Tensor]  # (B,) of each scorer, unweighted
    importance: Tensor  # (B, R), 1 where the policy itself has sampled
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R)
    pad: int
    shares_queries: bool  # the models read a query once for several of its responses

    def split(self, dist: Distributed, rows: Sequence[int], budget: TokenBudget) -> list[MicroRows]:
        """This rank's `rows` as micro-batches, which read a query once for its responses."""
        shares = self.shares_queries
        groups = group_rows(self.queries, self.responses, rows, budget.max_tokens, shares=shares)
        return dist.split(group_sizes(self.queries, self.responses, groups), groups, budget)

    def to(self, device: torch.device) -> Rollout:
        """The same, with the numbers of tokens on a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in MicroBatch._fields})

    def batch(self, groups: Sequence[Sequence[int]], device: torch.device = CPU) -> Batch:
        """The token ids of these groups of rows, padded."""
        return collate_groups(self.queries, self.responses, groups, self.pad, device)

    def read(
        self,
        dist: Distributed,
        rows: Sequence[int],
        budget: TokenBudget,
        compute: Callable[[Batch], Sequence[Tensor]],
        into: Sequence[Tensor],
    ) -> None:
        """Put what `compute` gives for this rank's `rows`, (b, r) each, into their rows of (B, R) tensors."""
        for attempt in dist.attempts(budget):
            with attempt:
                for micro in self.split(dist, rows, budget):
                    with dist.autocast():
                        parts = compute(self.batch(micro.groups, dist.device))
                    if micro.scale:  # else it is a pass that other ranks need
                        for whole, part in zip(into, parts, strict=True):
                            whole[micro.rows, : part.shape[1]] = part.float().cpu()

    def select(self, rows: Tensor, width: int) -> MicroBatch:
        """What the losses read of these rows, (b, width) each; `width` is the longest of their responses."""
        return MicroBatch(*(getattr(self, name)[rows, :width] for name in MicroBatch._fields))


@dataclass(frozen=True)
class Reference:
    """The model from which the KL of the policy is measured: a copy, or the policy without its adapters."""

    model: PreTrainedModel
    """With LoRA the policy itself: its adapters are switched off here, so that no second copy is needed."""
    moves: bool = False
    """Whether its weights change (`ppo.reference_sync`), so that a snapshot must hold them."""

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """(B, R) log-probs of the response tokens."""
        with disable_adapters(self.model):
            return response_logprobs(self.model, batch, temperature)


def raise_on_all_ranks(dist: Distributed, compute: Callable[[], T], batch: Mapping[str, Any]) -> T:
    """The result of `compute`; if it fails so on one rank, it fails on all of them.

    Raises:
        NonFiniteError, UserError: on all ranks; `batch` is what the result was to be computed from.
    """
    result: T | None = None
    fault: UserError | None = None
    try:
        result = compute()
    except UserError as error:  # a NonFiniteError is one
        if dist.shards and not isinstance(error, NonFiniteError):
            raise  # the others may wait for this rank's weights: the launch ends them
        fault = error
    own = None if fault is None else (str(fault), isinstance(fault, NonFiniteError))
    found = [one for one in dist.all_gather_object(own) if one is not None]
    if not found:
        return cast(T, result)
    message, is_nan = own or found[0]
    raise (NonFiniteError(message, dict(batch)) if is_nan else UserError(message)) from fault


def interleave(parts: Sequence[Any]) -> Any:
    """The inverse of `Distributed.shard_rows`: rows by rank → all rows; tensors, lists or dicts of them."""
    first, count = parts[0], len(parts)
    if isinstance(first, dict):
        return {key: interleave([part[key] for part in parts]) for key in first}
    num_rows = sum(map(len, parts))
    whole: Any = (
        first.new_empty((num_rows, *first.shape[1:])) if isinstance(first, Tensor) else [None] * num_rows
    )
    for rank, part in enumerate(parts):
        whole[rank::count] = part
    return whole


def pad_rows(rows: Sequence[Tensor], width: int) -> Tensor:
    """Tensors of different lengths as (B, width), zero on padding."""
    padded = pad_sequence(list(rows), batch_first=True)
    return F.pad(padded, (0, width - padded.shape[1]))

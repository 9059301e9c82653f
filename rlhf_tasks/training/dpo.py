"""What stage dpo trains: a policy on responses that are known to be better or worse, without sampling.

With r(y) = log π(y|x) − log π_ref(y|x), a sum over the tokens of a response, and lead = r(chosen) −
r(rejected) the loss of a pair is

    sigmoid  −(1 − ε) log σ(β · lead) − ε log σ(−β · lead)      arXiv 2305.18290, eq. 7; ε > 0 is cDPO
    ipo      (lead − 1 / (2β))², with means over tokens in r    arXiv 2310.12036, eq. 17
    nll      −log π(chosen|x), a mean over its tokens

and that of a response in `kto`, arXiv 2402.01306, eq. 8,

    λ_D (1 − σ(β (r − z))) for a good one, λ_U (1 − σ(β (z − r))) for a bad one

where z ≥ 0 is the mean of r over responses to other prompts, an estimate of the KL, without a gradient.

B pairs · b rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf_tasks.config import Dpo
from rlhf_tasks.data.batches import Batch, collate_groups, sizes
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.passes import TokenBudget, read_rows
from rlhf_tasks.project.imports import call, load_function
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.tasks import Pairs, Sums, Task


@dataclass(frozen=True)
class PairLogProbs:
    """The log-probs of the responses of some pairs, (b,) each, and their lengths in tokens."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def lead(self) -> Tensor:
        """(b,): how much more than the reference the policy prefers the chosen response, in nats."""
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)


PairLoss = Callable[[PairLogProbs, Dpo], Tensor]
"""(b,): the loss of each pair."""


def sigmoid(pairs: PairLogProbs, settings: Dpo) -> Tensor:
    logits, wrong = settings.beta * pairs.lead, settings.label_smoothing
    return -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)


def ipo(pairs: PairLogProbs, settings: Dpo) -> Tensor:
    chosen = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_length
    rejected = (pairs.rejected - pairs.ref_rejected) / pairs.rejected_length
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def nll(pairs: PairLogProbs, settings: Dpo) -> Tensor:
    return -pairs.chosen / pairs.chosen_length


PAIR_LOSSES: dict[str, PairLoss] = {"sigmoid": sigmoid, "ipo": ipo, "nll": nll}


def pair_loss_of(name: str, root: Path) -> PairLoss:
    """The built-in loss, or the function of `PairLogProbs` and section `dpo` that `dpo.loss` names.

    Raises:
        UserError: if it cannot be imported; when it is called, if it raises, or does not return (b,) numbers
            that depend on the policy.
    """
    if name in PAIR_LOSSES:
        return PAIR_LOSSES[name]
    function, key = load_function(name, "dpo.loss", root), f"dpo.loss: {name}"

    def call_user_loss(pairs: PairLogProbs, settings: Dpo) -> Tensor:
        loss: Any = call(key, function, pairs, settings)
        if not isinstance(loss, Tensor) or loss.shape != pairs.chosen.shape:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"{key} returned {shape}; it must return one loss for each pair, (b,)")
        if pairs.chosen.requires_grad and not loss.requires_grad:
            raise UserError(f"{key}: the losses do not depend on the log-probs: nothing would be learned")
        return loss

    return call_user_loss


@dataclass
class PolicyPairs(Pairs):
    """A policy in training on chosen and rejected responses, as token ids."""

    queries: Sequence[Ids]
    chosen: Sequence[Ids]
    rejected: Sequence[Ids]
    reference: Tensor  # (B, 2): log-probs of both responses by the SFT model
    pad: int
    settings: Dpo
    loss: PairLoss
    shares_prefix: bool = False
    sets: list[str] = field(default_factory=list)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        queries, chosen, rejected = (
            [texts[i] for i in rows] for texts in (self.queries, self.chosen, self.rejected)
        )
        count = len(rows)
        pairs = [[i, count + i] for i in range(count)]
        groups = pairs if self.shares_prefix else [[row] for pair in pairs for row in pair]
        batch = collate_groups(queries * 2, chosen + rejected, groups, self.pad, device)
        logprobs = response_logprobs(model, batch).sum(1)  # (2b,), the two of a pair one after the other
        lengths = batch.response_mask.sum(1)
        reference = self.reference[list(rows)].to(device)
        ref_chosen, ref_rejected = reference.float().unbind(1)
        known = PairLogProbs(
            logprobs[::2], logprobs[1::2], ref_chosen, ref_rejected, lengths[::2], lengths[1::2]
        )
        lead = known.lead.detach()
        return {
            "loss": self.loss(known, self.settings).sum(),
            "accuracy": ((lead > 0).float() + 0.5 * (lead == 0).float()).sum(),
            "margin": self.settings.beta * lead.sum(),
            "chosen_logprob": known.chosen.sum(),
            "rejected_logprob": known.rejected.sum(),
        }


@dataclass
class LabeledResponses(Task):
    """A policy in training on single responses, good and bad ones, by KTO's loss."""

    queries: Sequence[Ids]
    responses: Sequence[Ids]
    others: Sequence[Ids]  # `responses_to_others`, from which z is estimated
    is_good: Tensor  # (N,) bool
    reference: Tensor  # (N, 2): log-probs by the SFT model of the response, and of the other one
    pad: int
    settings: Dpo
    sets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = sizes(self.queries, self.responses)
        self._other_sizes = sizes(self.queries, self.others)
        self._kl = 0.0

    def prepare(self, dist: Distributed, model: nn.Module, rows: Sequence[int], budget: TokenBudget) -> None:
        """z of all these rows, so that no cut into micro-batches changes it."""
        local = dist.shard_rows(rows)
        known = read_logprobs(
            dist,
            model,
            [self.queries[i] for i in local],
            [self.others[i] for i in local],
            self.pad,
            budget,
        )
        total = dist.sum((known - self.reference[list(local), 1]).sum().to(dist.device))
        self._kl = max(0.0, float(total) / len(rows))

    def num_prepared(self, rows: Sequence[int]) -> int:
        return sum(self._other_sizes[i] for i in rows)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        groups = [[i] for i in range(len(rows))]
        queries, responses = [self.queries[i] for i in rows], [self.responses[i] for i in rows]
        batch = collate_groups(queries, responses, groups, self.pad, device)
        logprobs = response_logprobs(model, batch).sum(1)  # (b,)
        ratio = logprobs - self.reference[list(rows), 0].float().to(device)  # (b,)
        is_good, settings = self.is_good[list(rows)].to(device), self.settings
        away = settings.beta * torch.where(is_good, ratio - self._kl, self._kl - ratio)
        weight = torch.where(is_good, settings.desirable_weight, settings.undesirable_weight)
        right = (ratio.detach() > 0) == is_good
        return {
            "loss": (weight * (1 - away.sigmoid())).sum(),
            "accuracy": right.float().sum(),
            "margin": settings.beta * torch.where(is_good, ratio, -ratio).detach().sum(),
            "kl_estimate": torch.full_like(ratio.detach(), self._kl).sum(),
        }


def responses_to_others(queries: Sequence[Ids], responses: Sequence[Ids]) -> Ragged:
    """For each row the response of the next one with another prompt; of one prompt alone, any of its."""
    count = len(queries)
    others = list(range(count))
    for i in reversed(range(2 * count - 1)):  # twice around, since the first row follows the last
        row, following = i % count, (i + 1) % count
        others[row] = following if queries[row] != queries[following] else others[following]
    return Ragged(responses[other] for other in others)


def read_logprobs(
    dist: Distributed,
    model: nn.Module,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    pad: int,
    budget: TokenBudget,
    groups: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """(N,) float64 on the CPU: Σ over the tokens of a response of their log-probs, of this rank's rows.

    Rows of a group share a row of a batch. Collective.
    """

    def compute(batch: Batch) -> Tensor:
        with dist.autocast():
            return response_logprobs(model, batch).sum(1)

    return read_rows(
        compute,
        queries,
        responses,
        groups=groups,
        pad=pad,
        device=dist.device,
        budget=budget,
        run=dist.run_batches,
    )

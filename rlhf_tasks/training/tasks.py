"""What supervised stages train: language modeling, a critic, and the pairs of a reward model, whose loss is

    loss = −log σ(r_chosen − r_rejected − margin)                      Bradley-Terry
         + centering_coef · (r_chosen + r_rejected)²                    arXiv 2312.09244
         + lm_coef · LM loss on the chosen response                    arXiv 2307.04964, eq. 4

B batch · R response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Split
from rlhf_tasks.data.batches import Batch, collate, collate_groups, read_table, sets_of, sizes, token_ids
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.classifiers import replace_trunk
from rlhf_tasks.models.heads import TokenScores, left_aligned
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training.distributed import Distributed

Sums = dict[str, Tensor]
EXPLAINED = "explained_variance"
POSITIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "first": lambda lengths: 0 * lengths,
    "middle": lambda lengths: (lengths - 1) // 2,
    "last": lambda lengths: lengths - 1,
}
"""The tokens of responses of these lengths at which a critic is measured."""


class Task(Protocol):
    """What is trained: the tokens of each row, and the sums of one forward pass over some rows."""

    sizes: list[int]
    """The tokens of each row."""
    sets: list[str]
    """The name of each row's set in a mixture; empty otherwise."""

    def num_targets(self, rows: Sequence[int]) -> float:
        """The number of tokens or pairs that the loss of these rows is averaged over."""
        return len(rows)

    def num_tokens(self, rows: Sequence[int]) -> int:
        """The tokens that a pass over these rows reads, without padding."""
        return sum(self.sizes[i] for i in rows)

    def prepare(self, dist: Distributed, model: nn.Module, rows: Sequence[int], budget: TokenBudget) -> None:
        """Compute what the loss needs of all these rows together, before their passes. Collective."""
        return

    def num_prepared(self, rows: Sequence[int]) -> int:
        """The tokens that `prepare` reads, without gradients."""
        return 0

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        """`loss` and other metrics, **summed** over the tokens or pairs that `num_targets` counts."""


@dataclass
class LanguageModeling(Task):
    """Predicts the response tokens of (query, response) rows, EOS included."""

    queries: Sequence[Ids]
    responses: Sequence[Ids]
    pad: int
    sets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = sizes(self.queries, self.responses)

    def num_targets(self, rows: Sequence[int]) -> float:
        return sum(len(self.responses[i]) for i in rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows, padded."""
        return collate([self.queries[i] for i in rows], [self.responses[i] for i in rows], self.pad)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        stats = token_stats(model, self.batch(rows).to(device))  # (b, R) each, zero on padding
        return {"loss": -stats.logprobs.sum(), "token_accuracy": stats.is_top.sum()}


def demonstrations(paths: Paths, tokenizer: PreTrainedTokenizerBase, split: Split) -> LanguageModeling:
    """The demonstrations of data/sft."""
    rows = read_table(paths, "sft", split)
    queries, responses = token_ids(tokenizer, rows, "completion")
    return LanguageModeling(queries, responses, tokenizer.pad_token_id, sets_of(rows))


def plain_text(texts: Sequence[Ids], pad: int, sets: Sequence[str] = ()) -> LanguageModeling:
    """Text without a query: the first token is given, all others are predicted; of one token, none is."""
    kept = [i for i, ids in enumerate(texts) if len(ids) > 1]
    firsts, others = Ragged(texts[i][:1] for i in kept), Ragged(texts[i][1:] for i in kept)
    return LanguageModeling(firsts, others, pad, [sets[i] for i in kept] if sets else [])


@dataclass
class ValueTargets(Task):
    """Regresses a critic on the return of every state of (query, response) rows: a `Task`.

    The return of the state before token t of a response of l tokens is γ^(l − 1 − t) · outcome. What is
    explained of it is 1 − squared error / variance, so that a wrong mean counts too.
    """

    queries: Sequence[Ids]
    responses: Sequence[Ids]
    outcomes: Tensor  # (N,)
    gamma: float
    pad: int
    by_position: bool = False
    """Whether the first, the middle and the last token of a response are measured too."""
    sets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = sizes(self.queries, self.responses)
        self._lengths = torch.tensor([len(response) for response in self.responses])
        outcomes = self.outcomes.double()
        targets = [outcomes[i] * self._discounts(l, l) for i, l in enumerate(self._lengths.tolist())]
        self.variance = float(torch.cat(targets).var(correction=0))
        picked = {name: at(self._lengths) for name, at in POSITIONS.items()}
        self._variances = {
            name: float(
                torch.stack([x[t] for x, t in zip(targets, at.tolist(), strict=True)]).var(correction=0)
            )
            for name, at in picked.items()
        }

    def _discounts(self, length: int, width: int) -> Tensor:
        """(width,): γ^(length − 1 − t), 0 after the end."""
        steps = length - 1 - torch.arange(width)
        return torch.where(steps >= 0, self.gamma ** steps.clamp_min(0).double(), 0.0)

    def num_targets(self, rows: Sequence[int]) -> float:
        return sum(len(self.responses[i]) for i in rows)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        batch = collate([self.queries[i] for i in rows], [self.responses[i] for i in rows], self.pad).to(
            device
        )
        values = left_aligned(model(batch), batch)[:, :-1]  # (b, R)
        lengths, width = self._lengths[list(rows)], values.shape[1]
        discounts = torch.stack([self._discounts(length, width) for length in lengths.tolist()])
        mask = (torch.arange(width) < lengths[:, None]).to(device)
        targets = (self.outcomes[list(rows), None] * discounts).float().to(device)
        squares = torch.where(mask, (values - targets) ** 2, 0)
        sums = {
            "loss": 0.5 * squares.sum(),
            EXPLAINED: (mask.float() - squares.detach() / self.variance).sum(),
        }
        for name, at in POSITIONS.items() if self.by_position else ():
            error = squares.detach().gather(1, at(lengths)[:, None].to(device))
            share = self.num_targets(range(len(self.sizes))) / len(self.sizes)  # a mean over rows, not tokens
            variance = self._variances[name]  # 0 where a low γ leaves nothing of the outcome
            sums[f"{EXPLAINED}/{name}"] = share * (1 - error / variance if variance else 0 * error).sum()
        return sums


class Pairs(Task):
    """Chosen and rejected responses of each query, as token ids."""

    queries: Sequence[Ids]
    chosen: Sequence[Ids]
    rejected: Sequence[Ids]
    shares_prefix: bool
    """Whether the two responses share a row, and the model reads the query once."""

    def __post_init__(self) -> None:
        self.sizes = pair_sizes(self.queries, self.chosen, self.rejected, shares_prefix=self.shares_prefix)

    def num_tokens(self, rows: Sequence[int]) -> int:
        times = 1 if self.shares_prefix else 2
        return sum(times * len(self.queries[i]) + len(self.chosen[i]) + len(self.rejected[i]) for i in rows)


@dataclass
class PreferencePairs(Pairs):
    """The pairs of a reward model."""

    queries: Sequence[Ids]
    chosen: Sequence[Ids]
    rejected: Sequence[Ids]
    pad: int
    margin: float = 0.0
    centering_coef: float = 0.0
    lm_coef: float = 0.0
    shares_prefix: bool = False
    sets: list[str] = field(default_factory=list)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        queries, chosen, rejected = (
            [texts[i] for i in rows] for texts in (self.queries, self.chosen, self.rejected)
        )
        count, shares = len(rows), self.shares_prefix
        groups = [[i, count + i] for i in range(count)] if shares else [[i] for i in range(2 * count)]
        batch = collate_groups(queries * 2, chosen + rejected, groups, self.pad, device)
        scores, of_lm = model(batch, count if self.lm_coef else 0)
        of_chosen, of_rejected = (scores[::2], scores[1::2]) if shares else scores.chunk(2)
        sums = pair_sums(of_chosen, of_rejected, self.margin, self.centering_coef)
        if of_lm is not None:
            sums["loss"] = sums["loss"] + self.lm_coef * of_lm
        return sums


def pair_sizes(
    queries: Sequence[Ids], chosen: Sequence[Ids], rejected: Sequence[Ids], *, shares_prefix: bool
) -> list[int]:
    """The tokens of each pair: of one row that the two responses share, or of two padded rows."""
    with_chosen, with_rejected = sizes(queries, chosen), sizes(queries, rejected)
    if shares_prefix:
        return [a + len(r) for a, r in zip(with_chosen, rejected, strict=True)]
    return [2 * max(pair) for pair in zip(with_chosen, with_rejected, strict=True)]


def pair_sums(chosen: Tensor, rejected: Tensor, margin: float, centering_coef: float) -> Sums:
    """Σ over pairs of loss, correct orders (equal scores count half) and score differences; scores (B,)."""
    lead = chosen - rejected
    loss = -F.logsigmoid(lead - margin) + centering_coef * (chosen + rejected) ** 2
    right = (lead > 0).float() + 0.5 * (lead == 0).float()
    return {"loss": loss.sum(), "accuracy": right.sum(), "margin": lead.sum()}


class RewardLearner(nn.Module):
    """The reward model in training; with `lm_coef`, a causal LM on the same trunk beside it."""

    def __init__(self, scores: TokenScores, policy: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.scores, self.lm = scores, policy
        if policy is not None:
            replace_trunk(policy, scores.model.base_model)

    def forward(self, batch: Batch, lm_rows: int = 0) -> tuple[Tensor, Tensor | None]:
        """((B,) scores of the responses, the LM loss of the first rows or None).

        That loss is Σ over rows of the mean −log p.
        """
        scores = self.scores(batch, ends_only=True)
        if self.lm is None or not lm_rows:
            return scores, None
        responses = Batch(**{name: x[:lm_rows] for name, x in vars(batch).items()})
        logprobs = token_stats(self.lm, responses).logprobs  # (B, R), zero on padding
        return scores, -(logprobs.sum(1) / responses.mask.sum(1)).sum()

"""What is measured of a policy's responses to fixed prompts, in stages dpo and ppo: KL and held-out score.

Each rank computes its share, and all of them get the whole. B responses · R response length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import DpoView, Ppo
from rlhf_tasks.config.ppo import Truncation
from rlhf_tasks.data.batches import Batch
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.passes import TokenBudget, read_rows
from rlhf_tasks.models.stop_tokens import StopTokens, close_responses, has_ended
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.kl import k1
from rlhf_tasks.ppo.rewards import truncated_scores
from rlhf_tasks.ppo.rollout import Prompts, Reference, interleave, raise_on_all_ranks
from rlhf_tasks.scoring.protocol import Responses, Scorer
from rlhf_tasks.training.distributed import Distributed

T = TypeVar("T")


@dataclass(kw_only=True)
class ResponseMeasures:
    """KL and held-out score of a policy's responses to `prompts`, or to some of them."""

    dist: Distributed
    config: Ppo | DpoView
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ends: StopTokens
    prompts: Prompts
    heldout: Scorer | None
    """models/reward_heldout."""

    def kl(self, reference: Reference, responses: Sequence[Ids], budget: TokenBudget) -> Tensor:
        """(B,) float64: Σ_t log π − log π_ref of a response to each prompt, in nats.

        Raises:
            NonFiniteError: on all ranks, if a KL is NaN or infinite.
        """
        dist, temperature = self.dist, self.config.temperature

        def kl_of(batch: Batch) -> Tensor:
            with dist.autocast():
                logprobs = response_logprobs(self.policy, batch, temperature).float()
                ref_logprobs = reference.logprobs(batch, temperature).float()
            return k1(logprobs, ref_logprobs).double().sum(1)  # both are zero on padding

        local = read_rows(
            kl_of,
            dist.shard_rows(self.prompts.queries),
            dist.shard_rows(responses),
            pad=self.tokenizer.pad_token_id,
            device=dist.device,
            budget=budget,
            run=dist.run_batches,
        )
        kl: Tensor = interleave(dist.all_gather_object(local))
        message = "the KL to the reference is NaN or infinite at the selection prompts"
        return _finite(kl, message, self.prompts, responses)

    def heldout_scores(self, prompts: Prompts, responses: Sequence[Ids]) -> Tensor | None:
        """(B,) by models/reward_heldout, `under_eos_rule`; None without it.

        Raises:
            NonFiniteError: on all ranks, if a score is NaN or infinite.
        """
        if self.heldout is None:
            return None
        scores = score_on_all_ranks(self.dist, self.heldout, prompts, responses, self.tokenizer, self.ends)
        scores = _finite(scores, "models/reward_heldout gave NaN or infinity", prompts, responses)
        return self.under_eos_rule(scores, responses)

    def under_eos_rule(self, scores: Tensor, responses: Sequence[Ids]) -> Tensor:
        """(B,) the scores under the rule for responses that did not end.

        With `score_scaling` they stay as they are: the rule's score is then in standard deviations.
        """
        if self.config.score_scaling is not None:
            return scores
        return score_ends(scores, responses, self.ends, self.config.truncation)


def score_ends(scores: Tensor, responses: Sequence[Ids], ends: StopTokens, rule: Truncation) -> Tensor:
    """(B,) the scores under the rule for responses that did not end, where no critic can value these."""
    if rule.kind.startswith("bootstrap"):
        return scores
    return truncated_scores(scores, torch.tensor([has_ended(ids, ends) for ids in responses]), rule)


def _finite(numbers: Tensor, message: str, prompts: Prompts, responses: Sequence[Ids]) -> Tensor:
    if not bool(numbers.isfinite().all()):
        raise NonFiniteError(message, {"prompts": list(prompts.texts), "responses": responses})
    return numbers


@torch.no_grad()
def score_on_all_ranks(
    dist: Distributed,
    score: Callable[[Responses], T],
    prompts: Prompts,
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    ends: StopTokens,
) -> T:
    """What `score` gives for all rows: a tensor, or a dict of them, (B,) each. Each rank scores a share.

    Raises:
        NonFiniteError, UserError: on all ranks, if it raises one on any; this rank's responses are its
            `batch`.
    """
    prompts, responses = prompts.take(dist.shard_rows(range(len(prompts)))), dist.shard_rows(responses)
    closed = close_responses(tokenizer, responses, ends)
    rows = Responses.of_ids(prompts.texts, prompts.queries, closed, tokenizer, prompts.columns)
    batch = {"prompts": prompts.texts, "responses": responses}
    local = raise_on_all_ranks(dist, lambda: score(rows), batch)
    whole: T = interleave(dist.all_gather_object(local))
    return whole

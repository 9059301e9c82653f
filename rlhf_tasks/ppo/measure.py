"""What is measured of a policy's responses to fixed prompts, in stages dpo and ppo: KL and held-out score.

B responses · R response length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def score_ends(
    scores: Tensor, responses: Sequence[Ids], ends: StopTokens, rule: Truncation, *, is_raw: bool = False
) -> Tensor:
    """(B,) the scores under the rule for responses that did not end.

    With `is_raw` they are not scaled as in training, where the rule's score is in standard deviations.
    """
    if is_raw or rule.kind.startswith("bootstrap"):  # no critic is here to value an unfinished response
        return scores
    ended = torch.tensor([has_ended(response, ends) for response in responses])
    return truncated_scores(scores, ended, rule)


def measure_kl(
    dist: Distributed,
    policy: PreTrainedModel,
    reference: Reference,
    prompts: Prompts,
    responses: Sequence[Ids],
    *,
    temperature: float,
    pad: int,
    budget: TokenBudget,
) -> Tensor:
    """(B,) float64: Σ_t log π − log π_ref of each response, in nats; each rank measures its share.

    Raises:
        NonFiniteError: on all ranks, if a KL is NaN or infinite.
    """

    def kl_of(batch: Batch) -> Tensor:
        with dist.autocast():
            logprobs = response_logprobs(policy, batch, temperature).float()
            ref_logprobs = reference.logprobs(batch, temperature).float()
        return k1(logprobs, ref_logprobs).double().sum(1)  # both are zero on padding

    local = read_rows(
        kl_of,
        dist.shard_rows(prompts.queries),
        dist.shard_rows(responses),
        pad=pad,
        device=dist.device,
        budget=budget,
        run=dist.run_batches,
    )
    kl: Tensor = interleave(dist.all_gather_object(local))
    if not bool(kl.isfinite().all()):
        raise NonFiniteError(
            "the KL to the reference is NaN or infinite at the selection prompts",
            {"prompts": list(prompts.texts), "responses": responses},
        )
    return kl


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
    rows = prompts.responses(close_responses(tokenizer, responses, ends), tokenizer)
    batch = {"prompts": prompts.texts, "responses": responses}
    local = raise_on_all_ranks(dist, lambda: score(rows), batch)
    whole: T = interleave(dist.all_gather_object(local))
    return whole


def score_heldout(
    dist: Distributed,
    heldout: Scorer,
    prompts: Prompts,
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    ends: StopTokens,
) -> Tensor:
    """(B,) by models/reward_heldout; each rank scores a share.

    Raises:
        NonFiniteError: on all ranks, if a score is NaN or infinite; the responses are its `batch`.
    """
    scores = score_on_all_ranks(dist, heldout, prompts, responses, tokenizer, ends)
    if not bool(scores.isfinite().all()):
        batch = {"prompts": list(prompts.texts), "responses": responses}
        raise NonFiniteError("models/reward_heldout gave NaN or infinity", batch)
    return scores

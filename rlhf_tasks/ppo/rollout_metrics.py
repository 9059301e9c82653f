"""What is measured of a rollout: reward, KL, entropy, and whether responses end, repeat or grow.

Each sum runs over the real response tokens, or the responses, of all processes: `reduce` adds them up.
B batch · R response.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_tasks.modeling.tensors import Reduce, distinct, masked_moments, masked_sum
from rlhf_tasks.ppo.advantages import group_deviations
from rlhf_tasks.ppo.kl import k1, k3
from rlhf_tasks.ppo.rollout import Rollout

Metrics = dict[str, float]
LARGEST_NATS = math.log(sys.float_info.max)


def objective_metrics(
    rollout: Rollout, scores: Tensor, kl: Tensor, *, kl_coef: float, reward_kl_coef: float, reduce: Reduce
) -> Metrics:
    """Metrics `objective/…`, means over the responses.

    `scores` (B,) are under the EOS rule; `kl` (B, R) is by the chosen estimator. `kl_coef` is the current
    coefficient, `reward_kl_coef` the one in the reward: 0 where the KL is in the loss.
    """
    mask = rollout.mask
    kl_k1 = torch.where(mask, k1(rollout.logprobs, rollout.ref_logprobs), 0).sum(1)
    sums = {
        "count": torch.tensor(float(len(scores))),
        "tokens": mask.sum(),
        "kl": masked_sum(kl, mask),
        "k1": kl_k1.sum(),
        "k1_squared": (kl_k1**2).sum(),
        "nll": -masked_sum(rollout.logprobs, mask),
        "ref_nll": -masked_sum(rollout.ref_logprobs, mask),
        "scores": scores.sum(),
        "raw": rollout.scores.sum(),
        **{f"part/{name}": part.sum() for name, part in rollout.parts.items()},
    }
    total = _reduced(sums, reduce)
    count, tokens, mean_kl = total["count"], total["tokens"], total["kl"] / total["count"]
    mean_k1 = total["k1"] / count
    metrics = {
        "objective/kl": mean_kl,
        "objective/kl_k1": mean_k1,
        "objective/kl_k1_standard_error": standard_error(mean_k1, total["k1_squared"], count),
        "objective/kl_coef": kl_coef,
        "objective/entropy": total["nll"] / count,
        "objective/perplexity": perplexity(total["nll"] / tokens),
        "objective/ref_perplexity": perplexity(total["ref_nll"] / tokens),
        "objective/non_score_reward": -reward_kl_coef * mean_kl,
        "objective/scores": total["scores"] / count,
        "objective/raw_scores": total["raw"] / count,
    }
    metrics["objective/rlhf_reward"] = metrics["objective/scores"] + metrics["objective/non_score_reward"]
    if len(rollout.parts) > 1:
        metrics |= {f"objective/scores/{name}": total[f"part/{name}"] / count for name in rollout.parts}
    return metrics


def response_metrics(rollout: Rollout, reduce: Reduce) -> Metrics:
    """Metrics `val/…` of the responses: how many end, how long they are, how much they repeat."""
    sums = {
        "count": torch.tensor(float(len(rollout.responses))),
        "tokens": rollout.mask.sum(),
        "ended": rollout.ended.sum(),
        **{f"distinct_{n}": distinct(rollout.responses, n).sum() for n in (1, 2, 3)},
    }
    total = _reduced(sums, reduce)
    count = total["count"]
    return {
        "val/num_eos_tokens": total["ended"],
        "val/truncated_share": 1 - total["ended"] / count,
        "val/response_length": total["tokens"] / count,
        "val/distinct_1": total["distinct_1"] / count,
        "val/distinct_2": total["distinct_2"] / count,
        "val/repetition": 1 - total["distinct_3"] / count,
    }


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor, reduce: Reduce) -> float:
    """1 − Var(returns − values) / Var(returns) over tokens, of (B, R); 0 where all returns are equal."""
    rest = masked_moments(returns - values, mask, reduce)[1]
    whole = masked_moments(returns, mask, reduce)[1]
    return 1 - float(rest / whole) if whole > 0 else 0.0


def group_metrics(returns: Tensor, num_samples: int, reduce: Reduce) -> Metrics:
    """`val/group_deviation` of returns (B,): the mean over prompts of their responses' standard deviation."""
    deviations = group_deviations(returns, num_samples)
    sums = {"total": deviations.sum(), "count": torch.tensor(float(len(deviations)))}
    total = _reduced(sums, reduce)
    return {"val/group_deviation": total["total"] / total["count"]}


def perplexity(nats: float) -> float:
    """exp of the mean −log p of a token; infinite above some 700 nats, where no float holds it."""
    return math.exp(nats) if nats < LARGEST_NATS else math.inf


def standard_error(mean: float, squares: float, count: float) -> float:
    """The standard error of a mean of `count` numbers with that sum of squares; |mean| for a single one."""
    return abs(mean) if count == 1 else (max(0.0, squares / count - mean**2) / count) ** 0.5


def _reduced(sums: dict[str, Tensor], reduce: Reduce) -> Metrics:
    values = reduce(torch.stack([value.float() for value in sums.values()])).tolist()
    return dict(zip(sums, values, strict=True))


def engine_metrics(
    rollout: Rollout,
    engine_logprobs: Tensor,
    cap: float | None,
    reduce: Reduce,
    largest: Callable[[float], float],
) -> Metrics:
    """Metrics `engine/…` of (B, R) log-probs by an engine beside the policy's own.

    `largest` gives the largest number of all processes. The KL is that of the engine's distribution from the
    policy's, by k3, in nats per token.
    """
    mask = rollout.mask
    log_ratio = (rollout.logprobs - engine_logprobs)[mask]
    sums = {
        "tokens": mask.sum(),
        "engine/logprob_diff": log_ratio.abs().sum(),
        "engine/kl": k3(engine_logprobs[mask], rollout.logprobs[mask]).sum(),
    }
    if cap is not None:
        sums["engine/capped_share"] = (log_ratio > math.log(cap)).sum()
    total = _reduced(sums, reduce)
    count = total.pop("tokens")
    means = {name: value / count for name, value in total.items()}
    return means | {"engine/logprob_diff_max": largest(float(log_ratio.abs().max()))}

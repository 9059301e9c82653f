"""What is measured of a rollout and of the losses: means over real response tokens, or over responses.

They are of all ranks: every rank holds the whole rollout, but only its own part of the losses.
B responses · R response length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_tasks.models.tensors import Reduce, distinct, masked_moments, masked_sum
from rlhf_tasks.ppo.kl import k1, k3

if TYPE_CHECKING:
    from rlhf_tasks.ppo.rollout import Rollout

Metrics = dict[str, float]
REAL, OFF_SQUARED = "real_tokens", "ratio_off_squared"
LARGEST_NATS = 700.0  # whose exponential a float still holds


def objective_metrics(
    rollout: Rollout, scores: Tensor, kl: Tensor, *, kl_coef: float, reward_kl_coef: float
) -> Metrics:
    """Metrics `objective/…`, means over the responses.

    `scores` (B,) are under the EOS rule; `kl` (B, R) is by the chosen estimator. `kl_coef` is the current
    coefficient, `reward_kl_coef` the one in the reward: 0 where the KL is in the loss.
    """
    mask, count, num_tokens = rollout.mask, len(scores), int(rollout.mask.sum())
    kl_k1 = torch.where(mask, k1(rollout.logprobs, rollout.ref_logprobs), 0).sum(1)
    mean_kl, mean_k1 = float(masked_sum(kl, mask)) / count, float(kl_k1.sum()) / count
    nll, ref_nll = (-float(masked_sum(x, mask)) for x in (rollout.logprobs, rollout.ref_logprobs))
    metrics = {
        "objective/kl": mean_kl,
        "objective/kl_k1": mean_k1,
        "objective/kl_k1_standard_error": standard_error(mean_k1, float((kl_k1**2).sum()), count),
        "objective/kl_coef": kl_coef,
        "objective/entropy": nll / count,
        "objective/perplexity": math.exp(min(nll / num_tokens, LARGEST_NATS)),
        "objective/ref_perplexity": math.exp(min(ref_nll / num_tokens, LARGEST_NATS)),
        "objective/non_score_reward": -reward_kl_coef * mean_kl,
        "objective/scores": float(scores.sum()) / count,
        "objective/raw_scores": float(rollout.scores.sum()) / count,
    }
    metrics["objective/rlhf_reward"] = metrics["objective/scores"] + metrics["objective/non_score_reward"]
    if len(rollout.parts) > 1:
        metrics |= {f"objective/scores/{name}": float(x.sum()) / count for name, x in rollout.parts.items()}
    return metrics


def response_metrics(rollout: Rollout) -> Metrics:
    """Metrics `val/…` of the responses: how many end, how long they are, how much they repeat."""
    count, ended = len(rollout.responses), float(rollout.ended.sum())
    distinct_1, distinct_2, distinct_3 = (
        float(distinct(rollout.responses, n).sum()) / count for n in (1, 2, 3)
    )
    return {
        "val/num_eos_tokens": ended,
        "val/truncated_share": 1 - ended / count,
        "val/response_length": int(rollout.mask.sum()) / count,
        "val/distinct_1": distinct_1,
        "val/distinct_2": distinct_2,
        "val/repetition": 1 - distinct_3,
    }


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns) over tokens, of (B, R); 0 where all returns are equal."""
    rest, whole = masked_moments(returns - values, mask)[1], masked_moments(returns, mask)[1]
    return 1 - float(rest / whole) if whole > 0 else 0.0


def prompt_share(returns: Tensor, num_samples: int) -> tuple[float, float, float]:
    """The share of the variance of (B,) returns that lies between prompts, and its 95% interval.

    A critic that knew the prompt alone would explain as much before the first token. The mean squares of a
    one-way analysis of variance correct for the k samples of each prompt; the interval is that of F (Searle
    1971, 9.3: exact for normal returns). Rows i, i + B / k, … are one prompt's; 0 where all are equal.
    """
    from scipy.stats import f

    rows = returns.double().view(num_samples, -1)  # (k, B / k)
    num_prompts = rows.shape[1]
    within, between = float(rows.var(0).mean()), num_samples * float(rows.mean(0).var())
    if num_prompts < 2 or not (between or within):
        return 0.0, 0.0, 1.0
    if not within:
        return 1.0, 1.0, 1.0
    degrees = (num_prompts - 1, num_prompts * (num_samples - 1))
    ratios = [between / within / divisor for divisor in (1.0, *f.ppf((0.975, 0.025), *degrees).tolist())]
    share, low, high = (max(0.0, (ratio - 1) / (ratio + num_samples - 1)) for ratio in ratios)
    return share, low, high


def moments(values: Tensor) -> list[float]:
    """Mean and standard deviation of (B,) numbers, the deviation with the divisor B."""
    values = values.double()
    return [float(values.mean()), float(values.std(correction=0))]


def standardized_gaps(
    scores: Tensor, heldout: Tensor, start: Sequence[float], heldout_start: Sequence[float]
) -> Tensor | None:
    """(B,) how much further the optimized score has risen than the held-out one; None without a unit.

        gap = (score − μ) / σ − (heldout − μ_h) / σ_h

    μ and σ are the `moments` of the initial policy's responses: there the mean gap is 0, whatever the zero
    and the scale of the two scores. Gao et al. 2022, arXiv 2210.10760, section 2, compare proxy and gold
    rewards as a function of the KL, recentered at the initial policy, the gold one in standard deviations.
    """
    (mean, deviation), (heldout_mean, heldout_deviation) = start, heldout_start
    if not deviation or not heldout_deviation:  # all responses had one score
        return None
    return (scores.double() - mean) / deviation - (heldout.double() - heldout_mean) / heldout_deviation


def standard_error(mean: float, squares: float, count: float) -> float:
    """The standard error of a mean of `count` numbers with that sum of squares; |mean| for a single one."""
    return abs(mean) if count == 1 else (max(0.0, squares / count - mean**2) / count) ** 0.5


def sampler_metrics(rollout: Rollout, sampler_logprobs: Tensor, cap: float | None) -> Metrics:
    """Metrics `sampler/…` of (B, R) log-probs by a sampler beside the policy's own.

    The KL is that of the sampler's distribution from the policy's, by k3, in nats per token.
    """
    mask = rollout.mask
    log_ratio = (rollout.logprobs - sampler_logprobs)[mask]
    sums = {
        "sampler/logprob_diff": log_ratio.abs().sum(),
        "sampler/kl": k3(sampler_logprobs[mask], rollout.logprobs[mask]).sum(),
    }
    if cap is not None:
        sums["sampler/capped_share"] = (log_ratio > math.log(cap)).sum()
    means = {name: float(value) / len(log_ratio) for name, value in sums.items()}
    return means | {"sampler/logprob_diff_max": float(log_ratio.abs().max())}


TokenSums = dict[str, Tensor]
"""By metric, (2,) float64 on the device: a sum over tokens and the number of them. So there are means over
micro-batches of different sizes."""


def token_sums(values: Mapping[str, Tensor], mask: Tensor, scale: float = 1.0) -> TokenSums:
    """Of (b, R) numbers at the real tokens of one micro-batch; those elsewhere do not matter."""
    count = scale * mask.sum().double()
    totals = {name: scale * masked_sum(value.detach(), mask).double() for name, value in values.items()}
    return {name: torch.stack([total, count]) for name, total in totals.items()}


def padding_sums(is_real: Tensor, scale: float) -> TokenSums:
    """The tokens of a pass, (b, T), that are not padding, and all of them."""
    real = scale * is_real.sum().double()
    return {REAL: torch.stack([real, torch.full_like(real, scale * is_real.numel())])}


def add_sums(parts: Sequence[TokenSums]) -> TokenSums:
    """The sums of several passes."""
    total: TokenSums = {}
    for part in parts:
        for name, x in part.items():
            total[name] = total[name] + x if name in total else x
    return total


def token_means(parts: Sequence[TokenSums], reduce: Reduce) -> Metrics:
    """The means over the tokens of several passes or minibatches, and of all ranks."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    columns = [torch.stack([part[name] for part in parts if name in part], dim=1) for name in names]
    sums, counts = reduce(torch.stack([x[i].sum() for i in range(2) for x in columns])).view(2, -1).tolist()
    means = {name: total / count for name, total, count in zip(names, sums, counts, strict=True)}
    return means if REAL not in means else means | {"time/padding_share": 1 - means.pop(REAL)}


def ratio_sums(logprobs: Tensor, old_logprobs: Tensor) -> dict[str, Tensor]:
    """What `ratio_metrics` needs of each token, (b, R) each: approximate KL, ratio, distance from 1."""
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.exp()
    return {
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "val/ratio": ratio,
        OFF_SQUARED: (ratio - 1) ** 2,  # Σ ratio² would lose the variance to rounding
    }


def ratio_metrics(means: Metrics, first: Metrics) -> Metrics:
    """The means over an update's tokens with `val/ratio_var`, and how far the first ratio was from 1.

    `first` are the means of the first minibatch: before any step, the policy is still the old one.
    """
    variance = means.pop(OFF_SQUARED) - (means["val/ratio"] - 1) ** 2
    return means | {"val/ratio_var": variance, "val/first_ratio_error": max(first[OFF_SQUARED], 0.0) ** 0.5}

"""KL from SFT and retention of a policy that the pipeline has not measured, measured now for the gate.

B batch · R response.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_tasks import console
from rlhf_tasks.config import Config
from rlhf_tasks.data.batches import collate, load_tokenizer, micro_batches, read_table, sizes
from rlhf_tasks.data.tokenizer import Ids, encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.responses import sample
from rlhf_tasks.judging.results import RetentionResult, TaskChange
from rlhf_tasks.judging.retention import Probes
from rlhf_tasks.models import contracts
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.load import load_causal, place
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.project import inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.gate import Kl


@dataclass(frozen=True)
class Cost:
    """What PPO cost the policy."""

    retention: Mapping[str, RetentionResult]
    """Of `sft` and `policy`."""
    kl: Kl | None
    task_changes: Mapping[str, TaskChange] = field(default_factory=dict)


def measure(settings: Config, paths: Paths, policy: Path) -> Cost:
    """KL from the SFT model of a project, and the retention of both.

    A policy with another tokenizer than SFT's has no KL. Its perplexity per token cannot be compared either:
    of retention only the multiple-choice accuracy, which is computed per character, and the tasks are left.

    Raises:
        UserError: if the data does not exist.
    """
    _check_data(paths, policy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    retention: Mapping[str, RetentionResult] = {}
    changes: Mapping[str, TaskChange] = {}
    if settings.judge.retention is not None:
        probes = Probes(settings.judge.retention, paths)
        retention, changes = probes.measure_all({"sft": paths.sft, "policy": policy}, device)
    try:
        contracts.check_same_tokenizer(paths.sft, policy)
    except ContractError as error:
        console.say(f"neither KL nor perplexity can be compared: {error}")
        kept = {name: one.model_copy(update={"perplexity": {}}) for name, one in retention.items()}
        return Cost(kept, None, changes)
    return Cost(retention, measure_kl(settings, paths, policy, device), changes)


def measure_kl(settings: Config, paths: Paths, policy: Path, device: torch.device) -> Kl:
    """Mean over test prompts of Σ log π/π_SFT of a sampled response: objective/kl_k1 of PPO.

    Responses are sampled as PPO does, at `ppo.temperature`, which both log-probs use.
    """
    rows = read_table(paths, "prompts", "test")[: settings.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
    responses = sample(
        policy, prompts, paths=paths, max_new_tokens=settings.ppo.response_length,
        temperature=settings.ppo.temperature, seed=settings.seed, device=device,
    ).ids  # fmt: skip
    tokenizer = load_tokenizer(paths.sft)
    queries, pad = encode(tokenizer, prompts), tokenizer.pad_token_id
    sums = []
    for folder in (policy, paths.sft):
        model = place(load_causal(folder), device).eval()
        most = inputs.resolved(paths.root, settings).ppo.micro_batch_tokens
        temperature = settings.ppo.temperature
        sums.append(_logprob_sums(model, queries, responses, pad, most, temperature))
    kls = [ours - theirs for ours, theirs in zip(*sums, strict=True)]
    error = statistics.stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else abs(kls[0])
    return Kl(mean=statistics.fmean(kls), standard_error=error)


@torch.no_grad()
def _logprob_sums(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    pad: int,
    max_tokens: int,
    temperature: float,
) -> list[float]:
    """Σ log p of each response's tokens."""
    sums = [0.0] * len(queries)
    device = next(model.parameters()).device
    for rows in micro_batches(sizes(queries, responses), max_tokens):
        batch = collate([queries[i] for i in rows], [responses[i] for i in rows], pad).to(device)
        logprobs = response_logprobs(model, batch, temperature)
        summed = logprobs.double().sum(1).tolist()
        for i, value in zip(rows, summed, strict=True):
            sums[i] = value
    return sums


def _check_data(paths: Paths, policy: Path) -> None:
    needed = [paths.table("prompts", "test"), paths.table("sft", "test")]
    missing = [paths.relative(path) for path in needed if not path.exists()]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is missing, and is needed to measure the KL and retention of {policy}; "
            "run `rlhf prepare`, or `dvc checkout data`"
        )

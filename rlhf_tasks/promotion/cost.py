"""What a policy that the pipeline has not measured went from SFT, and forgot: measured now, for the gate.

B batch · R response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_tasks import console
from rlhf_tasks.config import Config
from rlhf_tasks.data.batches import Ids, collate, encode, load_tokenizer, micro_batches, read_table, sizes
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.answers import sample
from rlhf_tasks.evaluation.retention import Probes
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.ppo.rollout import logprobs_of
from rlhf_tasks.project.paths import Paths

NEEDED = ("data/prompts/test.parquet", "data/sft/test.parquet")


def measured(settings: Config, policy: Path, sft: Path) -> dict[str, float]:
    """`kl`, and what stage judge measures of retention, by the names of metrics/judge.json.

    Of a policy with other tokens than SFT's there is no KL, and its perplexity a token is none that can be
    compared: only the questions are left, which are told by character.

    Raises:
        UserError: if the data is not here.
    """
    missing = [path for path in NEEDED if not Path(path).exists()]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not here, by which the KL and retention of {policy} are measured: run "
            "`rlhf prepare`, or `dvc checkout data`"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, float] = {}
    if settings.judge.retention is not None:
        probes = Probes(settings.judge.retention)
        found = probes("sft", sft, device) | probes("policy", policy, device)
    try:
        contracts.check_same_tokenizer(sft, policy)
    except ContractError as error:
        console.say(f"neither its KL nor its perplexity can be told: {error}")
        return {key: value for key, value in found.items() if not key.startswith("perplexity/")}
    return found | {"kl": kl(settings, policy, sft, device)}


def kl(settings: Config, policy: Path, sft: Path, device: torch.device) -> float:
    """Mean over test prompts of Σ log π/π_SFT of a sampled answer, in nats: objective/kl_k1 of PPO.

    Sampled as PPO samples, at `ppo.temperature`, which both log-probs share.
    """
    prompts = [row["prompt"] for row in read_table(Paths(), "prompts", "test")[: settings.judge.num_examples]]
    answers = sample(
        policy, prompts, max_new_tokens=settings.ppo.response_length, temperature=settings.ppo.temperature,
        seed=settings.seed, device=device,
    ).ids  # fmt: skip
    tokenizer = load_tokenizer(sft)
    queries, pad, most = encode(tokenizer, prompts), tokenizer.pad_token_id, settings.ppo.micro_batch_tokens
    total = 0.0
    for folder, sign in ((policy, 1), (sft, -1)):
        model = models.place(models.load_causal(folder), device).eval()
        total += sign * _logprob(model, queries, answers, pad, most, settings.ppo.temperature)
    return total / len(prompts)


@torch.no_grad()
def _logprob(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    pad: int,
    max_tokens: int,
    temperature: float,
) -> float:
    """Σ over all answers of the log-prob of an answer."""
    parts = []
    for rows in micro_batches(sizes(queries, responses), max_tokens):
        batch = collate([queries[i] for i in rows], [responses[i] for i in rows], pad)
        batch = batch.to(next(model.parameters()).device)
        logprobs = logprobs_of(model, batch, temperature)
        parts.append(float(torch.where(batch.response_mask, logprobs, 0).double().sum()))
    return math.fsum(parts)

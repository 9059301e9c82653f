"""Measures a workload of PPO: speed, its split, memory, and the share of the machine's matrix rate.

Model FLOPs are counted by the usual rule: two per weight of a matrix and token in a forward pass, 2·L·H·T²
for causal attention, and twice as many again in a backward pass. Padding and recomputation are not counted.

L layers · H hidden · Q query · R response · T = Q + R.
"""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_tasks import console
from rlhf_tasks.benchmark.workloads import Workload
from rlhf_tasks.config import Ppo
from rlhf_tasks.models.load import TokenScores

PADDING = "time/padding_share"


@dataclass(frozen=True)
class Measurement:
    """Medians over the updates; the names say the units."""

    models: str
    device: str
    threads: int
    precision: str
    episodes_per_second: float
    response_tokens_per_second: float
    seconds_per_update: float
    generate_seconds: float
    score_seconds: float
    train_seconds: float
    peak_memory_gb: float
    padding_share: float | None
    """Share of the tokens that training computed for nothing; None if the trainer does not log it."""
    model_flops_per_update: float
    matrix_flops_per_second: float
    matrix_share: float

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def measure(workload: Workload) -> Measurement:
    """Take all updates of a workload; the first one warms up and does not count."""
    dist, updates = workload.dist, []
    with console.progress("bench", workload.num_updates, unit="updates") as bar:
        for metrics in workload.updates():
            updates.append(metrics)
            bar.advance(1, eps=metrics["eps"])
    always = set.intersection(*map(set, updates[1:]))  # some metrics appear when memory has run out
    medians = {key: statistics.median(update[key] for update in updates[1:]) for key in always}
    memory = _peak_bytes(dist.device) / 1e9
    seconds = workload.settings.rollout_batch_size / medians["eps"]
    query = statistics.fmean(map(len, workload.prompts))
    work = update_flops(workload, query, medians["val/response_length"])
    rate = matmul_rate(dist.device, torch.float32 if dist.is_float32 else torch.bfloat16)
    return Measurement(
        models=workload.description,
        device=_device_name(dist.device),
        threads=torch.get_num_threads(),
        precision="fp32" if dist.is_float32 else "bf16",
        episodes_per_second=medians["eps"],
        response_tokens_per_second=medians["time/tokens_per_second"],
        seconds_per_update=seconds,
        generate_seconds=medians["time/generate_seconds"],
        score_seconds=medians["time/score_seconds"],
        train_seconds=medians["time/train_seconds"],
        peak_memory_gb=memory,
        padding_share=medians.get(PADDING),
        model_flops_per_update=work,
        matrix_flops_per_second=rate,
        matrix_share=work / seconds / rate,
    )


def estimate(found: Measurement, settings: Ppo) -> dict[str, float]:
    """The seconds of a whole stage ppo: its updates, and its evaluations on the selection prompts."""
    updates = settings.total_episodes // settings.rollout_batch_size
    evaluation = (found.generate_seconds + found.score_seconds) / settings.rollout_batch_size
    training = updates * found.seconds_per_update
    selecting = (settings.num_selections + 1) * settings.num_selection_prompts * evaluation
    return {
        "updates": updates,
        "training_seconds": training,
        "evaluation_seconds": selecting,
        "total_seconds": training + selecting,
    }


# -------------------------------------------------------------------------------------------- FLOPs


def forward_flops(model: PreTrainedModel, query: float, response: float, *, logits: bool) -> float:
    """Model FLOPs of one row's forward pass, with the language model's head on the response tokens only."""
    layers: list[Any] = [m for m in model.base_model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    weights: int = sum(layer.weight.numel() for layer in layers)
    tokens, config = query + response, model.config.get_text_config()  # of Gemma 3, for example
    flops: float = 2.0 * weights * tokens + 2.0 * config.num_hidden_layers * config.hidden_size * tokens**2
    if logits:
        head: Any = model.get_output_embeddings()
        flops += 2.0 * int(head.weight.numel()) * response
    return flops


def update_flops(workload: Workload, query: float, response: float) -> float:
    """Model FLOPs of an update: sampling, the reference, the critic, the reward models, and the epochs.

    A reward model of another tokenizer is counted with the policy's tokens.
    """
    settings, actor_critic = workload.settings, workload.actor_critic
    policy = forward_flops(actor_critic.policy, query, response, logits=True)
    critic = 0.0
    if isinstance(actor_critic.critic, TokenScores):
        critic = forward_flops(actor_critic.critic.model, query, response, logits=False)
    reward = sum(
        forward_flops(one.model, query, response, logits=False) for one in workload.scorers.reward_models
    )
    row = 2 * policy + critic + reward + 3 * settings.num_ppo_epochs * (policy + critic)
    return settings.rollout_batch_size * row


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a matmul of square matrices: the best of five."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(6):  # the first one warms up
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds[1:])


# ------------------------------------------------------------------------------------------ machine


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device) -> int:
    """The most memory in use: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

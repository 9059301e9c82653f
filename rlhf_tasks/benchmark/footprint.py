"""The memory of PPO on one GPU by part, under each layout. Sizes are in bytes.

The parts are counted from what the trainer holds: float32 weights with copies in bfloat16 for bf16, except
under DeepSpeed, which keeps bfloat16 weights beside a float32 copy of each process's share. ZeRO: arXiv
1910.02054, section 3; it keeps 12 bytes a trained parameter for AdamW: that copy and two moments. FSDP2 keeps
a process's share of everything in float32, and gathers one layer at a time (arXiv 2304.11277, section 3.2).

With `launch.offload` a process's share of optimiser and gradients is in the machine's memory, and under FSDP2
and ZeRO-3 that of the weights too. With a vLLM sampler other GPUs hold what sampling needs.

P policy · C critic · N processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlhf_tasks.benchmark.architecture import Architecture
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.scorers import OPTIMISED, reward_folders

Layout = Literal["single", "ddp", "zero2", "fsdp2", "zero3"]
LAYOUTS: Sequence[Layout] = get_args(Layout)
"""In the order in which they are tried: from the simplest to those that spread most."""
SHARDING: Sequence[Layout] = ("fsdp2", "zero3")
"""Those that divide the weights, and gather them to use them."""
FP32, BF16 = 4, 2
SLICE = 2**26  # logits that the training passes make at a time on a GPU, in modeling/vocabulary.py
BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size; overlap_comm uses two
LIVE = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True, kw_only=True)
class Networks:
    """The models of PPO and the section that trains them."""

    policy: Architecture
    settings: Ppo
    has_reward_model: bool
    """Whether models/reward and models/reward_heldout are there; the second is loaded, too."""
    is_bf16: bool
    longest: int
    """Tokens of a prompt; every prompt is taken to be so long."""
    offload: bool = False
    """`launch.offload`."""

    @property
    def critic_parameters(self) -> int:
        if self.settings.critic is None:
            return 0
        return self.policy.score_parameters if self.has_separate_critic else self.policy.hidden + 1

    @property
    def both_parameters(self) -> int:
        """Of policy and critic."""
        return self.policy.parameters + self.critic_parameters

    @property
    def trained_parameters(self) -> int:
        """Of policy and critic, those that the optimiser changes."""
        lora, critic = self.settings.lora, self.critic_parameters
        if (critic_lora := getattr(self.settings.critic, "lora", None)) is not None:
            critic = self.policy.adapters(critic_lora.r) + self.policy.hidden
        return critic + (self.policy.parameters if lora is None else self.policy.adapters(lora.r))

    @property
    def batch_size(self) -> int | None:
        """Responses that a process samples at the same time; None: its whole share, or a server decides."""
        return self.settings.sampler.batch_size if self.settings.sampler.kind == "policy" else None

    @property
    def has_separate_critic(self) -> bool:
        """Whether the critic is a model of its own."""
        return self.settings.critic is not None and self.settings.critic.kind == "separate"

    @property
    def reference_parameters(self) -> int:
        """0 with LoRA, where the reference is the policy without its adapters."""
        return self.policy.parameters if self.settings.lora is None else 0

    @property
    def num_scoring(self) -> int:
        """Reward models that score each response."""
        return len(reward_folders(self.settings.scorers))

    @property
    def reward_parameters(self) -> int:
        """Of all reward models, which are taken to be as large as the policy; models/reward once."""
        others = sum(folder != OPTIMISED for folder in reward_folders(self.settings.scorers))
        return (others + 2 * self.has_reward_model) * self.policy.score_parameters

    @property
    def has_engine(self) -> bool:
        return self.settings.sampler.kind == "vllm"

    @property
    def passes_width(self) -> int:
        """Bytes of a number in a forward pass."""
        return BF16 if self.is_bf16 else FP32


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one GPU, by part."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    cache: float
    logits: float
    """The larger of what sampling and training make."""
    prompts: float
    """Of sampling's first pass, over the prompts of all rows that are sampled at once."""
    gathered: float
    """Under FSDP2 and ZeRO-3, whole weights: of the policy while it samples, or those that a pass is at."""
    start: float
    """Under ZeRO-3, policy and critic in float32, before they are partitioned."""
    peak: float
    """The largest of the phases: sampling has no gradients and activations, training no cache."""
    machine: float
    """Of the first machine's own memory, not of a GPU: what its processes have offloaded, the selected
    weights, and the policy that is gathered to be written."""


def footprint(networks: Networks, layout: Layout, num_gpus: int, per_machine: int = 8) -> Footprint:
    """The memory of each GPU that trains, and of the first machine, which has `per_machine` of them."""
    states = _states(networks, layout, num_gpus)
    offloaded, states = _offloaded(networks, layout, states)
    rows = networks.settings.rollout_batch_size // num_gpus
    sampled = 0 if networks.has_engine else min(rows, networks.batch_size or rows)
    cache, sampling_logits = sampled * cache_of_row(networks), 3.0 * FP32 * sampled * networks.policy.vocab
    training_logits = 2.0 * FP32 * SLICE
    activations = _activations(networks, layout)
    whole, live = 0.0, 0.0
    if layout in SHARDING:
        live = _live(networks, layout)
        whole = 0.0 if networks.has_engine else float(networks.passes_width * networks.policy.parameters)
    start = float(FP32 * networks.both_parameters) if layout == "zero3" else 0.0
    prompts = _prompts(networks, sampled)
    sampling = cache + max(sampling_logits, prompts) + whole
    training = states["gradients"] + activations + training_logits + live
    return Footprint(
        **states, activations=activations, cache=cache, logits=max(sampling_logits, training_logits),
        prompts=prompts, gathered=max(whole, live), start=start,
        peak=max(start, states["weights"] + states["optimiser"] + max(sampling, training)),
        machine=min(num_gpus, per_machine) * offloaded + _copies(networks, layout),
    )  # fmt: skip


def _offloaded(
    networks: Networks, layout: Layout, states: Mapping[str, float]
) -> tuple[float, Mapping[str, float]]:
    """The bytes of a process that are in the machine's memory, and what its GPU keeps.

    DeepSpeed reduces gradients in buckets on the GPU, and moves on what is reduced.
    """
    if not networks.offload or layout in ("single", "ddp"):
        return 0.0, states
    moved = {"optimiser": states["optimiser"]}
    if layout in SHARDING:
        moved["weights"] = states["weights"]
    moved["gradients"] = states["gradients"] - _buckets(networks, layout)
    return sum(moved.values()), {name: states[name] - moved.get(name, 0.0) for name in states}


def stored_width(networks: Networks, layout: Layout) -> int:
    """Bytes of a number in a checkpoint: DeepSpeed keeps the weights in the precision of the passes."""
    return networks.passes_width if layout in ("zero2", "zero3") else FP32


def _copies(networks: Networks, layout: Layout) -> float:
    """The trained weights of the policy that were selected, and the policy that is gathered to be written.

    One process alone, and those that hold all weights, write them from the GPU.
    """
    lora, width = networks.settings.lora, stored_width(networks, layout)
    selected = networks.policy.parameters if lora is None else networks.policy.adapters(lora.r)
    return float(width * (selected + (networks.policy.parameters if layout in SHARDING else 0)))


def _live(networks: Networks, layout: Layout) -> float:
    """What a pass has gathered at most. FSDP2: the embeddings, the head, a layer and the next, and the whole
    gradient of the largest of these with the float32 copy that is shared out."""
    policy, width = networks.policy, networks.passes_width
    if layout == "zero3":
        return float(width * min(LIVE, networks.both_parameters))
    embeddings, layer = policy.vocab * policy.hidden, policy.in_matrices / policy.layers
    return width * (embeddings + policy.head + 2 * layer) + (width + FP32) * max(embeddings, layer)


def _states(networks: Networks, layout: Layout, n: int) -> Mapping[str, float]:
    """Weights of all models, gradients and optimiser."""
    policy, critic = networks.policy.parameters, networks.critic_parameters
    trained, frozen = networks.trained_parameters, networks.reference_parameters
    rewards = networks.reward_parameters
    if networks.settings.lora is not None:
        policy += networks.policy.adapters(networks.settings.lora.r)
    if layout in ("single", "ddp"):
        weights = FP32 * (policy + critic + frozen + rewards)
        if networks.is_bf16:  # the copies of one model's pass, or of one pass over both
            weights += BF16 * (max(policy, critic) if layout == "single" else policy + critic)
        exchanged = FP32 * trained if layout == "ddp" else 0
        return {
            "weights": weights,
            "gradients": FP32 * trained + exchanged,
            "optimiser": 2 * FP32 * trained,
        }
    if layout == "fsdp2":
        return {
            "weights": FP32 * (policy + critic + frozen + rewards) / n,
            "gradients": FP32 * trained / n,
            "optimiser": 2 * FP32 * trained / n,
        }
    width, buckets = networks.passes_width, _buckets(networks, layout)
    shared = {"gradients": width * trained / n + buckets, "optimiser": 3 * FP32 * trained / n}
    if layout == "zero2":  # reward models stay in float32
        return {"weights": width * (policy + critic + frozen) + FP32 * rewards, **shared}
    return {"weights": (width * (policy + critic + frozen) + FP32 * rewards) / n, **shared}


def _buckets(networks: Networks, layout: Layout) -> float:
    """DeepSpeed's two buckets of gradients."""
    if layout not in ("zero2", "zero3"):
        return 0.0
    return float(2 * networks.passes_width * min(BUCKET, networks.trained_parameters))


def _activations(networks: Networks, layout: Layout) -> float:
    """Of one micro-batch: all layers', or with checkpointing each layer's input and one layer's own."""
    policy, settings = networks.policy, networks.settings
    width, per_token = networks.passes_width, networks.passes_width * policy.activations
    if settings.gradient_checkpointing:  # autocast leaves a layer's input in float32
        inputs = (FP32 if layout in ("single", "ddp") else width) * policy.layers * policy.hidden
        per_token = inputs + width * (policy.activations // policy.layers)
    tokens = max(settings.micro_batch_tokens, networks.longest + settings.response_length)
    passes = 2 if layout != "single" and networks.has_separate_critic else 1
    return float(passes * tokens * per_token)


def _prompts(networks: Networks, sampled: int) -> float:
    """Without gradients a token holds about three states in float32 and three outputs of the widest layer.
    Measured for GPT-NeoX and Llama, this is right within a quarter."""
    policy, each = networks.policy, networks.settings.samples_per_prompt
    widest = max(matrix.outputs for matrix in policy.matrices)
    per_token = 3 * FP32 * policy.hidden + 3 * networks.passes_width * widest
    return float((max(1, sampled // each) if sampled else 0) * networks.longest * per_token)


def cache_of_row(networks: Networks) -> float:
    """Bytes of the keys and values of the longest row."""
    tokens = networks.longest + networks.settings.response_length
    return float(tokens * networks.policy.cache_per_token(networks.passes_width))

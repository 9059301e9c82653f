"""Whether PPO fits into the memory of GPUs that are not here, and with which settings; bytes, calculated.

The parts are counted from what the trainer holds: float32 weights with copies in bfloat16 for bf16. DeepSpeed
keeps bfloat16 weights, and 16 bytes a trained parameter of each rank's share: a float32 copy, AdamW's two
moments (ZeRO: arXiv 1910.02054, section 3), and the sum of gradients (`grad_accum_dtype`). FSDP2 keeps a
rank's share of everything in float32, and gathers one layer at a time (arXiv 2304.11277, section 3.2).

With `launch.offload` a rank's share of optimizer and gradients is in the machine's memory, under FSDP2 and
ZeRO-3 that of the weights too. With vLLM other GPUs sample. All prompts count as long as the longest, and all
reward models as large as the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_tasks.config import Config, Lora, Ppo
from rlhf_tasks.config.scorers import OPTIMIZED, reward_folders
from rlhf_tasks.config.types import AUTO
from rlhf_tasks.models.load import load_config, scratch_config
from rlhf_tasks.models.logprobs import GPU_LOGITS
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training.auto import MANY_SHARDS, checkpointed_bytes, fit_tokens

Parallelism = Literal["ddp", "zero2", "fsdp2", "zero3"]  # from the simplest to those that spread most
SHARDING = ("fsdp2", "zero3")
FP32, BF16 = 4, 2
BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size; overlap_comm uses two
LIVE = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
LOGIT_COPIES = 3  # float32 tensors of a chunk's logits that live at once, in models/logprobs.py
USABLE = 0.9  # share of a GPU's memory beside CUDA's own and what its allocator cannot use
GPUS_PER_MACHINE = 8
GB = 1e9


class Sizes(NamedTuple):
    """What the memory of a causal language model depends on."""

    trunk: int  # parameters without the head; a head that is tied to the embeddings is among them
    head: int  # parameters of a head of its own
    layer: int  # parameters of the linear layers of one layer
    vocab: int
    hidden: int
    layers: int
    widest: int  # outputs of the widest linear layer
    activations: int  # inputs and outputs of all linear layers: what a token keeps for the backward pass
    cache: int  # keys and values of a token

    @property
    def parameters(self) -> int:
        return self.trunk + self.head


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Of a model that may be on the device `meta`, so that it needs no memory itself."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    of_head = 0 if is_tied else sum(p.numel() for p in head.parameters())
    linear: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Sizes(
        trunk=sum(p.numel() for p in model.parameters()) - of_head,
        head=of_head,
        layer=sum(m.weight.numel() for m in linear) // text.num_hidden_layers,
        vocab=head.weight.shape[0],
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        widest=max(m.weight.shape[isinstance(m, Conv1D)] for m in linear),
        activations=sum(sum(m.weight.shape) for m in linear),
        cache=2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * head_width,
    )


def sizes_of_config(config: PretrainedConfig) -> Sizes:
    """The sizes of the model that a config describes, without its weights."""
    with torch.device("meta"):
        return sizes_of(AutoModelForCausalLM.from_config(config))


def config_of_params(config: Config, root: Path, model: str | None = None) -> PretrainedConfig:
    """Of the policy of params.yaml: models/sft where the project has it, else what SFT would start from.

    With `model`, a folder, a GGUF file or a hub id, of that one instead.
    """
    sft, scratch = Paths(root).sft, config.model.scratch
    trained = str(sft) if (sft / "config.json").exists() else None
    source, revision = model or trained or config.sft.source, None
    if source is None and scratch is not None:
        positions = 4 * (config.data.max_prompt_tokens + config.data.max_completion_tokens)
        ids = {"bos_token_id": 0, "eos_token_id": 0}  # the families' own may be beyond this vocabulary
        return scratch_config(scratch, scratch.vocab_size, positions, **ids)
    if source is None:
        source, revision = config.model.base, config.model.revision
    elif source == config.sft.source:
        revision = config.sft.revision
    return load_config(source, revision)


@dataclass(frozen=True, kw_only=True)
class Run:
    """PPO of one policy on some GPUs."""

    policy: Sizes
    ppo: Ppo
    longest: int  # tokens of a prompt
    num_gpus: int
    parallelism: Parallelism = "ddp"
    is_bf16: bool = True
    has_reward_model: bool = True  # models/reward and models/reward_heldout are loaded
    starts_from_dpo: bool = False  # models/sft is loaded too, for the KL
    offload: bool = False
    auto_tokens_of: float | None = None  # GPU's bytes by which `micro_batch_tokens: auto` is chosen
    chunk: int = GPU_LOGITS  # logits that the training passes make at a time

    @classmethod
    def of_params(cls, config: Config, policy: Sizes, num_gpus: int, gpu: float) -> Run:
        """PPO as params.yaml has it, of this policy, on GPUs of so many bytes."""
        return cls(
            policy=policy,
            ppo=config.ppo,
            longest=config.data.max_prompt_tokens,
            num_gpus=num_gpus,
            is_bf16=config.launch.precision != "fp32",
            auto_tokens_of=gpu if config.ppo.micro_batch_tokens == AUTO else None,
            has_reward_model=config.reward.train,
            starts_from_dpo=config.dpo.train,
            offload=config.launch.offload,
        )

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a pass; what `auto` stands for in this layout."""
        if self.auto_tokens_of is None:
            return self.ppo.micro_batch_tokens
        a_token = self.width * self.policy.activations
        if self.ppo.gradient_checkpointing:
            a_token = checkpointed_bytes(a_token, self.policy.hidden, self.policy.layers)
        is_sharded = self.parallelism in SHARDING and self.num_gpus >= MANY_SHARDS
        return fit_tokens(self.auto_tokens_of, a_token, is_sharded=is_sharded)

    @property
    def width(self) -> int:
        """Bytes of a number in a pass."""
        return BF16 if self.is_bf16 else FP32

    @property
    def critic(self) -> int:
        """Parameters of the critic."""
        sizes = {"separate": self.policy.trunk + self.policy.hidden, "shared": self.policy.hidden + 1}
        return 0 if self.ppo.critic is None else sizes[self.ppo.critic.kind]

    @property
    def trained(self) -> int:
        """Parameters that the optimizer changes."""
        lora, critic = self.ppo.lora, self.critic
        if lora is None:
            return self.policy.parameters + critic
        critic_lora: Lora | None = getattr(self.ppo.critic, "lora", None)
        if critic_lora is not None:
            critic = critic_lora.r * self.policy.activations + self.policy.hidden
        return lora.r * self.policy.activations + critic


def memory(run: Run) -> dict[str, float]:
    """Bytes on one GPU by part, with the `peak`; and those of a `machine` with all of its GPUs.

    Sampling has no gradients and activations, and training no cache, so that the peak is less than the sum.
    """
    policy, ppo, n, width = run.policy, run.ppo, run.num_gpus, run.width
    is_sharded, is_deepspeed = run.parallelism in SHARDING, run.parallelism.startswith("zero")
    adapters = ppo.lora.r * policy.activations if ppo.lora else 0
    num_references = (ppo.lora is None) + run.starts_from_dpo
    reference = num_references * policy.parameters
    folders = reward_folders(ppo.scorers)
    num_rewards = sum(folder != OPTIMIZED for folder in folders) + 2 * run.has_reward_model
    rewards = FP32 * num_rewards * (policy.trunk + policy.hidden)
    stored = width if is_deepspeed else FP32
    weights = stored * (policy.parameters + adapters + run.critic + reference) + rewards
    if run.parallelism == "ddp" and run.is_bf16:  # autocast's copies of policy and critic
        weights += BF16 * (policy.parameters + run.critic)
        num_frozen = num_rewards + num_references  # whose layers are in 16 bits
        weights -= (FP32 - BF16) * num_frozen * policy.layers * policy.layer
    share = 1 if run.parallelism == "ddp" else n
    buckets = 2 * width * min(BUCKET, run.trained) if is_deepspeed else 0
    exchanged = FP32 * run.trained if run.parallelism == "ddp" and n > 1 else 0
    parts = {
        "weights": weights / (n if is_sharded else 1),
        "gradients": FP32 * run.trained / share + buckets + exchanged,
        "optimizer": (3 if is_deepspeed else 2) * FP32 * run.trained / share,
    }
    offloaded = 0.0
    if run.offload and run.parallelism != "ddp":
        moved = {"gradients": parts["gradients"] - buckets, "optimizer": parts["optimizer"]}
        moved |= {"weights": parts["weights"]} if is_sharded else {}
        offloaded = sum(moved.values())
        parts |= {name: parts[name] - size for name, size in moved.items()}

    row, batch = run.longest + ppo.response_length, ppo.rollout_batch_size
    tokens = min(max(run.micro_batch_tokens, row), max(1, batch // ppo.num_mini_batches // n) * row)
    # one process frees the policy's activations before the critic's pass; ranks need both in one pass
    has_two = ppo.critic is not None and ppo.critic.kind == "separate"
    passes = 2 if has_two and (n > 1 or run.parallelism != "ddp") else 1
    kept, recomputed = width * policy.activations, 0
    # checkpointing keeps each layer's input, which autocast leaves in float32, and one layer's own
    if ppo.gradient_checkpointing:
        recomputed = kept // policy.layers
        kept = (FP32 if run.parallelism == "ddp" else width) * policy.layers * policy.hidden
    parts["activations"] = tokens * (passes * kept + recomputed)
    rows = batch // n if ppo.sampler.kind == "policy" else 0
    if ppo.sampler.kind == "policy":
        rows = min(rows, ppo.sampler.batch_size or rows)
    parts["cache"] = rows * row * policy.cache * width
    # without gradients a token of the prompts holds about three states and three outputs of the widest layer
    prompts = rows // ppo.samples_per_prompt * run.longest
    prefill = prompts * 3 * (FP32 * policy.hidden + width * policy.widest)
    sampling = max(3 * FP32 * rows * policy.vocab, prefill)
    logits = LOGIT_COPIES * FP32 * min(run.chunk, tokens * ppo.response_length // row * policy.vocab)
    if not ppo.lora:
        logits += 2 * FP32 * policy.vocab * policy.hidden  # the head's gradient, of a micro-batch and a chunk
    parts["sampling, logits"] = max(sampling, logits)
    gathered, live, start = 0, 0, 0
    if is_sharded:  # the whole policy to sample; in a pass some layers
        gathered = 0 if ppo.sampler.kind == "vllm" else width * policy.parameters
        both = policy.parameters + run.critic
        embeddings = policy.vocab * policy.hidden
        live = width * (embeddings + policy.head + 2 * policy.layer)
        live += (width + FP32) * max(embeddings, policy.layer)  # a whole gradient, and its float32 copy
        if run.parallelism == "zero3":  # policy and critic are whole before they are partitioned
            live, start = width * min(LIVE, both), FP32 * both
    parts["gathered"] = max(gathered, live)
    sample = parts["cache"] + sampling + gathered
    train = parts["gradients"] + parts["activations"] + logits + live
    parts["peak"] = max(start, parts["weights"] + parts["optimizer"] + max(sample, train))
    # the selected weights: where nothing is sharded each process has them; else the first one, which also
    # gathers the policy to write it
    here = min(n, GPUS_PER_MACHINE)
    copies = (1 if is_sharded else here) * (adapters or policy.parameters)
    copies += policy.parameters if is_sharded else 0
    parts["machine"] = here * offloaded + stored * copies
    return parts


def candidates(run: Run) -> Iterator[Run]:
    """The same run with other settings, from the fastest to those that need least memory."""
    for offload in sorted({run.offload, True}):
        for checkpointing in sorted({run.ppo.gradient_checkpointing, True}):
            ppo = run.ppo.model_copy(update={"gradient_checkpointing": checkpointing})
            for parallelism in get_args(Parallelism):
                if parallelism == "ddp" and offload:
                    continue
                if run.num_gpus > 1 or parallelism == "ddp" or (offload and parallelism != "fsdp2"):
                    yield replace(run, offload=offload, ppo=ppo, parallelism=parallelism)


def fit(run: Run, gpu: float, machine: float) -> tuple[Run | None, str]:
    """The first settings that fit into a GPU and a machine of so many bytes, or None and the reason."""
    rows, prompts = (
        run.ppo.rollout_batch_size // n for n in (run.ppo.num_mini_batches, run.ppo.samples_per_prompt)
    )
    for count, what in ((rows, "rows of an optimizer step"), (prompts, "prompts of a rollout")):
        if count % run.num_gpus:
            return None, f"{count} {what} are not divisible by {run.num_gpus} GPUs"
    tried = [(each, memory(each)) for each in candidates(run)]
    for each, parts in tried:
        if parts["peak"] <= USABLE * gpu and parts["machine"] <= machine:
            return each, ""
    least, parts = min(tried, key=lambda one: one[1]["peak"])
    place, needed, available = "each GPU", parts["peak"], USABLE * gpu
    if needed <= available:
        place, needed, available = "its machine", parts["machine"], machine
    return None, f"{least.parallelism} needs {needed / GB:,.0f} GB of {available / GB:,.0f} on {place}"


def describe(run: Run, gpu: float, machine: float) -> dict[str, Any]:
    """The settings that fit, and GB by part; of the settings that need least where none fits."""
    fitting, problem = fit(run, gpu, machine)
    chosen = fitting or min(candidates(run), key=lambda each: memory(each)["peak"])
    return {
        "fits": fitting is not None,
        "problem": problem or None,
        "launch.parallelism": chosen.parallelism,
        "launch.offload": chosen.offload,
        "ppo.gradient_checkpointing": chosen.ppo.gradient_checkpointing,
        "ppo.micro_batch_tokens": chosen.micro_batch_tokens,
        **{f"GB of {name}": round(size / GB, 2) for name, size in memory(chosen).items()},
    }

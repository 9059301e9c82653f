"""The sizes of a language model from its config alone: no weight is loaded or made.

L layers · H hidden · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_tasks.benchmark import shapes
from rlhf_tasks.config import Config, is_hub_id
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling.load import from_scratch
from rlhf_tasks.project.paths import Paths

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "1B": {
        "family": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 8, "intermediate_size": 8192,
    },
    "8B": {
        "family": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
    "70B": {
        "family": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
    },
}  # fmt: skip
"""Pythia-1B (arXiv 2304.01373, table 1), and Llama 3's 8B and 70B (arXiv 2407.21783, table 3)."""


class Matrix(NamedTuple):
    """A linear layer of the trunk."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What memory and arithmetic of a model depend on."""

    family: str
    vocab: int
    hidden: int
    layers: int
    kv_heads: int
    head_width: int
    matrices: tuple[Matrix, ...]
    """The linear layers of the trunk; a mixture of experts may hold some weights elsewhere."""
    trunk: int
    """Parameters without the language model's head; a head that is tied to the embeddings is among them."""
    head: int
    """Further parameters of the language model's head; 0 if it is tied to the embeddings."""

    @property
    def parameters(self) -> int:
        return self.trunk + self.head

    @property
    def score_parameters(self) -> int:
        """Parameters of a reward or value model: the trunk under a head of one score."""
        return self.trunk + self.hidden

    @property
    def in_matrices(self) -> int:
        return sum(matrix.size for matrix in self.matrices)

    @property
    def activations(self) -> int:
        """Numbers that a token's forward pass keeps for the backward pass: each linear layer's input and
        output. Measured for GPT-NeoX, Llama and Qwen2, this is 3% to 12% too low, and up to 17% in bf16; for
        GPT-2, whose activation function is computed in many steps, 33% to 42%."""
        return sum(matrix.inputs + matrix.outputs for matrix in self.matrices)

    def adapters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers of the trunk."""
        return rank * sum(matrix.inputs + matrix.outputs for matrix in self.matrices)

    def forward_flops(self, query: float, response: float, *, logits: bool) -> float:
        """FLOPs of one row's forward pass, counted as `rlhf bench` counts them."""
        tokens = query + response
        flops: float = 2.0 * self.in_matrices * tokens + 2.0 * self.layers * self.hidden * tokens**2
        return flops + (2.0 * self.vocab * self.hidden * response if logits else 0.0)

    def cache_per_token(self, bytes_each: int) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * bytes_each


def of(config: PretrainedConfig) -> Architecture:
    """The sizes of a config's causal language model, which is made on torch's device `meta`."""
    with torch.device("meta"):
        return of_model(AutoModelForCausalLM.from_config(config))


def of_model(model: PreTrainedModel) -> Architecture:
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    own = 0 if is_tied else sum(p.numel() for p in head.parameters())
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    heads = text.num_attention_heads
    return Architecture(
        family=model.config.model_type, vocab=head.weight.shape[0], hidden=text.hidden_size,
        layers=text.num_hidden_layers, kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // heads,
        matrices=tuple(_shape(layer) for layer in layers),
        trunk=sum(p.numel() for p in model.parameters()) - own, head=own,
    )  # fmt: skip


def _shape(layer: nn.Module) -> Matrix:
    weight: Any = layer.weight
    rows, columns = weight.shape
    return Matrix(rows, columns) if isinstance(layer, Conv1D) else Matrix(columns, rows)


def published(name: str) -> Architecture:
    """One of `PUBLISHED`, with a head of its own."""
    sizes = dict(PUBLISHED[name])
    return of(AutoConfig.for_model(sizes.pop("family"), tie_word_embeddings=False, **sizes))


def of_params(config: Config, root: Path) -> Architecture:
    """The policy of params.yaml: models/sft where the project has it, else what SFT would start from.

    Raises:
        UserError: if the config of the configured model cannot be read.
    """
    sft = Paths(root).sft
    if (sft / "config.json").exists():
        return of(AutoConfig.from_pretrained(sft))
    scratch = config.model.scratch
    if config.sft.source is None and scratch is not None:
        words = shapes.tokenizer(scratch.vocab_size)
        with torch.device("meta"):
            return of_model(from_scratch(scratch, words, positions(config)))
    source, revision = config.model.base, config.model.revision
    if config.sft.source is not None:
        source, revision = config.sft.source, config.sft.revision
    try:
        return of(AutoConfig.from_pretrained(source, revision=revision))
    except (OSError, ValueError) as error:
        hint = "a hub id needs network access or a filled cache" if is_hub_id(source) else "is it a folder?"
        raise UserError(
            f"cannot read the config of {source}: {str(error).splitlines()[0]} ({hint})"
        ) from error


def positions(config: Config) -> int:
    """The positions of a model from scratch while there is no data: a power of two above four texts."""
    longest = config.data.max_prompt_tokens + max(
        config.data.max_completion_tokens, config.ppo.response_length
    )
    return 1 << math.ceil(math.log2(4 * longest))

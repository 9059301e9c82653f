"""Named shapes of PPO's work: random models and prompts whose sizes alone matter. It loads torch when called.

A peer's environment imports this module too, so it needs only torch, transformers and tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PAD, EOS, UNK = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of models, GPT-NeoX or Llama, of their prompts and of PPO's batch, in tokens and rows."""

    vocab: int
    query_min: int
    query: int
    response: int
    batch: int
    micro: int
    """Rows of a peer's micro-batch; ours are cut by tokens."""
    micro_tokens: int = 4096
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    precision: Literal["fp32", "bf16"] = "fp32"
    llama: Mapping[str, int] | None = None
    """Sizes of a Llama that are not those of a GPT-NeoX."""


SHAPES: Mapping[str, Shape] = {
    "A": Shape(vocab=1024, query_min=64, query=64, response=32, batch=64, micro=16),
    "B": Shape(vocab=50304, query_min=128, query=128, response=53, batch=32, micro=8, layers=6),
    "C": Shape(vocab=32, query_min=16, query=64, response=64, batch=64, micro=16),
    "D": Shape(
        vocab=50304,
        query_min=512,
        query=512,
        response=53,
        batch=512,
        micro=16,
        layers=16,
        hidden=2048,
        heads=8,
        precision="bf16",
    ),
    "S": Shape(
        vocab=49152,
        query_min=64,
        query=96,
        response=48,
        batch=16,
        micro=4,
        micro_tokens=4 * (96 + 48),
        layers=30,
        hidden=576,
        heads=9,
        llama={"num_key_value_heads": 3, "intermediate_size": 1536},
    ),
}
"""C: a random model over 32 tokens ends its responses at very different lengths. D: Pythia-1B, for a GPU.

S: SmolLM2-135M with random weights."""


class Models(NamedTuple):
    """Random models of one shape; the reference has the policy's weights."""

    policy: Any
    reference: Any
    reward: Any
    value: Any


def tokenizer(vocab: int) -> Any:
    """<pad> 0, <eos> 1, <unk> 2, and a word for every other token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK} | {f"t{i}": i for i in range(3, vocab)}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def models(shape: Shape, device: Any = "cpu") -> Models:
    """Made on the device, where random numbers of large models take seconds and not minutes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    own = {"intermediate_size": 4 * shape.hidden}
    if shape.llama is not None:
        own = {**shape.llama, "tie_word_embeddings": True}
    config = AutoConfig.for_model(
        "gpt_neox" if shape.llama is None else "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=EOS,
        **own,
    )
    torch.manual_seed(0)
    with torch.device(device):
        policy, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))
        reference.load_state_dict(policy.state_dict())
        config.num_labels = 1
        reward, value = (AutoModelForSequenceClassification.from_config(config) for _ in range(2))
    return Models(policy, reference, reward, value)


def random_rows(count: int, shortest: int, longest: int, vocab: int, seed: int = 1) -> list[list[int]]:
    """Rows of random token ids, of lengths drawn evenly; no special tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]

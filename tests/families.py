"""Tiny random models of any architecture that transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 64

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_head_dim": 8,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_layers": 2,
    "n_heads": 4,
    "num_heads": 4,
    "n_positions": 128,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "attention_heads": 4,
    "num_layers": 4,
    "init_std": 0.2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "index_local_blocks": 1,
    "attention_chunk_size": 8,
    "local_attention": 6,
    "keep_window_size": 8,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "rel_extent": 8,
    "max_seq_len": 128,
    "floor_scale": 8,
    "zero_expert_num": 2,
    "adapter_rank": 4,
    "router_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "dim_model_base": 16,
    "dense_intermediate_size": 48,
    "dff": 48,
    "rotary_dim": 4,
    "embedding_size": 32,
}
"""What a config gets under these names, where it has them."""

LATENT: Mapping[str, Any] = {"head_dim": 4, "num_key_value_heads": 4}
"""Multi-head latent attention has one key and value head for each query head, and rotates this much of it."""

SLIDING: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("dots1", "gemma3_text", "laguna", "mellum"), SLIDING),
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, **SLIDING},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        **SLIDING,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": None},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "bailing_hybrid": {"layer_group_size": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minimax": {"block_size": 4},
    "zamba2": {"num_hidden_layers": 54, "hidden_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"d_head": 8},
}
"""What some families need besides; None keeps the default of the family."""


def config(family: str, **changes: Any) -> PretrainedConfig:
    """The family's config in small: a few thousand weights and a vocabulary of 64."""
    kind = CONFIG_MAPPING[family]
    names = {*vars(kind()), *getattr(kind, "attribute_map", {}), "initializer_range"}
    renamed = {own: name for name, own in getattr(kind, "attribute_map", {}).items()}
    changes = {renamed.get(name, name): value for name, value in changes.items()}
    sizes = {name: value for name, value in SIZES.items() if name in names and name not in renamed}
    sizes |= {**(LATENT if "qk_rope_head_dim" in sizes else {}), **SPECIAL.get(family, {}), **changes}
    return kind(**{name: value for name, value in sizes.items() if value is not None})


def causal(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random causal LM whose answers are far from uniform."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    model.eval()
    return model

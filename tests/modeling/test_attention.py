"""Our attention gives what that of transformers gives, to rounding, with its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import Batch, collate, fork
from rlhf_tasks.modeling import attention, models
from rlhf_tasks.modeling.attention import Attention
from rlhf_tasks.modeling.last_layer import columns_only, last_columns_only
from tests import small

QUERIES, RESPONSES = small.rows(5, longest=7)
PADDED = collate(QUERIES, RESPONSES, small.PAD)
EVEN = collate([[3, 4, 5], [6, 7, 8]], [[9, 10], [11, 12]], small.PAD)  # transformers gives it no mask
FORKED = fork(QUERIES, RESPONSES, RESPONSES[::-1], small.PAD)
SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    },
    "gpt_neox, all of a head": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    },
    "gpt_neox, without biases": {"attention_bias": False},
    "llama": {"num_key_value_heads": 4},
    "llama, shared keys": {"num_key_value_heads": 2},
    "llama, wide heads": {"num_key_value_heads": 1, "head_dim": 16},
    "llama, scaled angles": {
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
        },
    },
    "qwen2": {"num_key_value_heads": 2},
}  # fmt: skip


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name.split(",")[0],
        **{
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
            "vocab_size": small.VOCAB, "max_position_embeddings": 64, "initializer_range": 0.3,
            "pad_token_id": small.PAD,
        }
        | SIZES.get(name, {"hidden_size": 36}),
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for name, weight in model.named_parameters():  # biases begin as zero, which would hide their order
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


def states(model: PreTrainedModel, batch: Batch) -> Tensor:
    found: Tensor = model.base_model(
        input_ids=batch.query_response, attention_mask=batch.attention_mask,
        position_ids=batch.position_ids, use_cache=False,
    ).last_hidden_state  # fmt: skip
    return found


def gradients(model: PreTrainedModel, found: Tensor) -> list[Tensor | None]:
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    return list(
        torch.autograd.grad(
            (found * weights).sum(), list(model.parameters()), allow_unused=True, retain_graph=True
        )
    )


@contextmanager
def calls() -> Iterator[mock.Mock]:
    with mock.patch.object(Attention, "__call__", autospec=True, side_effect=Attention.__call__) as called:
        yield called


@pytest.mark.parametrize("batch", [PADDED, EVEN, FORKED], ids=["padded", "even", "forked"])
@pytest.mark.parametrize("name", SIZES)
def test_states_and_gradients_are_those_of_transformers(name: str, batch: Batch) -> None:
    model, count = made(name), batch.num_response_columns + 1
    theirs = states(model, batch)
    reads = {
        last_columns_only(model, count): theirs[:, -count:],
        columns_only(model, batch.ends): theirs.take_along_dim(batch.ends[:, :, None], 1),
    }
    for reading, expected in reads.items():
        with calls() as called, reading:
            found = states(model, batch)
        assert called.call_count == 2  # once for each layer
        picked = (
            found[:, -count:]
            if expected.shape[1] == count
            else found.take_along_dim(batch.ends[:, :, None], 1)
        )
        torch.testing.assert_close(picked, expected)
        for ours, other in zip(gradients(model, picked), gradients(model, expected), strict=True):
            torch.testing.assert_close(ours, other)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((1, 4, 2, 0, 4), [0, 2, 1, 3]),
        ((1, 6, 2, 0, 6), [0, 2, 1, 3, 4, 5]),
        ((2, 4, 1, 4, 12), [4, 5, 6, 7, 16, 17, 18, 19]),
        ((2, 2, 0, 3, 5), [3, 4, 8, 9]),
    ],
)
def test_the_two_numbers_of_a_pair_become_neighbours(
    rows: tuple[int, int, int, int, int], expected: list[int]
) -> None:
    assert attention._rows(*rows).tolist() == expected


def test_models_that_it_does_not_know_keep_the_attention_of_transformers() -> None:
    adapted = models.with_lora(small.causal("gpt_neox"), Lora(r=2, alpha=4.0), seed=0)
    windowed = small.causal("qwen2")
    windowed.config.sliding_window = 4
    eager = small.causal("llama")
    eager.set_attn_implementation("eager")
    bf16 = small.causal("llama")
    nn.Module.to(bf16, torch.bfloat16)
    odd = made("gpt_neox, odd heads").float()
    both_ways = small.causal("llama")
    both_ways.config.is_causal = False
    hooked = small.causal("qwen2")
    hooked.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with_dropout = small.causal("llama").train()
    for layer in with_dropout.model.layers:
        layer.self_attn.attention_dropout = 0.5
    for model in (adapted, windowed, eager, bf16, odd, both_ways, hooked, with_dropout, small.causal("gpt2")):
        with calls() as called, last_columns_only(model, 2):
            states(model, PADDED)
        assert not called.called


def test_a_pass_in_inference_mode_spoils_no_later_one() -> None:
    attention._rows.cache_clear()
    model = made("llama")
    with torch.inference_mode(), last_columns_only(model, 2):
        states(model, PADDED)
    with last_columns_only(model, 2):
        states(model, PADDED)[:, -2:].sum().backward()


def test_each_pass_has_its_own_positions() -> None:
    model = made("gpt_neox")
    shifted = collate([[*query, 5] for query in QUERIES], RESPONSES, small.PAD)
    for batch in (PADDED, shifted, PADDED):
        with last_columns_only(model, 2):
            found = states(model, batch)[:, -2:]
        torch.testing.assert_close(found, states(model, batch)[:, -2:])

"""What is checked of a model before PPO trains it: every planted fault is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from rlhf_tasks.errors import UserError
from rlhf_tasks.models import checks, sampling
from rlhf_tasks.models.checks import CheckResult
from tests import families, small
from tests.small import PAD

ROWS = checks.random_rows(small.causal().config)
RIGHT_BEFORE = """
gpt_neox llama qwen2 gpt2 gemma gemma2 gemma3_text mistral ministral mixtral qwen2_moe qwen3 qwen3_moe phi
phi3 phimoe opt bloom mpt falcon gptj gpt_neo gpt_oss olmo olmo2 olmo3 deepseek_v2 deepseek_v3 glm glm4
stablelm starcoder2 smollm3 nemotron helium exaone4 arcee diffllama doge biogpt persimmon
"""
CACHES_OF_OTHER_KINDS = "qwen3_next qwen3_5_text jamba bamba granitemoehybrid falcon_mamba mamba mamba2"
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


def check(model: PreTrainedModel) -> list[CheckResult]:
    return checks.check_policy(model, ROWS.queries, pad=PAD)


def failed(results: list[CheckResult]) -> list[str]:
    return [result.name for result in results if not result.passed]


def wrap(model: Any, change: Callable[[dict[str, Any]], None]) -> PreTrainedModel:
    """The model with its arguments changed before each pass."""
    forward = model.forward

    def changed(**named: Any) -> Any:
        change(named)
        return forward(**named)

    model.forward = changed
    wrapped: PreTrainedModel = model
    return wrapped


def unmask(named: dict[str, Any]) -> None:
    named.update(attention_mask=None, position_ids=None)


def forget(named: dict[str, Any]) -> None:
    named.update(past_key_values=DynamicCache())


# ------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "qwen2", "gpt2", "mixtral", "qwen3_next", "mamba"])
def test_a_right_model_passes_every_check_with_room(family: str) -> None:
    model, before = families.causal(family), torch.get_rng_state()
    results = check(model)
    assert torch.equal(torch.get_rng_state(), before), "training draws from this generator"
    assert len(results) == 6
    assert failed(results) == []
    assert max(result.deviation for result in results) < checks.TOLERANCE / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in [*RIGHT_BEFORE.split(), *CACHES_OF_OTHER_KINDS.split()]),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("falcon", {"alibi": True, "new_decoder_architecture": False}),
        ("falcon", {"new_decoder_architecture": True}),
    ],
)
def test_families_that_are_right_stay_right(family: str, changes: dict[str, Any]) -> None:
    assert failed(check(families.causal(family, **changes))) == []


@pytest.mark.parametrize("num_new", [1, 4, 8])
def test_no_more_tokens_are_sampled_than_a_model_of_few_positions_has(num_new: int) -> None:
    model = families.causal("gpt2", n_positions=32)
    queries = [query + [3] * (32 - num_new - len(query)) for query in ROWS.queries]
    assert failed(checks.check_policy(model, queries, pad=PAD, num_new=num_new)) == []


def test_a_model_of_few_positions_is_checked_by_its_folder(tmp_path: Path) -> None:
    families.causal("gpt2", n_positions=16).save_pretrained(tmp_path)
    assert failed(checks.check_source(str(tmp_path))) == []


@pytest.mark.parametrize("family", small.FAMILIES)
def test_a_right_reward_model_passes_and_one_that_ignores_its_mask_does_not(family: small.Family) -> None:
    scores = small.scores(family)
    assert failed(checks.check_scores(scores, ROWS, pad=PAD)) == []
    wrap(scores.model.base_model, unmask)
    name = "scores of a padded batch and of single rows agree"
    assert failed(checks.check_scores(scores, ROWS, pad=PAD)) == [name]


# --------------------------------------------------------------------------------- what is found out


def test_a_part_that_is_random_in_eval_mode_is_found() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.2, training=True)

    model = families.causal("bloom")
    layers: Any = model.base_model.h
    for layer in layers:
        layer.mlp.gelu_impl = nn.Sequential(layer.mlp.gelu_impl, Noise())
    assert failed(check(model))[0] == "two training passes agree"


def test_a_model_that_ignores_its_mask_is_found() -> None:
    assert "a padded batch and single rows agree" in failed(check(wrap(small.causal(), unmask)))


def test_rows_that_stay_in_the_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_rows(layer: Any, rows: Tensor) -> None:
        layer._buffers = tuple(buffer[: len(rows)] for buffer in layer._buffers)

    monkeypatch.setattr(sampling._PreallocatedLayer, "reorder_cache", first_rows)
    assert failed(check(small.causal())) == ["ended rows do not change the others"]


def test_weights_that_are_not_saved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.causal()
    save = type(model).save_pretrained

    def lossy(self: PreTrainedModel, folder: str) -> None:
        weights = {name: w + 1e-6 if "norm" in name else w for name, w in self.state_dict().items()}
        save(self, folder, state_dict=weights)

    monkeypatch.setattr(type(model), "save_pretrained", lossy)
    assert failed(check(model)) == ["a saved copy has the same weights"]


def test_settings_that_are_not_saved_are_found() -> None:
    model = small.causal()
    layers: Any = model.base_model.layers
    layers[0].self_attn.scaling *= 3
    assert failed(check(model)) == ["a saved copy agrees"]


def test_a_model_that_cannot_be_computed_is_named_with_its_error() -> None:
    def refuse(_: dict[str, Any]) -> None:
        raise ValueError("only for images")

    with pytest.raises(UserError, match="LlamaForCausalLM could not be computed: ValueError: only"):
        checks.require(check(wrap(small.causal(), refuse)), "models/sft")


def test_nan_passes_no_check() -> None:
    assert not CheckResult("x", float("nan"), 1.0, "y").passed


def test_a_model_that_ignores_its_cache_is_found_and_said_with_how_much_and_why() -> None:
    message = r"models/sft fails the check before training[^√]*sampling and training agree: off by .*likely "
    message += "cause: the model's cache does not hold all that it has read"
    with pytest.raises(UserError, match=message):
        checks.require(check(wrap(small.causal(), forget)), "models/sft")

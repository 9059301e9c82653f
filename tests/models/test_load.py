"""Checkpoints: what goes in comes out, byte for byte; what does not fit is refused by name."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import collate
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.heads import score_head
from rlhf_tasks.models.load import (
    ANY_WEIGHTS,
    add_score_head,
    load_causal,
    load_reward,
    recompute_activations,
    round_layers,
    save_checkpoint,
)
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.models.lora import add_lora, disable_adapters, merge_adapter
from tests import families, small
from tests.small import FAMILIES, HIDDEN, PAD, Family

QUERIES, RESPONSES = small.rows(6, longest=7)


def save(model: Any, folder: Path, identity: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_checkpoint(
        model, small.tokenizer(), folder, identity=identity or {"kind": "policy"}, card="# card\n"
    )
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small.causal(), tmp_path_factory.mktemp("models") / "policy")


# ------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_padded_rows_scores_are_the_heads_products_with_its_own_states(family: Family) -> None:
    scores = small.scores(family)
    together = scores(collate(QUERIES, RESPONSES, PAD))
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        alone = scores.model.base_model(torch.tensor([query + response])).last_hidden_state
        alone = alone[0] @ score_head(scores.model).weight[0]
        last = slice(-len(response) - 1, None)
        torch.testing.assert_close(together[row, last], alone[last], atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------- reward heads


def test_a_new_reward_head_is_drawn_from_a_normal_of_std_1_over_root_of_width_plus_1(policy: Path) -> None:
    scores = add_score_head(policy, torch.Generator().manual_seed(5))
    drawn = torch.empty(1, HIDDEN).normal_(
        0.0, (HIDDEN + 1) ** -0.5, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(score_head(scores.model).weight, drawn)


def test_a_causal_model_without_a_trained_head_is_not_a_reward_model(policy: Path) -> None:
    with pytest.raises(ContractError, match=r"policy lacks its trained head: score\.weight"):
        load_reward(policy)


def test_a_classifier_of_two_labels_is_not_a_reward_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**small.causal().config.to_dict(), "num_labels": 2})
    folder = save(AutoModelForSequenceClassification.from_config(config), tmp_path / "two")
    with pytest.raises(ContractError, match="2 labels"):
        load_reward(folder)


def test_the_score_mean_is_stored_and_subtracted_after_loading(tmp_path: Path) -> None:
    scores = small.scores()
    raw = small.last_scores_alone(scores, QUERIES, RESPONSES)
    scores.set_mean(0.75)
    loaded = load_reward(save(scores.model, tmp_path / "reward")).eval()
    torch.testing.assert_close(small.last_scores_alone(loaded, QUERIES, RESPONSES), raw - 0.75)


# ------------------------------------------------------------------------------------- loading


def test_missing_weights_are_an_error(policy: Path, tmp_path: Path) -> None:
    folder = save(small.causal(), tmp_path / "part")
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "layers.1" in key)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ContractError, match=r"part lacks weights: .*would be newly initialized"):
        load_causal(folder)


def test_pickled_weights_are_loaded_only_if_the_user_trusts_them(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ANY_WEIGHTS, raising=False)
    shutil.copytree(policy, tmp_path / "pickled")
    model = load_causal(policy)
    (tmp_path / "pickled/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled/pytorch_model.bin")
    with pytest.raises(ContractError, match=r"can run code.* RLHF_PICKLED_WEIGHTS=1 if you trust it"):
        load_causal(tmp_path / "pickled")
    monkeypatch.setenv(ANY_WEIGHTS, "1")
    loaded = load_causal(tmp_path / "pickled").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("lost", ["model-00002-of-00007.safetensors", "model.safetensors.index.json", "*"])
def test_a_folder_that_is_not_whole_is_named_and_no_other_format_is_advised(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ANY_WEIGHTS, raising=False)
    small.causal().save_pretrained(tmp_path, max_shard_size="5KB")
    for file in tmp_path.glob(f"{lost}" if lost != "*" else "model*"):
        file.unlink()
    with pytest.raises(ContractError, match=r"the folder is not whole; copy or download it again") as error:
        load_causal(tmp_path)
    assert "pickle" not in str(error.value)
    if "-of-" in lost:
        assert lost in str(error.value)


def test_what_is_no_checkpoint_or_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    weights = save(small.causal(), tmp_path / "torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match=f"{tmp_path} is no checkpoint folder"):
        load_causal(tmp_path)
    with pytest.raises(ContractError, match=f"cannot load a model from {tmp_path}/torn"):
        load_causal(tmp_path / "torn")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_are_saved_as_the_same_bytes_wherever_they_come_from(
    family: Family, tmp_path: Path
) -> None:
    first = save(small.causal(family), tmp_path / "a/one")
    second = save(load_causal(first), tmp_path / "b/another")
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    assert {"config.json", "README.md", "rlhf.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
        assert str(tmp_path).encode() not in (first / name).read_bytes()


# ----------------------------------------------------------------------------------- adapters

LORA = Lora(r=3, alpha=6.0)
LINEAR: dict[Family, int] = {"gpt_neox": 4, "llama": 7, "qwen2": 7, "gpt2": 4}  # of each of the two layers


def add_active_lora(model: PreTrainedModel, seed: int = 3) -> PreTrainedModel:
    """With adapters that do something: B is zero until it is trained."""
    found = add_lora(model, LORA, seed=seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    return found


def trained_names(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        logits = small.response_logits(model, batch)
    return logits[batch.response_mask]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_gets_an_adapter(family: Family) -> None:
    policy = add_lora(small.causal(family), LORA, seed=1)
    names = trained_names(policy)
    assert len(names) == 2 * 2 * LINEAR[family]  # A and B in each layer's linear ones
    assert all("lora_" in name for name in names)
    assert not [name for name, _ in policy.named_parameters() if "lm_head.lora" in name]
    scores = add_lora(small.scores(family).model, LORA, seed=1)
    assert len(trained_names(scores)) == 2 * 2 * LINEAR[family] + 1
    assert trained_names(scores)[-1] == "score.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing_and_draw_nothing_of_the_global_rng(family: Family) -> None:
    def drawn(seed: int) -> torch.Tensor:
        model, before = small.causal(family), torch.get_rng_state()
        add_lora(model, LORA, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(logits_of(model), logits_of(small.causal(family)))
        return torch.cat([p.flatten() for name, p in model.named_parameters() if "lora_A" in name])

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_without_its_adapters_is_bit_for_bit_the_one_before(family: Family) -> None:
    model = add_active_lora(small.causal(family))
    names, ours = trained_names(model), logits_of(model)
    with disable_adapters(model):
        assert torch.equal(logits_of(model), logits_of(small.causal(family)))
    assert torch.equal(logits_of(model), ours)
    assert trained_names(model) == names
    model.requires_grad_(False)
    with pytest.raises(KeyError), disable_adapters(model):
        raise KeyError
    assert torch.equal(logits_of(model), ours)
    assert trained_names(model) == [], "what was frozen stays frozen"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_plain_and_gives_the_same_logits(family: Family, tmp_path: Path) -> None:
    model = add_active_lora(small.causal(family))
    before, ours = torch.get_rng_state(), logits_of(model)
    plain = merge_adapter(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(plain) is type(model)
    assert plain.generation_config is model.generation_config
    assert plain.state_dict().keys() == small.causal(family).state_dict().keys()
    torch.testing.assert_close(logits_of(plain), ours, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_of(model), ours), "the adapted one goes on as it was"
    loaded = load_causal(save(plain, tmp_path / "merged"))
    assert torch.equal(logits_of(loaded), logits_of(plain))
    assert [f.name for f in (tmp_path / "merged").iterdir() if "adapter" in f.name] == []


def test_adapters_of_a_model_in_16_bits_are_merged_in_float32() -> None:
    model = add_active_lora(small.causal()).bfloat16()
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1e-6)  # less than half of a step of a weight in bf16
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    expected = layer.base_layer.weight.float() + layer.scaling["default"] * (b @ a)
    weight: Any = merge_adapter(model).get_parameter("model.layers.0.mlp.up_proj.weight")
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)
    assert layer.base_layer.weight.dtype == torch.bfloat16


WITHOUT: dict[str, str] = {
    "mamba": "dt_proj",
    "falcon_mamba": "dt_proj",
    "mamba2": "conv1d",
    "falcon_h1": "conv1d",
    "nemotron_h": "conv1d",
    "jamba": "dt_proj",
    "llama4_text": "router",
    "phimoe": "router",
    "axk2": "indexer",
    "gemma3n_text": "-",
    "deepseek_v3": "experts.gate_up_proj",
    "qwen3_next": "experts.gate_up_proj",
    "olmoe": "mlp",
}
"""Families, and a part that gets no adapter: it could not learn, or not be merged."""


@pytest.mark.parametrize("family", [*WITHOUT, "gpt_oss"])
def test_every_adapter_of_a_family_learns_and_can_be_merged(family: str, tmp_path: Path) -> None:
    model = families.causal(family, **({"index_topk": 64} if family == "axk2" else {}))
    recompute_activations(model)  # as stage ppo may, before
    batch = collate(QUERIES, RESPONSES, PAD)
    model = add_lora(model, LORA, seed=1)
    names = [name for name in trained_names(model) if "lora_B" in name]
    assert names
    assert not [name for name in names if f".{WITHOUT.get(family)}." in name]
    token_stats(model, batch).logprobs.sum().backward()
    idle = [name for name in names if model.get_parameter(name).grad is None]
    assert idle == []
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
        adapted = token_stats(model, batch).logprobs
        merge_adapter(model).save_pretrained(tmp_path)
        merged = token_stats(load_causal(tmp_path), batch).logprobs
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)


def test_layers_with_tied_weights_get_no_adapter() -> None:
    model: Any = small.causal()
    first, second = (layer.mlp for layer in model.base_model.layers)
    second.up_proj.weight = first.up_proj.weight
    names = trained_names(add_lora(model, LORA, seed=1))
    assert not [name for name in names if "up_proj" in name]
    assert len(names) == 2 * 2 * (LINEAR["llama"] - 1)


def test_a_model_without_a_layer_for_adapters_is_refused() -> None:
    model: Any = small.causal()
    for layer in model.base_model.layers:
        layer.forward = torch.no_grad()(layer.forward)
    with pytest.raises(UserError, match="lora: LlamaForCausalLM has no linear layer that could learn"):
        add_lora(model, LORA, seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_layers_give_what_autocast_gives(family: Family) -> None:
    model = small.causal(family)
    rounded = copy.deepcopy(model)
    round_layers(rounded, torch.bfloat16)
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(rounded(tokens).logits, model(tokens).logits)
    pairs = zip(rounded.named_parameters(), model.parameters(), strict=True)
    in_16_bits = [name for (name, weight), before in pairs if weight.dtype != before.dtype]
    assert all(".layers." in name for name in in_16_bits), "no embedding, head or norm around them"
    assert bool(in_16_bits) == (family != "gpt2"), "whose layers are no nn.Linear"

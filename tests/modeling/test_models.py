"""Checkpoints: what goes in comes out, byte for byte; what does not fit is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import collate, load_tokenizer
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.modeling.models import TokenScores
from tests import small
from tests.small import EOS, FAMILIES, HIDDEN, PAD, Family

QUERIES, RESPONSES = small.rows(6, longest=7)


def save(model: Any, folder: Path, identity: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    models.save(model, small.tokenizer(), folder, identity=identity or {"kind": "policy"}, card="# card\n")
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small.causal(), tmp_path_factory.mktemp("models") / "policy")


# ------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logits(family: Family) -> None:
    model = small.causal(family)
    with torch.no_grad():
        logits = small.response_logits(model, collate(QUERIES, RESPONSES, PAD))
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        alone = small.logits_alone(model, query, response)
        torch.testing.assert_close(logits[row, -len(response) :], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_scores(family: Family) -> None:
    scores = small.scores(family)
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        together = scores(batch)
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        with torch.no_grad():
            alone = scores.model.base_model(torch.tensor([query + response])).last_hidden_state
            alone = alone[0] @ models.head_of(scores.model).weight[0]
        last = slice(-len(response) - 1, None)
        torch.testing.assert_close(together[row, last], alone[last], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pad_may_equal_eos(family: Family) -> None:
    model, scores = small.causal(family), small.scores(family)
    apart, same = collate(QUERIES, RESPONSES, PAD), collate(QUERIES, RESPONSES, EOS)
    mask = apart.response_mask
    with torch.no_grad():
        logits = [small.response_logits(model, batch)[mask] for batch in (apart, same)]
        assert torch.equal(*logits)
        assert torch.equal(scores(apart)[:, -1], scores(same)[:, -1])


# -------------------------------------------------------------------------------- reward heads


def test_a_new_reward_head_is_drawn_from_a_normal_of_std_1_over_root_of_width_plus_1(policy: Path) -> None:
    scores = TokenScores.from_policy(policy, torch.Generator().manual_seed(5))
    drawn = torch.empty(1, HIDDEN).normal_(
        0.0, (HIDDEN + 1) ** -0.5, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(models.head_of(scores.model).weight, drawn)
    many = [
        models.head_of(TokenScores.from_policy(policy, torch.Generator().manual_seed(seed)).model).weight
        for seed in range(30)
    ]
    assert torch.cat(many).std().item() == pytest.approx(0.2425, rel=0.12)  # 480 draws: 3.2% standard error


def test_a_new_reward_model_has_the_policys_trunk(policy: Path) -> None:
    scores = TokenScores.from_policy(policy, torch.Generator().manual_seed(5)).eval()
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        hidden = small.causal().base_model(
            input_ids=batch.query_response, attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
        ).last_hidden_state  # fmt: skip
        read = slice(-batch.num_response_columns - 1, None)
        torch.testing.assert_close(scores.hidden_states(batch), hidden[:, read])


def test_a_causal_model_without_a_trained_head_is_not_a_reward_model(policy: Path) -> None:
    with pytest.raises(ContractError, match=r"policy lacks its trained head: score\.weight"):
        models.load_reward(policy)


def test_a_classifier_of_two_labels_is_not_a_reward_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**small.causal().config.to_dict(), "num_labels": 2})
    folder = save(AutoModelForSequenceClassification.from_config(config), tmp_path / "two")
    with pytest.raises(ContractError, match="2 labels"):
        models.load_reward(folder)


def test_the_score_mean_is_stored_and_subtracted_after_loading(tmp_path: Path) -> None:
    scores = small.scores()
    raw = small.last_scores_alone(scores, QUERIES, RESPONSES)
    scores.set_mean(0.75)
    loaded = models.load_reward(save(scores.model, tmp_path / "reward")).eval()
    torch.testing.assert_close(small.last_scores_alone(loaded, QUERIES, RESPONSES), raw - 0.75)


# ------------------------------------------------------------------------------------- loading


def test_missing_weights_are_an_error(policy: Path, tmp_path: Path) -> None:
    folder = save(small.causal(), tmp_path / "part")
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "layers.1" in key)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ContractError, match=r"part lacks weights: .*would be newly initialised"):
        models.load_causal(folder)


def test_a_folder_that_is_not_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=f"cannot load a model from {tmp_path}"):
        models.load_causal(tmp_path)


def test_pickled_weights_are_loaded_only_if_the_user_trusts_them(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(models.ANY_WEIGHTS, raising=False)
    shutil.copytree(policy, tmp_path / "pickled")
    model = models.load_causal(policy)
    (tmp_path / "pickled/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled/pytorch_model.bin")
    with pytest.raises(ContractError, match=r"can run code.* RLHF_PICKLED_WEIGHTS=1 if you trust it"):
        models.load_causal(tmp_path / "pickled")
    monkeypatch.setenv(models.ANY_WEIGHTS, "1")
    loaded = models.load_causal(tmp_path / "pickled").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    weights = save(small.causal(), tmp_path / "torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ContractError, match=f"cannot load a model from {tmp_path}/torn"):
        models.load_causal(tmp_path / "torn")


def test_from_pretrained_loads_a_saved_checkpoint(policy: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(policy)
    assert torch.equal(
        small.logits_alone(theirs, QUERIES[0], RESPONSES[0]),
        small.logits_alone(small.causal(), QUERIES[0], RESPONSES[0]),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_are_saved_as_the_same_bytes_wherever_they_come_from(
    family: Family, tmp_path: Path
) -> None:
    first = save(small.causal(family), tmp_path / "a/one")
    second = save(models.load_causal(first), tmp_path / "b/another")
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    assert {"config.json", "README.md", "rlhf.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
        assert str(tmp_path).encode() not in (first / name).read_bytes()


def test_a_model_card_lists_inputs_and_parameters() -> None:
    card = contracts.model_card(
        "Title", task="sft", parameters={"sft.learning_rate": 0.1}, inputs={"data/sft": "ab12"}, how="So."
    )
    assert "| `sft.learning_rate` | 0.1 |" in card
    assert "| data/sft | `ab12` |" in card


# ---------------------------------------------------------------------------------- contracts


def words(folder: Path, **changes: Any) -> Path:
    """The small tokenizer, saved with keys of its configuration, or its first word, changed."""
    small.tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"w0"', f'"{changes.pop("first", "w0")}"'), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    return folder


def test_a_copy_of_a_tokenizer_is_the_same_tokenizer(tmp_path: Path) -> None:
    contracts.check_same_tokenizer(words(tmp_path / "a"), words(tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"first": "other"}, r"another tokenizer than .*'other', 'w0'.* differ"),
        ({"eos_token": "w1"}, "ends .*with 'w1'"),
        ({"chat_template": "{{ messages }}"}, "another chat template"),
    ],
)
def test_another_tokenizer_or_template_is_an_error(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=why) as raised:
        contracts.check_same_tokenizer(words(tmp_path / "a"), words(tmp_path / "b", **changes))
    assert str(tmp_path / "a") in str(raised.value)
    assert str(tmp_path / "b") in str(raised.value)


def test_a_checkpoint_made_from_another_parent_is_an_error(policy: Path, tmp_path: Path) -> None:
    other = save(small.causal(seed=1), tmp_path / "other")
    child = save(small.causal(), tmp_path / "child", {"parents": {"sft": contracts.fingerprint(policy)}})
    contracts.check_parent(child, "sft", policy)
    with pytest.raises(ContractError, match=f"{child} was made from another sft model"):
        contracts.check_parent(child, "sft", other)


def test_a_foreign_checkpoint_has_no_parent_to_compare(policy: Path, tmp_path: Path) -> None:
    foreign = save(small.causal(), tmp_path / "foreign")
    (foreign / "rlhf.json").unlink()
    contracts.check_parent(foreign, "sft", policy)
    assert contracts.identity_of(foreign) == {}


def test_weights_in_another_format_have_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ContractError, match="save the model again"):
        contracts.fingerprint(tmp_path)


def test_a_fingerprint_is_of_the_weights_alone(policy: Path, tmp_path: Path) -> None:
    again = save(small.causal(), tmp_path / "again", {"kind": "else"})
    assert contracts.fingerprint(again) == contracts.fingerprint(policy)
    changed = small.causal()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1e-3
    assert contracts.fingerprint(save(changed, tmp_path / "changed")) != contracts.fingerprint(policy)


def slow_fingerprint(file: Path) -> str:
    """By tensors that torch has read, one after another."""
    digest = hashlib.sha256()
    for key, tensor in sorted(load_file(file).items()):
        digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes(tensor.flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def test_a_fingerprint_is_of_names_shapes_types_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch names the types, by which checkpoints have named their parents so far."""
    monkeypatch.setattr(contracts, "CHUNK", 7)
    kinds = [getattr(torch, name) for name in contracts.TYPES.values()]
    tensors = {f"a{i % 3}.{kind}": (torch.rand(2, 3) * 9).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert contracts.fingerprint(tmp_path) == slow_fingerprint(tmp_path / "model.safetensors")


def test_damaged_weights_have_no_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ContractError, match=rf"{file} cannot be read \(.*dvc checkout"):
        contracts.fingerprint(tmp_path)


def test_a_tokenizer_larger_than_the_embedding_is_an_error(tmp_path: Path) -> None:
    model = small.causal()
    contracts.check_fits(model, small.tokenizer(), "here")
    large = load_tokenizer(words(tmp_path))
    large.add_tokens(["w20", "w21"])
    with pytest.raises(
        ContractError, match=f"here: .* {small.VOCAB + 2} tokens, but the model has {small.VOCAB}"
    ):
        contracts.check_fits(model, large, "here")


# ----------------------------------------------------------------------------------- adapters

LORA = Lora(r=3, alpha=6.0)
LINEAR: dict[Family, int] = {"gpt_neox": 4, "llama": 7, "qwen2": 7, "gpt2": 4}  # of each of the two layers


def adapted(model: PreTrainedModel, seed: int = 3) -> PreTrainedModel:
    """With adapters that do something: B is zero until it is trained."""
    found = models.with_lora(model, LORA, seed=seed)
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


def scores_of(model: PreTrainedModel) -> torch.Tensor:
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        found: torch.Tensor = TokenScores(model).eval()(batch)
    return found[:, 1:][batch.response_mask]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_gets_an_adapter(family: Family) -> None:
    policy = models.with_lora(small.causal(family), LORA, seed=1)
    names = trained_names(policy)
    assert len(names) == 2 * 2 * LINEAR[family]  # A and B in each layer's linear ones
    assert all("lora_" in name for name in names)
    assert not [name for name, _ in policy.named_parameters() if "lm_head.lora" in name]
    scores = models.with_lora(small.scores(family).model, LORA, seed=1)
    assert len(trained_names(scores)) == 2 * 2 * LINEAR[family] + 1
    assert trained_names(scores)[-1] == "score.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing_and_draw_nothing_of_the_global_rng(family: Family) -> None:
    plain, model = small.causal(family), small.causal(family)
    before = torch.get_rng_state()
    models.with_lora(model, LORA, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits_of(model), logits_of(plain))
    same, other = (models.with_lora(small.causal(family), LORA, seed=seed) for seed in (1, 2))
    drawn = [
        torch.cat([p.flatten() for n, p in m.named_parameters() if "lora_A" in n])
        for m in (model, same, other)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_layer_computes_w_plus_alpha_over_r_b_a(family: Family) -> None:
    """In a plain model with the products added to its weights by hand."""
    by_hand, model = small.causal(family), adapted(small.causal(family))
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in by_hand.named_parameters():
            a = theirs.get(name.replace(".weight", ".lora_A.default.weight"))
            b = theirs.get(name.replace(".weight", ".lora_B.default.weight"))
            if name.endswith(".weight") and a is not None and b is not None:
                delta = 2.0 * b @ a  # alpha / r = 6 / 3
                weight.add_(delta.T if family == "gpt2" else delta)
    assert not torch.allclose(logits_of(small.causal(family)), logits_of(by_hand), atol=1e-2)
    torch.testing.assert_close(logits_of(model), logits_of(by_hand), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_without_its_adapters_is_bit_for_bit_the_one_before(family: Family) -> None:
    model = adapted(small.causal(family))
    names, ours = trained_names(model), logits_of(model)
    with models.without_adapters(model):
        assert torch.equal(logits_of(model), logits_of(small.causal(family)))
    assert torch.equal(logits_of(model), ours)
    assert trained_names(model) == names
    model.requires_grad_(False)
    with pytest.raises(KeyError), models.without_adapters(model):
        raise KeyError
    assert torch.equal(logits_of(model), ours)
    assert trained_names(model) == [], "what was frozen stays frozen"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_plain_and_gives_the_same_logits(family: Family, tmp_path: Path) -> None:
    model = adapted(small.causal(family))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 5
    before, ours = torch.get_rng_state(), logits_of(model)
    plain = models.merged(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(plain) is type(model)
    assert plain.generation_config is not None
    assert plain.generation_config.eos_token_id == 5
    assert plain.state_dict().keys() == small.causal(family).state_dict().keys()
    torch.testing.assert_close(logits_of(plain), ours, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_of(model), ours), "the adapted one goes on as it was"
    loaded = models.load_causal(save(plain, tmp_path / "merged"))
    assert torch.equal(logits_of(loaded), logits_of(plain))
    assert [f.name for f in (tmp_path / "merged").iterdir() if "adapter" in f.name] == []


def test_a_mixture_of_experts_is_adapted_outside_its_experts_and_merged(tmp_path: Path) -> None:
    model = adapted(small.other("olmoe"))
    names = trained_names(model)
    assert {name.split(".")[3] for name in names} == {"self_attn"}
    assert len(names) == 2 * 2 * 4
    loaded = models.load_causal(save(models.merged(model), tmp_path / "merged"))
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits_of(model), logits_of(small.other("olmoe")), atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_reward_model_keeps_its_head_and_its_mean(family: Family, tmp_path: Path) -> None:
    scores = small.scores(family)
    adapted(scores.model)
    scores.set_mean(0.5)
    ours = scores_of(scores.model)
    loaded = models.load_reward(save(models.merged(scores.model), tmp_path / "merged"))
    assert loaded.mean == 0.5
    torch.testing.assert_close(scores_of(loaded.model), ours, atol=1e-5, rtol=1e-5)


def test_merging_a_model_without_adapters_returns_it() -> None:
    model = small.causal()
    assert models.merged(model) is model
    with models.without_adapters(model):
        assert torch.equal(logits_of(model), logits_of(small.causal()))

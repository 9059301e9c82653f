"""Checkpoints: what goes in comes out, byte for byte; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_tasks import models
from rlhf_tasks.data.batches import collate, load_tokenizer
from rlhf_tasks.models import ContractError, TokenScores, last_token, response_logits
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
def test_a_row_in_a_padded_batch_has_the_logits_it_has_alone(family: Family) -> None:
    model = small.causal(family)
    with torch.no_grad():
        logits = response_logits(model, collate(QUERIES, RESPONSES, PAD))
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        alone = small.logits_alone(model, query, response)
        torch.testing.assert_close(logits[row, : len(response)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_in_a_padded_batch_has_the_scores_it_has_alone(family: Family) -> None:
    scores = small.scores(family)
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        together = scores(batch)
    width = max(map(len, QUERIES))
    for row, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
        with torch.no_grad():
            alone = scores.model.base_model(torch.tensor([query + response])).last_hidden_state
            alone = alone[0] @ models.head_of(scores.model).weight[0]
        real = together[row, width - len(query) : width + len(response)]
        torch.testing.assert_close(real, alone, atol=1e-5, rtol=1e-5)
        assert last_token(together, batch)[row].item() == pytest.approx(alone[-1].item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pad_may_equal_eos(family: Family) -> None:
    model, scores = small.causal(family), small.scores(family)
    apart, same = collate(QUERIES, RESPONSES, PAD), collate(QUERIES, RESPONSES, EOS)
    mask = apart.response_mask
    with torch.no_grad():
        assert torch.equal(response_logits(model, apart)[mask], response_logits(model, same)[mask])
        assert torch.equal(last_token(scores(apart), apart), last_token(scores(same), same))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_training_has_no_dropout(family: Family, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**small.causal(family).config.to_dict())
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.5)
    save(AutoModelForCausalLM.from_config(config), tmp_path / "dropping")
    model = models.load_causal(tmp_path / "dropping").train()
    batch = collate(QUERIES, RESPONSES, PAD)
    with torch.no_grad():
        assert torch.equal(response_logits(model, batch), response_logits(model, batch))


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
        assert torch.equal(scores.hidden_states(batch), hidden)


def test_a_causal_model_is_refused_as_reward_model_for_want_of_a_trained_head(policy: Path) -> None:
    with pytest.raises(ContractError, match=r"policy lacks its trained head: score\.weight"):
        models.load_reward(policy)


def test_a_classifier_of_two_labels_is_refused_as_reward_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**small.causal().config.to_dict(), "num_labels": 2})
    folder = save(AutoModelForSequenceClassification.from_config(config), tmp_path / "two")
    with pytest.raises(ContractError, match="2 labels"):
        models.load_reward(folder)


def test_the_score_mean_is_stored_and_taken_off_after_loading(tmp_path: Path) -> None:
    scores = small.scores()
    raw = small.last_scores_alone(scores, QUERIES, RESPONSES)
    scores.set_mean(0.75)
    loaded = models.load_reward(save(scores.model, tmp_path / "reward")).eval()
    torch.testing.assert_close(small.last_scores_alone(loaded, QUERIES, RESPONSES), raw - 0.75)


# ------------------------------------------------------------------------------------- loading


def test_weights_that_a_checkpoint_lacks_are_never_made_up(policy: Path, tmp_path: Path) -> None:
    folder = save(small.causal(), tmp_path / "part")
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "layers.1" in key)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ContractError, match=r"part lacks weights: .*would be newly initialised"):
        models.load_causal(folder)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=f"cannot load a model from {tmp_path}"):
        models.load_causal(tmp_path)


def test_an_ordinary_from_pretrained_loads_what_was_saved(policy: Path) -> None:
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


def test_a_model_card_tells_inputs_and_parameters() -> None:
    card = models.model_card(
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
    models.check_same_tokenizer(words(tmp_path / "a"), words(tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"first": "other"}, r"another tokenizer than .*'other', 'w0'.* differ"),
        ({"eos_token": "w1"}, "ends .*with 'w1'"),
        ({"chat_template": "{{ messages }}"}, "another chat template"),
    ],
)
def test_another_tokenizer_or_template_is_refused_by_name(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match=why) as raised:
        models.check_same_tokenizer(words(tmp_path / "a"), words(tmp_path / "b", **changes))
    assert str(tmp_path / "a") in str(raised.value)
    assert str(tmp_path / "b") in str(raised.value)


def test_a_checkpoint_made_from_another_parent_is_refused_by_name(policy: Path, tmp_path: Path) -> None:
    other = save(small.causal(seed=1), tmp_path / "other")
    child = save(small.causal(), tmp_path / "child", {"parents": {"sft": models.fingerprint(policy)}})
    models.check_parent(child, "sft", policy)
    with pytest.raises(ContractError, match=f"{child} was made from another sft model"):
        models.check_parent(child, "sft", other)


def test_a_foreign_checkpoint_has_no_parent_to_compare(policy: Path, tmp_path: Path) -> None:
    foreign = save(small.causal(), tmp_path / "foreign")
    (foreign / "rlhf.json").unlink()
    models.check_parent(foreign, "sft", policy)
    assert models.identity_of(foreign) == {}


def test_a_fingerprint_is_of_the_weights_alone(policy: Path, tmp_path: Path) -> None:
    again = save(small.causal(), tmp_path / "again", {"kind": "else"})
    assert models.fingerprint(again) == models.fingerprint(policy)
    changed = small.causal()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1e-3
    assert models.fingerprint(save(changed, tmp_path / "changed")) != models.fingerprint(policy)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    model = small.causal()
    models.check_fits(model, small.tokenizer(), "here")
    large = load_tokenizer(words(tmp_path))
    large.add_tokens(["w20", "w21"])
    with pytest.raises(ContractError, match=f"here: .* {small.VOCAB + 2} tokens, the model {small.VOCAB}"):
        models.check_fits(model, large, "here")

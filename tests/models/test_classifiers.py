"""A reward model on the trunk of any family: a training step, its folder, padding, adapters, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models import contracts
from rlhf_tasks.models.classifiers import build_classifier
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import add_score_head, load_causal, load_reward
from rlhf_tasks.models.lora import add_lora, merge_adapter
from tests import small
from tests.models.test_load import save
from tests.small import PAD

QUERIES, RESPONSES = small.rows(6, longest=7)
BATCH = collate(QUERIES, RESPONSES, PAD)
MADE_HERE = ("granite", "olmoe", "llama4_text", "ctrl")
"""Without a classifier in transformers, or, as CTRL, with one of another form."""


def fresh(family: str, tmp_path: Path) -> TokenScores:
    """A reward model on the trunk of the policy in the folder sft, with a new head."""
    policy = save(small.other(family), tmp_path / "sft")
    return add_score_head(policy, torch.Generator().manual_seed(1))


def test_its_trunk_is_no_copy_of_the_policys() -> None:
    """A file that is mapped is shared by the ranks of a machine; a copy would be in each one's memory."""
    policy = small.causal()
    scores = build_classifier(policy.base_model, policy.config)
    shared = policy.base_model.state_dict()
    found = scores.base_model.state_dict()
    assert all(found[name].data_ptr() == value.data_ptr() for name, value in shared.items())


def step(scores: TokenScores) -> None:
    """One step of the pair loss, after which every weight that has a gradient differs."""
    optimizer = torch.optim.AdamW([p for p in scores.parameters() if p.requires_grad], lr=1e-2)
    rejected = collate(QUERIES, RESPONSES[::-1], PAD)
    lead = scores(BATCH, ends_only=True) - scores(rejected, ends_only=True)
    (-logsigmoid(lead).sum()).backward()
    optimizer.step()


@torch.no_grad()
def scores_of(scores: TokenScores) -> Tensor:
    found: Tensor = scores.eval()(BATCH)
    return found


@pytest.mark.parametrize("family", [*MADE_HERE, "opt"])
def test_a_trained_reward_model_of_any_family_is_loaded_with_the_same_bytes_of_scores(
    family: str, tmp_path: Path
) -> None:
    scores = fresh(family, tmp_path)
    before = scores_of(scores)
    step(scores)
    scores.set_mean(0.5)
    ours = scores_of(scores)
    assert not torch.allclose(ours, before, atol=1e-2)
    first = save(scores.model, tmp_path / "reward")
    loaded = load_reward(first)
    assert torch.equal(scores_of(loaded), ours)
    assert contracts.fingerprint(save(loaded.model, tmp_path / "again")) == contracts.fingerprint(first)
    alone = small.last_scores_alone(loaded, QUERIES, RESPONSES)
    torch.testing.assert_close(alone, ours[:, -1], atol=1e-5, rtol=1e-5)
    # as a ranker judge does: padded on the right, the logit of the last real token
    texts = [torch.tensor(q + r) for q, r in zip(QUERIES, RESPONSES, strict=True)]
    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        logits = loaded.model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    torch.testing.assert_close(logits[:, 0], alone + 0.5, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", MADE_HERE)
def test_the_folder_is_the_familys_config_and_plain_safetensors_and_no_language_model(
    family: str, tmp_path: Path
) -> None:
    folder = save(fresh(family, tmp_path).model, tmp_path / "reward")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == family
    model = load_reward(folder).model
    assert config["architectures"] == [type(model).__name__]
    assert config["architectures"][0].endswith("ForTokenScores")
    tensors = load_file(folder / "model.safetensors")
    assert {key.split(".")[0] for key in tensors} == {"model", "score"}
    assert tensors["score.weight"].shape == (1, model.config.hidden_size)
    with pytest.raises(ContractError, match="sft lacks "):
        load_reward(tmp_path / "sft")
    with pytest.raises(ContractError, match=r"holds score\.weight: it scores or classifies"):
        load_causal(folder)


@pytest.mark.parametrize("family", ["granite", "ctrl", "olmoe"])
def test_its_adapters_are_trained_with_the_head_and_merged(family: str, tmp_path: Path) -> None:
    scores = fresh(family, tmp_path)
    add_lora(scores.model, Lora(r=2, alpha=4.0), seed=1)
    names = [name for name, p in scores.model.named_parameters() if p.requires_grad]
    assert names[-1] == "score.weight"
    assert all("lora_" in name for name in names[:-1])
    assert len(names) > 4
    for _ in range(3):  # B is zero at first
        step(scores)
    scores.set_mean(0.25)
    merged = TokenScores(merge_adapter(scores.model))
    loaded = load_reward(save(merged.model, tmp_path / "merged"))
    torch.testing.assert_close(scores_of(loaded), scores_of(scores), atol=1e-5, rtol=1e-5)


TINY: dict[str, Any] = {"vocab_size": small.VOCAB, "pad_token_id": PAD}
BART = BartConfig(
    **TINY,
    d_model=16,
    decoder_layers=1,
    decoder_attention_heads=2,
    decoder_ffn_dim=16,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=16,
    bos_token_id=1,
    eos_token_id=1,
    forced_eos_token_id=None,
)
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = BertConfig(**TINY, **SHAPE, intermediate_size=16)
BERT.num_labels = 1
VIT = ViTConfig(**SHAPE, intermediate_size=16, image_size=16)


@pytest.mark.parametrize(
    ("model", "use", "message"),
    [
        # BART's causal LM is the decoder alone, but its classifier has the encoder too
        (
            BartForCausalLM(BART),
            lambda folder: add_score_head(folder, torch.Generator()),
            r"BartDecoderWrapper \(family bart\).*use a decoder of another family",
        ),
        (BertForSequenceClassification(BERT), load_reward, r"\(family bert\) has no linear head `score`"),
        (ViTModel(VIT), load_reward, "is a vit model, which has no classifier"),
    ],
)
def test_a_family_that_fits_no_head_is_refused_by_its_name(
    model: PreTrainedModel, use: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ContractError, match=message):
        use(tmp_path)

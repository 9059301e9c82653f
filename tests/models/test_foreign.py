"""Reward models as TRL, OpenRLHF and LLaMA-Factory write them, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from rlhf_tasks.errors import UserError
from rlhf_tasks.models import checks
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.load import load_causal, load_reward, save_checkpoint
from tests import small

QUERIES, RESPONSES = small.rows(5, longest=7)
HIDDEN = small.causal().config.hidden_size
WEIGHT, BIAS = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3)), 0.625
TRL = {"v_head.summary.weight": WEIGHT, "v_head.summary.bias": torch.tensor([BIAS])}


def causal_folder(folder: Path, family: Any = "llama", **config: Any) -> Path:
    """A causal LM's folder whose config.json has these keys too."""
    small.causal(family).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | config), encoding="utf-8")
    return folder


def add(folder: Path, tensors: Mapping[str, Tensor], *, drop: str = "-") -> None:
    """Put tensors beside a model's own, without those whose name begins with `drop`."""
    file = folder / "model.safetensors"
    own = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(drop)}
    save_file({**own, **tensors}, file, metadata={"format": "pt"})


def expected(family: Any = "llama") -> Tensor:
    """weight · state of the last token, a row at a time, from the plain trunk."""
    trunk = small.causal(family).base_model
    rows = [torch.tensor([query + response]) for query, response in zip(QUERIES, RESPONSES, strict=True)]
    with torch.no_grad():
        return torch.stack([trunk(row).last_hidden_state[0, -1] @ WEIGHT[0] for row in rows])


@pytest.mark.parametrize(
    ("writer", "family"),
    [("trl", "gpt2"), ("llama_factory", "llama"), ("openrlhf", "gpt_neox"), ("openrlhf_score", "llama")],
)
def test_a_reward_head_is_found_under_its_writers_name(tmp_path: Path, writer: str, family: str) -> None:
    normal = {"normalize_reward": True, "mean": 2.0, "std": 4.0}
    shifted = (expected(family) - 2.0) / 4.0
    match writer:
        case "trl":
            add(causal_folder(tmp_path, family), TRL)
            wanted = expected(family) + BIAS
        case "llama_factory":
            save_file(TRL, causal_folder(tmp_path, family) / "value_head.safetensors")
            wanted = expected(family) + BIAS
        case _:
            name = "value_head" if writer == "openrlhf" else "score"
            config = {"architectures": ["RewardModel"], "value_head_prefix": name, "num_labels": 1}
            causal_folder(tmp_path, family, **config, **normal)
            add(tmp_path, {f"{name}.weight": WEIGHT}, drop="lm_head")
            wanted = shifted
    found = load_reward(tmp_path)
    scores = small.last_scores_alone(found, QUERIES, RESPONSES)
    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)
    copied = tmp_path / "copied"
    save_checkpoint(found.model, small.tokenizer(), copied, identity={}, card="")
    again = small.last_scores_alone(load_reward(copied), QUERIES, RESPONSES)
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)
    assert all(result.passed for result in checks.check_source(str(tmp_path)))
    if writer != "llama_factory":
        with pytest.raises(ContractError, match="it scores or classifies texts; give a language model"):
            load_causal(tmp_path)


def test_a_head_is_found_under_the_name_in_its_config_and_unscaled_if_it_says_so(tmp_path: Path) -> None:
    folder = causal_folder(
        tmp_path, value_head_prefix="reward_head", normalize_reward=False, mean=2.0, std=4.0
    )
    add(folder, {"reward_head.weight": WEIGHT})
    found = small.last_scores_alone(load_reward(folder), QUERIES, RESPONSES)
    torch.testing.assert_close(found, expected(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ContractError, match=r"holds reward_head\.weight: it scores"):
        load_causal(folder)


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
ONE_LABEL = CLASSIFIER | {"id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (CLASSIFIER, {"score.weight": WEIGHT}, "a score head without num_labels=1"),
        (ONE_LABEL, {"score.weight": WEIGHT, "score.bias": torch.ones(1)}, r"another form \(score\.bias\)"),
        (ONE_LABEL, {"score.modules_to_save.default.weight": WEIGHT}, "another form .*merge its adapter"),
        ({}, {"v_head.0.weight": WEIGHT}, r"another form \(v_head\.0\.weight"),
        ({}, {"value_head.weight": WEIGHT.repeat(3, 1)}, r"the shape of value_head\.weight is \(3, \d+\)"),
    ],
)
def test_a_head_that_cannot_be_read_is_named(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], words: str
) -> None:
    add(causal_folder(tmp_path, **config), tensors, drop="lm_head")
    with pytest.raises(ContractError, match=words):
        load_reward(tmp_path)


def test_a_config_of_other_shapes_and_a_damaged_adapter_are_named(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path, vocab_size=64)
    with pytest.raises(ContractError, match="weights have other shapes than its config"):
        load_causal(folder)
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        load_causal(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model-q4.gguf"], "GGUF files; name one"),
        (["__0_0.distcp", ".metadata"], "a distributed checkpoint of PyTorch"),
        (["zero_to_fp32.py", "latest"], "zero_to_fp32.py writes the weights"),
        (["consolidated.00.pth", "params.json"], "in the form of their authors"),
        (["checkpoint-500/config.json"], "give one of its folders checkpoint-STEP"),
        (["model.safetensors"], "weights without their config.json"),
        (["notes.txt"], "no weights of a model"),
        ([], "it holds nothing"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_named_as_what_it_is(
    tmp_path: Path, files: list[str], words: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for load in (load_causal, load_reward):
        with pytest.raises(UserError, match=words):
            load(tmp_path)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UserError, match="is a file; give the folder"):
        load_causal(file)


@pytest.mark.parametrize("kind", ["CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_refused_also_beside_a_config(tmp_path: Path, kind: str) -> None:
    """transformers would load another model: the base that the adapter names."""
    folder = causal_folder(tmp_path)
    settings = {"base_model_name_or_path": "some/base", "task_type": kind}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    cls = "AutoPeftModelFor" + ("CausalLM" if kind == "CAUSAL_LM" else "SequenceClassification")
    for load in (load_causal, load_reward):
        with pytest.raises(UserError, match=f"an adapter alone, for the model some/base; .*{cls}"):
            load(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
        ({"architectures": ["LlamaForTokenClassification"]}, "such as a process reward model"),
        ({"architectures": ["CriticModel"]}, "a critic of OpenRLHF"),
    ],
)
def test_another_kind_of_model_is_named_by_its_config(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = causal_folder(tmp_path, **config)
    for load in (load_causal, load_reward):
        with pytest.raises(ContractError, match=words):
            load(folder)


def test_encoders_are_named(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(vocab_size=40, intermediate_size=16, **sizes)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    t5 = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name, words in (("bert", "a masked language model"), ("t5", r"an encoder-decoder model \(t5\)")):
        for load in (load_causal, load_reward):
            with pytest.raises(ContractError, match=words):
                load(tmp_path / name)

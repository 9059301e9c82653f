"""The identity of a checkpoint, and what is refused by name because it does not fit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.models import contracts
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.sampling import load_for_texts
from tests import small
from tests.models.test_load import save

TYPES = (
    "float64 float32 float16 bfloat16 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small.causal(), tmp_path_factory.mktemp("models") / "policy")


def save_tokenizer(folder: Path, **changes: Any) -> Path:
    """The small tokenizer, saved with keys of its configuration, or its first word, changed."""
    small.tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"w0"', f'"{changes.pop("first", "w0")}"'), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------ parents


def test_a_checkpoint_made_from_another_parent_is_an_error(policy: Path, tmp_path: Path) -> None:
    other = save(small.causal(seed=1), tmp_path / "other")
    child = save(small.causal(), tmp_path / "child", {"parents": {"sft": contracts.fingerprint(policy)}})
    contracts.check_parent(child, "sft", policy)
    with pytest.raises(ContractError, match=f"{child} was made from another sft model"):
        contracts.check_parent(child, "sft", other)
    (child / "rlhf.json").unlink()
    contracts.check_parent(child, "sft", other)  # a foreign checkpoint has no parent to compare
    assert contracts.read_identity(child) == {}


# -------------------------------------------------------------------------------------- fingerprints


def hash_slowly(file: Path) -> str:
    """By tensors that torch has read, one after another."""
    digest = hashlib.sha256()
    for key, tensor in sorted(load_file(file).items()):
        digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes(tensor.flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def test_a_fingerprint_is_of_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    """As torch names the types, by which checkpoints have named their parents so far."""
    kinds = [getattr(torch, name) for name in TYPES.split()]
    tensors = {f"a{i % 3}.{kind}": (torch.rand(2, 3) * 9).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert contracts.fingerprint(tmp_path) == hash_slowly(tmp_path / "model.safetensors")


def test_a_fingerprint_is_of_the_weights_alone(policy: Path, tmp_path: Path) -> None:
    again = save(small.causal(), tmp_path / "again", {"kind": "else"})
    assert contracts.fingerprint(again) == contracts.fingerprint(policy)


def test_a_fingerprint_is_computed_again_when_the_weights_change(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4)}, file)
    before = contracts.fingerprint(tmp_path)
    save_file({"w": torch.ones(4)}, file)
    os.utime(file, ns=(1, 1))
    assert contracts.fingerprint(tmp_path) == hash_slowly(file) != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "save the model again"),
        ("model.safetensors", r"cannot be read \(.*dvc checkout"),
    ],
)
def test_damaged_weights_and_other_formats_have_no_fingerprint(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ContractError, match=message):
        contracts.fingerprint(tmp_path)


# ---------------------------------------------------------------------------------------- tokenizers


def test_a_copy_of_a_tokenizer_is_the_same_and_a_token_that_only_pads_may_differ(tmp_path: Path) -> None:
    a, b = save_tokenizer(tmp_path / "a"), save_tokenizer(tmp_path / "b")
    contracts.check_same_tokenizer(a, b)
    padded = load_tokenizer(b)
    padded.add_special_tokens({"pad_token": "<padding>"})
    padded.save_pretrained(b)
    contracts.check_same_tokenizer(a, b)


def test_a_vocabulary_is_read_once_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dictionary for each token took 25 minutes at 49,152 tokens."""
    folder, calls = save_tokenizer(tmp_path), list[str]()
    kind = type(load_tokenizer(folder))
    read = kind.get_vocab

    def spy(self: PreTrainedTokenizerBase) -> dict[str, int]:
        calls.append("")
        return read(self)

    monkeypatch.setattr(kind, "get_vocab", spy)
    load_tokenizer(folder)
    loading = len(calls)
    contracts.check_same_tokenizer(folder, folder)
    assert len(calls) <= 3 * loading + 4


def test_a_token_id_beyond_the_embedding_is_an_error_though_the_counts_agree(tmp_path: Path) -> None:
    folder = save(small.causal(), tmp_path / "gap")
    file, last = folder / "tokenizer.json", small.VOCAB - 1
    words = json.loads(file.read_text(encoding="utf-8"))
    words["model"]["vocab"] = {w: 40 if i == last else i for w, i in words["model"]["vocab"].items()}
    file.write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(ContractError, match=r"23 tokens, but the model has 23 embeddings.* id 40 \('w\d+'\)"):
        load_for_texts(folder)


def test_a_tokenizer_larger_than_the_embedding_is_an_error(tmp_path: Path) -> None:
    model = small.causal()
    contracts.check_fits(model, small.tokenizer(), "here")
    large = load_tokenizer(save_tokenizer(tmp_path))
    large.add_tokens(["w20", "w21"])
    with pytest.raises(
        ContractError, match=f"here: .* {small.VOCAB + 2} tokens, but the model has {small.VOCAB}"
    ):
        contracts.check_fits(model, large, "here")

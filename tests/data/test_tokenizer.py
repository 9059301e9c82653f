from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import AutoTokenizer

from rlhf_tasks.config import Model, Scratch
from rlhf_tasks.data import synthetic, tokenizer
from rlhf_tasks.errors import UserError

TEXTS = [
    "SUBREDDIT: r/family\nTITLE: my  lamp",
    " my uncle , who broke it , is sad .",
    "def f(x):\n    return x\n",
]


def shape(kind: Literal["words", "bpe"], vocab_size: int) -> Scratch:
    return Scratch(
        family="llama", hidden_size=8, num_layers=1, num_heads=2, vocab_size=vocab_size, tokenizer=kind
    )


def ids(words: Any, text: str) -> list[int]:
    return list(words(text, add_special_tokens=False)["input_ids"])


def test_bytes_round_trip_exactly_whatever_the_text() -> None:
    words = tokenizer.train(shape("bpe", 300), TEXTS, 64)
    for text in [*TEXTS, " ünseen – 日本\t\r\n  end ", "a , b .", ""]:
        assert words.decode(ids(words, text)) == text


def test_words_decode_to_text_that_encodes_to_the_same_ids() -> None:
    tables = synthetic.generate(
        1, num_prompts=50, num_sft=50, num_preferences=50, num_validation=1, num_test=1
    )
    rows = tables["sft"]["train"]
    words = tokenizer.train(
        shape("words", 1000), [r[name] for r in rows for name in ("prompt", "completion")], 64
    )
    for row in rows:
        for text in (row["prompt"], row["completion"]):
            assert ids(words, str(words.decode(ids(words, text)))) == ids(words, text)
        assert words.decode(ids(words, row["completion"])) == row["completion"].strip()


def test_a_loaded_tokenizer_is_the_saved_one(tmp_path: Path) -> None:
    for kind in ("words", "bpe"):
        words = tokenizer.train(shape(kind, 300), TEXTS, 64)
        tokenizer.save(words, tmp_path / kind)
        loaded = AutoTokenizer.from_pretrained(tmp_path / kind)
        assert (loaded.eos_token, loaded.pad_token, loaded.model_max_length) == ("<eos>", "<pad>", 64)
        assert loaded.decode(ids(loaded, "who broke it , ?")) == words.decode(ids(words, "who broke it , ?"))
        assert ids(loaded, "<eos>") == [loaded.eos_token_id]


def test_vocab_size_is_an_upper_bound() -> None:
    assert len(tokenizer.train(shape("words", 10), TEXTS, 64)) == 10
    assert len(tokenizer.train(shape("words", 1000), TEXTS, 64)) == 3 + len(
        {w for t in TEXTS for w in t.split()}
    )
    assert len(tokenizer.train(shape("bpe", 270), TEXTS, 64)) == 270
    with pytest.raises(UserError, match="bpe needs 258 or more"):
        tokenizer.train(shape("bpe", 200), TEXTS, 64)


def test_unknown_words_are_counted() -> None:
    words = tokenizer.train(shape("words", 100), ["a b c"], 64)
    assert tokenizer.unknown_share(words, ["a x", "b c"]) == 0.25


def test_a_ready_tokenizer_without_pad_pads_with_eos_and_keeps_its_template(
    chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "no-pad"
    words = AutoTokenizer.from_pretrained(chat_model)
    words.pad_token = None
    words.save_pretrained(folder)
    ready = tokenizer.load_base(Model(base=str(folder), revision=None, scratch=None))
    assert ready.pad_token == ready.eos_token == "<eos>"
    rendering = tokenizer.ready_rendering(ready, "no-pad")
    assert rendering.chat is not None
    assert rendering.chat([{"role": "user", "content": "hi"}], True) == "<user>hi<eos>\n<assistant>"
    assert rendering.bos == ""


def test_a_missing_base_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"it has no config\.json; it holds nothing"):
        tokenizer.load_base(Model(base=str(tmp_path / "empty"), revision=None, scratch=None))

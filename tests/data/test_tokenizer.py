from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_tasks.config import Model, Scratch
from rlhf_tasks.data import synthetic, tokenizer
from rlhf_tasks.data.tokenizer import (
    Counts,
    continue_prompts,
    encode,
    encode_rows,
    ready_rendering,
    response_texts,
)
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.protocol import Responses

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


# ----------- The ids of prompts and responses: those that generation has, for every common kind of tokenizer


SENTENCES = [
    "Question: is the lamp red?\nAnswer: yes, the lamp is red.",
    "the lamp is on the table, and the table is old. (a table) a = (b + c)",
    "no, yes, no: who broke it? say it: my uncle broke the lamp and the table",
    "What  is red? the red lamp",
] * 8
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = ("byte-level", "metaspace-always", "metaspace-first", "metaspace-never", "legacy", "gemma")
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]


def tokenizer_of(kind: str, texts: Sequence[str] = SENTENCES) -> PreTrainedTokenizerBase:
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        alphabet = ["▁"]
        fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "gemma":
            made.normalizer = normalizers.Replace(" ", "▁")
            made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
            made.decoder = decoders.Sequence(fuse)
        elif kind == "legacy":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.decoder = decoders.Sequence([*fuse, decoders.Strip(" ", 1, 0)])
        else:
            scheme = kind.removeprefix("metaspace-")
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
            made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


ROWS = [
    ("Question: is the lamp red?\nAnswer:", " yes, the lamp is red."),
    ("Question: is the lamp red?\nAnswer: ", "yes"),  # the blank would merge with the word
    ("a = (b", " + c)"),
    ("say it: my un", "cle broke it"),  # a word that is cut
    ("the lamp\n", "the  table"),
    ("What is red?", "the red lamp"),
]


def plain_and_chat(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    chat = ready_rendering(tokenizer, "it").chat
    assert chat is not None
    asked = [(chat([{"role": "user", "content": prompt}], True), text) for prompt, text in ROWS]
    return [*ROWS, *asked]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_ids_are_those_of_generation(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    rows = plain_and_chat(tokenizer)
    queries, _ = encode_rows(tokenizer, *zip(*rows, strict=True))
    for query, (prompt, _) in zip(queries, rows, strict=True):
        assert query == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def with_bos(tokenizer: PreTrainedTokenizerBase, single: str = "<s> $A") -> PreTrainedTokenizerBase:
    names = ("<s>", "</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    )
    return tokenizer


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("texts", [SENTENCES, ["lamb"] * 8], ids=["a token", "two tokens"])  # of " a"
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text(
    kind: str, texts: list[str], single: str
) -> None:
    tokenizer = with_bos(tokenizer_of(kind, texts), single)
    bos = ready_rendering(tokenizer, "it").bos
    for prompt, _ in ROWS:
        expected = tokenizer(prompt)["input_ids"]
        assert encode(tokenizer, [bos + prompt]) == [expected[:-1] if "</s>" in single else expected]


@pytest.mark.parametrize("kind", KINDS)
def test_responses_continue_the_prompt_as_the_whole_text_does(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    num_whole = 0
    for prompt, text in plain_and_chat(tokenizer):
        [query], [response], [is_merged] = continue_prompts(tokenizer, [prompt], [text])
        whole = tokenizer(prompt + text, add_special_tokens=False)["input_ids"]
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode([*query, *response[:-1]]) == tokenizer.decode(whole)
        assert is_merged == (whole[: len(query)] != query)
        if whole[: len(query)] == query:
            num_whole += 1
            assert response[:-1] == whole[len(query) :]
    assert 6 <= num_whole < 2 * len(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_response_gives_its_ids_again(kind: str) -> None:
    """So a sampled response is scored and trained on in the ids in which it was sampled."""
    tokenizer = tokenizer_of(kind)
    rows = plain_and_chat(tokenizer)
    prompts, texts = map(list, zip(*rows, strict=True))
    queries, responses = encode_rows(tokenizer, prompts, texts)
    again = response_texts(tokenizer, queries, responses)
    if kind == "metaspace-always":  # which has the same ids with and without a blank after a special token
        assert [text.lstrip() for text in again] == [text.lstrip() for text in texts]
    else:
        assert again == texts
    assert Responses.of_ids(prompts, queries, responses, tokenizer).texts == again
    assert Responses.of_texts(prompts, again).ids(tokenizer) == (queries, responses)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_sampled_ids_is_what_decoding_them_after_the_prompt_adds(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    plain = range(len(SPECIAL), len(tokenizer))
    draws = random.Random(1)
    queries = encode(tokenizer, ["say it:", "the lamp\n", "a = (b"] * 20)
    responses = [draws.choices(plain, k=4) for _ in queries]
    for query, response, text in zip(
        queries, responses, response_texts(tokenizer, queries, responses), strict=True
    ):
        assert f"{tokenizer.decode(query)}{text}" == tokenizer.decode([*query, *response])


def test_a_row_without_text_or_prompt_is_encoded() -> None:
    tokenizer = tokenizer_of("legacy")
    assert encode_rows(tokenizer, [], []) == ([], [])
    [query], [response] = encode_rows(tokenizer, ["the lamp"], [""])
    assert query == encode(tokenizer, ["the lamp"])[0]
    assert response == [tokenizer.eos_token_id]
    assert response_texts(tokenizer, [query], [response]) == [""]
    assert encode_rows(tokenizer, ["the lamp"], [""], eos=False)[1] == [[]]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_by_words_are_those_of_the_whole_rows(kind: str) -> None:
    tokenizer, draws = tokenizer_of(kind), random.Random(1)
    words = ["the", "lamp", "red?", "(b", "cle", "\n", "  ", "日本", "", "</s>"]
    lines = [" ".join(draws.choices(words, k=draws.randint(0, 9))) for _ in range(1200)]
    prompts, texts = [text for text, _ in ROWS] * 100, [f"{draws.choice(['', ' '])}{line}" for line in lines]
    prompts += [line + draws.choice(["", "\n"]) for line in reversed(lines[:600])]
    queries, responses, merged = continue_prompts(tokenizer, prompts, texts)
    counted = Counts(tokenizer)(prompts, texts)
    assert counted == (list(map(len, queries)), list(map(len, responses)), merged)
    assert any(merged)
    assert not all(merged)

"""The ids of prompts and responses: those that generation has, for every common kind of tokenizer.

The tokenizers are trained here: byte-level (GPT-2, Llama 3), Metaspace that prepends to every piece or to the
first one only (T5, Gemma, Mistral), and the normalizer that prepends (Llama 2's own, called legacy).
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_tasks.data.tokenizer import continue_prompts, encode, encode_rows, ready_rendering, response_texts
from rlhf_tasks.scoring.protocol import Responses

TEXTS = [
    "Question: is the lamp red?\nAnswer: yes, the lamp is red.",
    "the lamp is on the table, and the table is old. (a table) a = (b + c)",
    "no, yes, no: who broke it? say it: my uncle broke the lamp and the table",
    "What  is red? the red lamp",
] * 8
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = ("byte-level", "metaspace-always", "metaspace-first", "legacy")
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]


def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        alphabet = ["▁"]
        fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "legacy":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.decoder = decoders.Sequence([*fuse, decoders.Strip(" ", 1, 0)])
        else:
            scheme = kind.removeprefix("metaspace-")
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
            made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    bos = ready_rendering(tokenizer, "it").bos
    for prompt, _ in ROWS:
        assert encode(tokenizer, [bos + prompt]) == [tokenizer(prompt)["input_ids"]]


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
    assert Responses.of_ids(queries, responses, tokenizer).texts == again
    assert Responses.of_texts(prompts, again).ids(tokenizer) == (queries, responses)


@pytest.mark.parametrize("kind", KINDS)
def test_no_prefix_is_learnt_that_generation_does_not_write(kind: str) -> None:
    """`the` after a line break is not the word with a blank before it, which its ids alone would be."""
    tokenizer = tokenizer_of(kind)
    _, [response] = encode_rows(tokenizer, ["the lamp\n"], ["the table"])
    assert not str(tokenizer.convert_ids_to_tokens(response[0])).startswith(("▁", "Ġ"))


def test_a_row_without_text_or_prompt_is_encoded() -> None:
    tokenizer = tokenizer_of("legacy")
    assert encode_rows(tokenizer, [], []) == ([], [])
    [query], [response] = encode_rows(tokenizer, ["the lamp"], [""])
    assert query == encode(tokenizer, ["the lamp"])[0]
    assert response == [tokenizer.eos_token_id]
    assert response_texts(tokenizer, [query], [response]) == [""]
    assert encode_rows(tokenizer, ["the lamp"], [""], eos=False)[1] == [[]]

"""The tokenizer in data/tokenizer, and the ids that texts have in it. No torch.

It is trained on the train texts, or copied from the base model. The ids of a prompt are those that generation
has, and the ids of a response are those that continue the prompt: what `prompt + response` has after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks import console
from rlhf_tasks.config import Model, Scratch
from rlhf_tasks.data.chat import DATE, Rendering, end_with_turns, generated_spans, template
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import disk, packaged

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Ids = list[int]

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ANCHORS = ("\n", "(", "0", "a", "。")
"""Texts that stand before a response whose first letters would merge with the prompt's last token."""
NUM_BYTES = 256
INSIDE = "##"  # prefix of a token that continues a word


def scratch_rendering() -> Rendering:
    """How texts are rendered before the tokenizer is trained: plain, without BOS and template."""
    return Rendering(bos="", eos=EOS, chat=None, tokenizer="a tokenizer trained from scratch")


def train(shape: Scratch, texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer of at most `shape.vocab_size` tokens; the same bytes for the same texts.

    words: a token per word between white space, decoded with one space between words; rare words
    become <unk>. bpe: byte-level, so that every text round-trips exactly. bpe_uncased: BPE
    within lower-cased words, white space and punctuation apart as BERT has them, so that a name in code
    and the same word in a sentence are the same tokens; case and layout are lost.

    Raises:
        UserError: if `vocab_size` is smaller than the number of tokens that this kind always has.
    """
    from transformers import PreTrainedTokenizerFast

    loses = shape.tokenizer != "bpe"
    specials = [PAD, EOS, UNK] if loses else [PAD, EOS]
    least = len(specials) + (1 if loses else NUM_BYTES)
    if shape.vocab_size < least:
        raise UserError(
            f"model.scratch.vocab_size={shape.vocab_size}: {shape.tokenizer} needs {least} or more"
        )
    build = {"words": _words, "bpe": _bpe, "bpe_uncased": _uncased}[shape.tokenizer]
    return PreTrainedTokenizerFast(
        tokenizer_object=build(texts, shape.vocab_size, specials),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK if loses else None,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _words(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNK))  # without a decoder, words are joined by one space
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _bpe(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _uncased(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNK, continuing_subword_prefix=INSIDE))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=INSIDE)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        limit_alphabet=NUM_BYTES,
        continuing_subword_prefix=INSIDE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ready(model: Model, chat_date: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model that exists; a missing pad token is EOS (masks come from lengths).

    EOS is the end of a turn, where the chat template writes one.
    `chat_date` is kept in its config, for chat templates that print today's date.

    Raises:
        UserError: if it cannot be loaded, is not one of the `tokenizers` library, or has no EOS.
    """
    from transformers import AutoTokenizer

    folder, file = packaged.gguf(model.base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=model.revision or "main", **file)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the tokenizer of model.base={model.base!r} (revision {model.revision}) could not be loaded: "
            f"{error}\nCheck the name, and that this machine reaches the hub; without the hub, give a folder."
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"model.base={model.base!r} has only a slow tokenizer; use a model with a tokenizer.json"
        )
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer of model.base={model.base!r} has no eos_token: answers could not end; set one"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    end_with_turns(tokenizer)
    if tokenizer.chat_template and chat_date is not None:
        tokenizer.init_kwargs[DATE] = chat_date
    return tokenizer


def ready_rendering(tokenizer: PreTrainedTokenizerBase, name: str) -> Rendering:
    """How texts are rendered for an existing tokenizer: with its BOS, if it adds one, and its template."""
    given: Ids = tokenizer("a")["input_ids"]
    bos = str(tokenizer.bos_token) if tokenizer.bos_token and given[:1] == [tokenizer.bos_token_id] else ""
    if bos:
        bare, spaced = encode(tokenizer, [bos + "a", bos + " a"])
        if given[: len(bare)] != bare and given[: len(spaced)] == spaced:
            bos += " "  # a blank that is written at the start of a text, but not after a special token
        if tokenizer.added_tokens_decoder[tokenizer.bos_token_id].rstrip:
            console.say(
                f"Warning: {name} has a BOS token {tokenizer.bos_token!r} with rstrip, which takes the white "
                "space after it, so that plain prompts lose theirs at the start; set rstrip to false for it"
            )
    return Rendering(
        bos=bos,
        eos=str(tokenizer.eos_token),
        chat=template(tokenizer) if tokenizer.chat_template else None,
        tokenizer=f"the tokenizer of {name}",
        special=[str(token) for token in tokenizer.added_tokens_decoder.values() if token.special],
        spans=generated_spans(tokenizer),
    )


# ------------------------------------------------------------------------------------------------ token ids


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, split_special_tokens: bool = False
) -> list[Ids]:
    """Token ids of texts; no special token is added, since the texts are complete.

    With `split_special_tokens`, the name of a special token is plain text.
    """
    if not texts:
        return []
    if not tokenizer.is_fast:
        how = {"split_special_tokens": True} if split_special_tokens else {}
        slow: list[Ids] = tokenizer(list(texts), add_special_tokens=False, **how)["input_ids"]
        return slow
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()  # some files set a length, which would hide too long texts
    backend.no_padding()
    backend.encode_special_tokens = split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], texts: Sequence[str], *, eos: bool = True
) -> tuple[list[Ids], list[Ids]]:
    """Token ids of prompts and of the responses that continue them, each response with EOS appended."""
    queries, responses, _ = continue_prompts(tokenizer, prompts, texts, eos=eos)
    return queries, responses


def continue_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    texts: Sequence[str],
    *,
    eos: bool = True,
    split_special_tokens: bool = False,
) -> tuple[list[Ids], list[Ids], list[bool]]:
    """As `encode_rows`, and whether the tokenizer would merge the end of each prompt with its response.

    A response has the ids that follow the prompt's in `prompt + text`. Where letters of both would be merged
    into one token, which generation cannot write, it has the ids that it has after a text with which it does
    not merge. With `split_special_tokens`, so has a text with names of special tokens, which are plain there.
    """
    queries = encode(tokenizer, prompts)
    wholes = encode(tokenizer, [prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    found = {
        row: whole[len(query) :]
        for row, (query, whole) in enumerate(zip(queries, wholes, strict=True))
        # an unknown token at the prompt's end may stand for letters of both
        if whole[: len(query)] == query and query[-1:] != [tokenizer.unk_token_id]
    }
    merged = [row not in found for row in range(len(texts))]
    if split_special_tokens:
        parsed, split = (encode(tokenizer, texts, split_special_tokens=splits) for splits in (False, True))
        found = {row: ids for row, ids in found.items() if parsed[row] == split[row]}
    for anchor in (*ANCHORS, ""):
        left = [row for row in range(len(texts)) if row not in found]
        [before] = encode(tokenizer, [anchor])
        alone = [anchor + texts[row] for row in left]
        encoded = encode(tokenizer, alone, split_special_tokens=split_special_tokens)
        for row, ids in zip(left, encoded, strict=True):
            if ids[: len(before)] == before:
                found[row] = ids[len(before) :]
    end = [int(tokenizer.eos_token_id)] * eos
    return queries, [found[row] + end for row in range(len(texts))], merged


def response_texts(
    tokenizer: PreTrainedTokenizerBase, queries: Sequence[Ids], responses: Sequence[Ids]
) -> list[str]:
    """The responses as texts that continue their prompts, without their EOS.

    A text is what decoding adds after another token, because decoders may drop the blank at the start. It
    is without the blank that the tokenizer itself writes there: at the start of a text, or after a special
    token. A tokenizer without a decoder joins tokens by blanks that are part of no text.
    """
    joins = tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is None
    [word] = encode(tokenizer, ["a"])
    blanks: dict[tuple[int, ...], tuple[bool, bool]] = {tuple(word): (False, False)}
    texts = []
    for query, response in zip(queries, responses, strict=True):
        ids = response[:-1] if response[-1:] == [tokenizer.eos_token_id] else response
        is_start = not query or query[-1] in tokenizer.added_tokens_decoder
        before = [] if joins else query[-1:] if is_start else word
        text = _text_after(tokenizer, before, ids)
        if tuple(before) not in blanks:
            name = "".join(tokenizer.convert_ids_to_tokens(before))
            bare, spaced = encode(tokenizer, [name + "a", name + " a"])
            is_written = _text_after(tokenizer, before, bare[len(before) :]).startswith(" ")
            blanks[tuple(before)] = is_written, bare == spaced
        is_written, only_before_words = blanks[tuple(before)]
        if is_written and not (only_before_words and text[1:2] in ("", " ")):
            text = text.removeprefix(" ")
        texts.append(text)
    return texts


def _text_after(tokenizer: PreTrainedTokenizerBase, before: Ids, ids: Ids) -> str:
    """What decoding adds for `ids` after `before`."""
    parts = [before, [*before, *ids], ids]
    head, whole, alone = (str(tokenizer.decode(part, skip_special_tokens=False)) for part in parts)
    return whole.removeprefix(head) if whole.startswith(head) else alone


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """The share of tokens that are <unk>, which a `words` tokenizer loses; 0 without an <unk> token."""
    if tokenizer.unk_token_id is None or not texts:
        return 0.0
    ids = [i for row in encode(tokenizer, texts) for i in row]
    return ids.count(tokenizer.unk_token_id) / max(len(ids), 1)


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with disk.room(folder, lambda: disk.size(folder)):
        tokenizer.save_pretrained(folder)

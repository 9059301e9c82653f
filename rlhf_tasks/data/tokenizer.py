"""The tokenizer in data/tokenizer, and the ids that texts have in it. No torch.

It is trained on the train texts, or copied from the base model. The ids of a prompt are those that generation
has, and the ids of a response are those that continue the prompt: what `prompt + response` has after them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_tasks import console
from rlhf_tasks.config import Data, Model, Scratch, is_hub_id
from rlhf_tasks.data.chat import (
    DATE,
    PLAIN,
    Rendering,
    Unusable,
    end_with_turns,
    generated_spans,
    marks_of,
    plain_row,
    template,
)
from rlhf_tasks.data.rows import BATCH
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import disk, packaged, ready_models

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Ids = list[int]

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
ANCHORS = ("\n", "(", "0", "a", "。")
"""Texts that stand before a response whose first letters would merge with the prompt's last token."""
WHITE_SPACE = re.compile("[^\\S\x1c-\x1f]+")
"""As the pre-tokenizer has it: Python knows four more characters of it."""
BETWEEN_WORDS = re.compile(r"[^\sĠ▁Ċĉč][Ġ▁ ]")
"""In a token that reaches from one word into the next."""
WORD_END = re.compile(r"(?<=\S) (?=\S)")
NEUTRAL = "a"
"""The text of a word before another one, whose tokens do not depend on it."""
ODD_SPACE = r"^\s|\s$|\s\s|[^\S ]|^$"
"""White space that is no single blank between two words."""
MOST_WORDS = 2**20  # whose counts are kept
CHECKED = 500  # rows that are counted both ways
NUM_BYTES = 256


def scratch_rendering() -> Rendering:
    """How texts are rendered before the tokenizer is trained: plain, without BOS and template."""
    return Rendering(bos="", eos=EOS, chat=None, tokenizer="a tokenizer trained from scratch")


@console.part("training the tokenizer")
def train(shape: Scratch, texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer of at most `shape.vocab_size` tokens; the same bytes for the same texts.

    words: a token per word between white space, decoded with one space between words; rare words
    become <unk>. bpe: byte-level, so that every text round-trips exactly.

    Raises:
        UserError: if `vocab_size` is smaller than the number of tokens that this kind always has.
    """
    from transformers import PreTrainedTokenizerFast

    is_bpe = shape.tokenizer == "bpe"
    specials = [PAD, EOS] if is_bpe else [PAD, EOS, UNK]
    least = len(specials) + (NUM_BYTES if is_bpe else 1)
    if shape.vocab_size < least:
        raise UserError(
            f"model.scratch.vocab_size={shape.vocab_size}: {shape.tokenizer} needs {least} or more"
        )
    train_kind = _bpe if is_bpe else _words
    return PreTrainedTokenizerFast(
        tokenizer_object=train_kind(texts, shape.vocab_size, specials),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None if is_bpe else UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _words(texts: Iterable[str], vocab_size: int, specials: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    counts = Counter(word for text in texts for word in WHITE_SPACE.split(text))
    del counts[""]
    by_count = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    names = dict.fromkeys([*specials, *(word for word, _ in by_count)])
    vocabulary = {word: i for i, word in enumerate(itertools.islice(names, vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))  # words are joined by one space
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
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


@console.part("loading the tokenizer")
def load_base(model: Model, data: Data | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model that exists. What `data` says of chat templates is kept in its config.

    That is the date that they print, and whether plain prompts are turns.

    Raises:
        UserError: if it cannot be loaded, is not one of the `tokenizers` library, or has no EOS.
    """
    from transformers import AutoTokenizer

    base = f"model.base={model.base!r}"
    folder, file = packaged.gguf(model.base)
    try:
        with packaged.reading(model.base) if file else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(folder, revision=model.revision or "main", **file)
    except (OSError, ValueError, ImportError) as error:
        ready_models.check_place(model.base)  # which says what a folder is instead
        hint = "Does it lie in the folder?"
        if is_hub_id(model.base):
            hint = (
                f"Check the name and revision {model.revision}, and that this machine reaches the hub; "
                "without it, give a folder."
            )
        why = str(error).strip()
        raise UserError(f"the tokenizer of {base} could not be loaded: {why}\n{hint}") from error
    if not tokenizer.is_fast:
        raise UserError(f"{base} has only a slow tokenizer; use a model with a tokenizer.json")
    _set_ends(tokenizer, f"of {base}")
    if tokenizer.chat_template and data is not None:
        tokenizer.init_kwargs |= {DATE: data.chat_date, PLAIN: data.chat}
    elif data is not None and data.chat == "always":
        raise UserError(
            f"data.chat: always needs a chat template, and the tokenizer of {base} has none; set it to auto, "
            "or use a model that has one"
        )
    return tokenizer


@console.part("loading the tokenizer")
def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint's folder, or of data/tokenizer.

    A template that prints today's date prints that of `data.chat_date` which the folder keeps, or else its
    default.

    Raises:
        UserError: if the folder holds no tokenizer, or one without an EOS token.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in VOCABULARIES):  # transformers would create one
        raise UserError(f"{folder} holds no tokenizer; a checkpoint folder must hold its tokenizer too")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template:
        tokenizer.init_kwargs.setdefault(DATE, Data().chat_date)
    _set_ends(tokenizer, f"in {folder}")
    return tokenizer


def _set_ends(tokenizer: PreTrainedTokenizerBase, whose: str) -> None:
    """A missing pad token becomes EOS (masks come from lengths), and EOS the end of a turn, in place."""
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer {whose} has no EOS token: answers could not end; give it one")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    end_with_turns(tokenizer)


def ready_rendering(tokenizer: PreTrainedTokenizerBase, name: str) -> Rendering:
    """How texts are rendered for an existing tokenizer: with its BOS, if it adds one, and its template."""
    given: Ids = tokenizer("a")["input_ids"]
    bos = str(tokenizer.bos_token) if tokenizer.bos_token and given[:1] == [tokenizer.bos_token_id] else ""
    if bos:
        bare, spaced = encode(tokenizer, [bos + "a", bos + " a"])
        if given[: len(bare)] != bare and given[: len(spaced)] == spaced:
            bos += " "  # a blank that is written at the start of a text, but not after a special token
    chat, marks = template(tokenizer) if tokenizer.chat_template else None, list[str]()
    plain = tokenizer.init_kwargs.get(PLAIN, Data().chat)
    try:
        marks = marks_of(tokenizer, chat) if chat and plain != "never" else []
    except ValueError as error:
        if plain == "always":
            raise UserError(
                f"data.chat: always, but the chat template of {name} rejects a user's turn alone: {error}"
            ) from None
        plain = "never"
        console.say(
            f"Note: the chat template of {name} rejects a user's turn alone ({error}): plain prompts stay as "
            "they are; give messages"
        )
    return Rendering(
        bos=bos,
        eos=str(tokenizer.eos_token),
        chat=chat,
        tokenizer=f"the tokenizer of {name}",
        special=[str(token) for token in tokenizer.added_tokens_decoder.values() if token.special],
        spans=generated_spans(tokenizer),
        plain=plain,
        marks=marks,
    )


def read_plain(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """Prompts that somebody wrote, as the models of this tokenizer read them: as stage prepare read the data.

    Those with marks of its chat template were rendered before, and stay as they are, with `always` too.

    Raises:
        UserError: if the template cannot render one.
    """
    rendering = ready_rendering(tokenizer, tokenizer.name_or_path)
    if rendering.plain == "always":
        rendering = replace(rendering, plain="auto")
    try:
        return [plain_row(prompt, {}, rendering)["prompt"] for prompt in prompts]
    except Unusable as fault:
        raise UserError(f"a prompt cannot be rendered: {fault.detail}") from None


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
    known = list(dict.fromkeys(prompts))
    by_prompt = dict(zip(known, encode(tokenizer, known), strict=True))
    queries = [by_prompt[prompt] for prompt in prompts]
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


class Counts:
    """The token counts of prompts and of the responses that continue them, as `continue_prompts` has them.

    In most vocabularies no token reaches from a word over a blank into the next word. Then a text has the
    tokens of its words, and each word is encoded once. Where one does, or the first rows have other counts
    when they are encoded whole, all rows are encoded whole. By words, stage prepare counts five times as many
    rows a second of a BPE (3,900 against 780 on one thread, 100 words a row), and more in large batches.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        reaches = any(BETWEEN_WORDS.search(token) for token in tokenizer.get_vocab())
        strips = any(one.rstrip or " " in one.content for one in tokenizer.added_tokens_decoder.values())
        self._by_words, self._is_checked = tokenizer.is_fast and not reaches and not strips, False
        self._words: dict[tuple[bool, str], tuple[int, bool]] = {}
        """By whether it starts the text, a word: its tokens, and whether it ends with an unknown one, which
        `continue_prompts` takes for a merge."""
        self._joints: dict[tuple[bool, str, str], tuple[int, bool]] = {}
        """By whether it starts the text, a prompt's last word, and the response's first where no blank parts
        them: the tokens of the latter, and whether it merges."""

    def __call__(self, prompts: Sequence[str], texts: Sequence[str]) -> tuple[Ids, Ids, list[bool]]:
        """Tokens of the prompts, and of the responses with EOS; whether each pair would merge."""
        if not self._is_checked and self._by_words:
            some = prompts[:CHECKED], texts[:CHECKED]
            self._is_checked, self._by_words = True, self._of_words(*some) == self._exact(*some)
        return self._of_words(prompts, texts) if self._by_words else self._exact(prompts, texts)

    def _exact(self, prompts: Sequence[str], texts: Sequence[str]) -> tuple[Ids, Ids, list[bool]]:
        queries, responses, merged = continue_prompts(self._tokenizer, prompts, texts)
        return list(map(len, queries)), list(map(len, responses)), merged

    def _of_words(self, prompts: Sequence[str], texts: Sequence[str]) -> tuple[Ids, Ids, list[bool]]:
        if len(self._words) + len(self._joints) > MOST_WORDS:
            self._words.clear()
            self._joints.clear()
        # 1. Prompts: the first word has no blank before it.
        asked = list(dict.fromkeys(prompts))
        firsts, lasts, sums = self._sums(asked)
        at_start, after = self._count(firsts, starts=True), self._count(firsts, starts=False)
        of_prompts = dict(zip(asked, np.array(sums) - after + at_start, strict=True))
        ends = {p: (first == p, last) for p, first, last in zip(asked, firsts, lasts, strict=True)}
        # 2. Responses: their first word stands after a blank, or is joined to the prompt's last word.
        parted = [
            text[:1] == " " and bool(text[1:2].strip() and prompt[-1:].strip())
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        starts, _, counts = self._sums([text[cut:] for text, cut in zip(texts, parted, strict=True)])
        joints = [(*ends[prompt], start) for prompt, start in zip(prompts, starts, strict=True)]
        joined = (joint for joint, is_parted in zip(joints, parted, strict=True) if not is_parted)
        new = [joint for joint in dict.fromkeys(joined) if joint not in self._joints]
        heads = [last if is_first else f"{NEUTRAL} {last}" for is_first, last, _ in new]
        _, found, merged = continue_prompts(self._tokenizer, heads, [text for *_, text in new], eos=False)
        self._joints |= dict(zip(new, zip(map(len, found), merged, strict=True), strict=True))
        merges = list[bool]()
        for i, (joint, is_parted) in enumerate(zip(joints, parted, strict=True)):
            if is_parted:
                added, is_merged = 0, self._words[joint[:2]][1]
            else:
                count, is_merged = self._joints[joint]
                added = count - self._words[False, joint[2]][0]
            counts[i] += added + 1
            merges.append(is_merged)
        return [int(of_prompts[prompt]) for prompt in prompts], counts, merges

    def _sums(self, texts: Sequence[str]) -> tuple[list[str], list[str], list[int]]:
        """The first and last words of texts, and the tokens of all words, as if each stood after another."""
        firsts, lasts, sums = [""] * len(texts), [""] * len(texts), [0] * len(texts)
        given = pa.array(texts, pa.string())
        is_odd = pc.match_substring_regex(given, ODD_SPACE).to_numpy(zero_copy_only=False)
        odd = [WORD_END.split(texts[i]) for i in np.flatnonzero(is_odd).tolist()]
        for which, words in (
            (np.flatnonzero(~is_odd), pc.split_pattern(given.filter(pa.array(~is_odd)), " ")),
            (np.flatnonzero(is_odd), pa.array(odd, pa.list_(pa.string()))),
        ):
            if not len(which):
                continue
            encoded = words.flatten().dictionary_encode()
            distinct: list[str] = encoded.dictionary.to_pylist()
            tokens = self._count(distinct, starts=False)
            numbers, offsets = encoded.indices.to_numpy(), words.offsets.to_numpy() - words.offsets[0].as_py()
            before = np.concatenate([[0], np.cumsum(tokens[numbers])])
            of_text = (before[offsets[1:]] - before[offsets[:-1]]).tolist()
            ends = zip(
                numbers[offsets[:-1]].tolist(), numbers[offsets[1:] - 1].tolist(), of_text, strict=True
            )
            for i, (first, last, count) in zip(which.tolist(), ends, strict=True):
                firsts[i], lasts[i], sums[i] = distinct[first], distinct[last], count
        return firsts, lasts, sums

    def _count(self, words: Sequence[str], *, starts: bool) -> npt.NDArray[np.int64]:
        """The tokens of words at the start of a text, or after another word."""
        new = [word for word in dict.fromkeys(words) if (starts, word) not in self._words]
        before = "" if starts else f"{NEUTRAL} "
        num_before = 0 if starts else len(encode(self._tokenizer, [NEUTRAL])[0])
        for word, ids in zip(new, encode(self._tokenizer, [before + word for word in new]), strict=True):
            ends_unknown = bool(ids) and ids[-1] == self._tokenizer.unk_token_id
            self._words[starts, word] = len(ids) - num_before, ends_unknown
        return np.array([self._words[starts, word][0] for word in words], np.int64)


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


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """The share of tokens that are <unk>, which a `words` tokenizer loses; 0 without an <unk> token."""
    if tokenizer.unk_token_id is None:
        return 0.0
    unknown = total = 0
    rest = iter(texts)
    while some := list(itertools.islice(rest, BATCH)):
        ids = [i for row in encode(tokenizer, some) for i in row]
        unknown, total = unknown + ids.count(tokenizer.unk_token_id), total + len(ids)
    return unknown / max(total, 1)


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with disk.room(folder, lambda: disk.size(folder)):
        tokenizer.save_pretrained(folder)

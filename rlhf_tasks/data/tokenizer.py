"""The tokenizer in data/tokenizer: trained on the train texts, or copied from the base model. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks.config import Model, Scratch
from rlhf_tasks.data.tables import Chat, Message, Rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import disk

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
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


def ready(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model that exists; a missing pad token is EOS (masks come from lengths).

    Raises:
        UserError: if it cannot be loaded, is not one of the `tokenizers` library, or has no EOS.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.base, revision=model.revision or "main")
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
    tokenizer.backend_tokenizer.no_truncation()  # some files set a length, which would hide too long texts
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def ready_rendering(tokenizer: PreTrainedTokenizerBase, name: str) -> Rendering:
    """How texts are rendered for an existing tokenizer: with its BOS, if it adds one, and its template."""
    first = tokenizer("a")["input_ids"][:1]
    adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return Rendering(
        bos=str(tokenizer.bos_token) if adds_bos else "",
        eos=str(tokenizer.eos_token),
        chat=_chat(tokenizer) if tokenizer.chat_template else None,
        tokenizer=f"the tokenizer of {name}",
    )


def _chat(tokenizer: PreTrainedTokenizerBase) -> Chat:
    from jinja2 import TemplateError

    def render(messages: list[Message], answer_follows: bool) -> str:
        try:
            text: Any = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer_follows
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return str(text)

    return render


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[int]:
    """The number of tokens of each text, without special tokens."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """The share of tokens that are <unk>, which a `words` tokenizer loses; 0 without an <unk> token."""
    if tokenizer.unk_token_id is None or not texts:
        return 0.0
    backend: Tokenizer = tokenizer.backend_tokenizer
    ids = [i for encoding in backend.encode_batch_fast(texts, add_special_tokens=False) for i in encoding.ids]
    return ids.count(tokenizer.unk_token_id) / max(len(ids), 1)


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with disk.room(folder, lambda: disk.size(folder)):
        tokenizer.save_pretrained(folder)

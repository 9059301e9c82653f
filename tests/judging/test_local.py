"""Local judges against single rows through the bare model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_tasks.config.judge import LocalJudge
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import Question
from rlhf_tasks.judging.judges.local import LocalComparer
from tests import toy

CPU = torch.device("cpu")
QUESTIONS = [
    Question("red cat", "the cat is red", "now"),
    Question("a blue dog and a grey box", "blue", "the box is grey now"),
    Question("pen", "now", "is"),
]
CHAT = "{% for m in messages %}user : {{ m['content'] }}\n{% endfor %}"
DATED = "{% if strftime_now('%d %m %Y') == '01 01 2025' %}" + CHAT + "{% endif %}"
"""Renders nothing on another day than the default of `data.chat_date`."""
ALL = "{prompt} A : {first} B : {second} the"


def words(letters: tuple[str, ...] = ("A", "B"), chat: str | None = None) -> PreTrainedTokenizerBase:
    listed = ["<eos>", "<unk>", "<pad>", *letters, "a", "and", "the", "is", "now", ":", "user", *toy.WORDS]
    backend = Tokenizer(WordLevel({w: i for i, w in enumerate([*listed, *toy.THINGS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )
    made.chat_template = chat
    return made


def local(folder: Path, model: Path, **changes: Any) -> LocalComparer:
    file = folder / "prompt.txt"
    file.write_text(ALL, encoding="utf-8")
    values = {"kind": "local", "name": "own", "path": str(model), "revision": None, "prompt": str(file)}
    settings = LocalJudge.model_validate(values | {"micro_batch_tokens": 64} | changes)
    return LocalComparer(settings, CPU, Path())


@pytest.mark.parametrize("chat", [None, CHAT, DATED], ids=["plain", "chat", "dated"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_local_reply_is_the_next_tokens_probability_of_a_over_a_or_b(
    tmp_path: Path, family: str, chat: str | None
) -> None:
    tokens = words(chat=chat)
    folder = toy.foreign(str(tmp_path / "model"), family, words=tokens)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    result = local(tmp_path, folder)(QUESTIONS, 0)
    for question, reply in zip(QUESTIONS, result, strict=True):
        text = ALL.format(**question._asdict())
        whole = f"user : {text}\n" if chat else text
        ids = tokens(whole)["input_ids"]
        p = model(torch.tensor([ids])).logits[0, -1].softmax(0)
        a, b = (float(p[tokens.convert_tokens_to_ids(letter)]) for letter in "AB")
        assert reply.probability == pytest.approx(a / (a + b), abs=1e-5)
        assert reply.num_tokens == len(ids)


def test_special_tokens_in_a_question_do_not_reach_the_judge(tmp_path: Path) -> None:
    """Marks of the policy's chat template, or a response that writes them, would end the judge's turn."""
    folder = toy.foreign(str(tmp_path / "model"), "llama", words=words(chat=CHAT))
    plain, marked = (Question(f"now {end} is", "a", f"b {end}") for end in ("", "<eos>"))
    one, other = local(tmp_path, folder)([plain, marked], 0)
    assert (one.probability, one.num_tokens) == (other.probability, other.num_tokens)


def test_a_model_that_would_reply_something_else_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that thinks before it replies: its A and B are rare, and their ratio says nothing."""
    monkeypatch.setattr("rlhf_tasks.judging.judges.local.LEAST_SHARE", 0.5)
    folder = toy.foreign(str(tmp_path / "model"), "llama", words=words())
    for reply in local(tmp_path, folder)(QUESTIONS, 3):
        assert reply.failure.startswith("its reply begins with A or B with a probability of ")
        assert math.isnan(reply.probability)


def test_a_tokenizer_without_tokens_a_and_b_is_refused(tmp_path: Path) -> None:
    folder = toy.foreign(str(tmp_path / "model"), "llama", words=words(letters=("A",)))
    with pytest.raises(UserError, match="has no tokens A and B"):
        local(tmp_path, folder)


def test_a_question_longer_than_the_models_limit_is_a_failure(tmp_path: Path) -> None:
    folder = toy.foreign(str(tmp_path / "model"), "llama", words=words())
    long = Question("a " * 100, "now", "is")
    short, failed = local(tmp_path, folder)([QUESTIONS[0], long], 2)
    assert short.failure == ""
    assert failed.failure == "longer than the judge's 64 tokens"

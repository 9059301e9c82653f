"""Local judges against single rows through the bare model, and once through a real server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_tasks.config.judge import LlmJudge, LocalJudge
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import PairwiseJudge, Question
from rlhf_tasks.judging.judges.llm import LlmComparer
from rlhf_tasks.judging.judges.local import LocalComparer
from rlhf_tasks.project.paths import Paths
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


def prompt(folder: Path) -> str:
    file = folder / "prompt.txt"
    file.write_text(ALL, encoding="utf-8")
    return str(file)


def local(folder: Path, model: Path, **changes: Any) -> LocalComparer:
    values = {
        "kind": "local",
        "name": "own",
        "path": str(model),
        "revision": None,
        "prompt": prompt(folder),
        "micro_batch_tokens": 64,
    }
    return LocalComparer(LocalJudge.model_validate(values | changes), CPU, Path())


def text(question: Question) -> str:
    return f"{question.prompt} A : {question.first} B : {question.second} the"


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
        whole = f"user : {text(question)}\n" if chat else text(question)
        ids = tokens(whole)["input_ids"]
        p = model(torch.tensor([ids])).logits[0, -1].softmax(0)
        a, b = (float(p[tokens.convert_tokens_to_ids(letter)]) for letter in "AB")
        assert reply.probability == pytest.approx(a / (a + b), abs=1e-5)
        assert reply.num_tokens == len(ids)


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


# -------------------------------------------------------------------------------- a real server


def always_first(folder: Path) -> Path:
    """A model whose next token is always A: all weights are equal except the head's row of that token."""
    tokens = words(chat=CHAT)
    shape = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=2,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[tokens.convert_tokens_to_ids("A")] = 1.0
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """`transformers serve` on a free port; its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as out, subprocess.Popen(command, env=offline, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_model_that_always_prefers_the_first_is_biased_here_and_behind_transformers_serve(
    tmp_path: Path,
) -> None:
    model = always_first(tmp_path / "model")
    prompts, ours, theirs = (list(part) for part in zip(*QUESTIONS, strict=True))
    local_result = PairwiseJudge("own", local(tmp_path, model), 0.0).compare(prompts, ours, theirs)
    with served(model, tmp_path / "log") as url:
        settings = LlmJudge(
            kind="llm",
            name="served",
            base_url=url,
            model=str(model),
            key_variable=None,
            prompt=prompt(tmp_path),
            logprobs=False,
            max_reply_tokens=1,
            concurrency=2,
            timeout_seconds=60.0,
            max_retries=5,
            budget=None,
        )
        judge = PairwiseJudge("served", LlmComparer(settings, 0.0, Paths(tmp_path)), 0.0)
        served_result = judge.compare(prompts, ours, theirs)
    for comparisons in (local_result, served_result):
        assert comparisons.outcomes.tolist() == [0.5, 0.5, 0.5]
        assert comparisons.orders is not None
        assert (comparisons.orders[0] > 0.5).all()
        assert (comparisons.orders[1] < 0.5).all()
        assert comparisons.num_tokens > 0

"""Perplexity and questions against one row at a time through the bare model; what a probe file must hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_tasks.config.judge import Retention
from rlhf_tasks.data.batches import encode, encode_answers, load_tokenizer, read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import probes, retention
from rlhf_tasks.evaluation.probes import Choice
from rlhf_tasks.evaluation.retention import Probes
from rlhf_tasks.modeling import models
from rlhf_tasks.project.paths import Paths
from tests import small

CPU = torch.device("cpu")
POLICY = Path("models/policy")


def settings(**changes: object) -> Retention:
    given = {"num_examples": 6, "micro_batch_tokens": 256, "general": None, "questions": None}
    return Retention.model_validate(given | changes)


def alone(model: PreTrainedModel, query: list[int], response: list[int]) -> float:
    """Σ log p of a response, without padding, mask or batch."""
    logprobs = small.logits_alone(model, query, response).log_softmax(-1)
    return float(sum(logprobs[t, token] for t, token in enumerate(response)))


def test_perplexity_of_demonstrations_is_that_of_each_alone(models_here: Path) -> None:
    model, tokenizer = models.load_causal(POLICY).eval(), load_tokenizer(POLICY)
    rows = read_table(Paths(), "sft", "test")[:6]
    queries = encode(tokenizer, [row["prompt"] for row in rows])
    responses = encode_answers(tokenizer, [row["completion"] for row in rows])
    total = sum(alone(model, q, r) for q, r in zip(queries, responses, strict=True))
    expected = math.exp(-total / sum(map(len, responses)))
    found = Probes(settings())("policy", POLICY, CPU)
    assert found["perplexity/sft_text/policy"] == pytest.approx(expected, rel=1e-5)
    assert "perplexity/general/policy" not in found


def test_a_general_text_is_read_from_its_first_token_on(models_here: Path) -> None:
    texts = ["my boss stole my lamp", "i feel sad .\nit was at the park ."]
    Path("general.txt").write_text("\n\n".join(texts) + "\n\nmy\n", encoding="utf-8")
    model, tokenizer = models.load_causal(POLICY).eval(), load_tokenizer(POLICY)
    ids = encode(tokenizer, [text.replace("\n", " ") for text in texts])
    total = sum(alone(model, row[:1], row[1:]) for row in ids)
    expected = math.exp(-total / sum(len(row) - 1 for row in ids))
    found = Probes(settings(general="general.txt"))("policy", POLICY, CPU)
    assert found["perplexity/general/policy"] == pytest.approx(expected, rel=1e-5)


def test_the_likeliest_ending_per_character_is_the_answer(models_here: Path) -> None:
    model, tokenizer = models.load_causal(POLICY).eval(), load_tokenizer(POLICY)
    endings = (" my lamp", " at the park .", " sad", " i want a refund")
    rates = []
    for ending in endings:
        query, response = encode(tokenizer, ["my boss stole", ending])
        rates.append(alone(model, query, response) / len(ending))
    best = endings[rates.index(max(rates))]
    others = tuple(ending for ending in endings if ending != best)
    asked = [Choice("my boss stole", (best, *others)), Choice("my boss stole", (*others, best))]
    assert retention.answered(model, tokenizer, asked, 64) == [True, False]


def test_without_questions_they_are_made_of_demonstrations() -> None:
    pairs = [("p", "a"), ("q", "b"), ("r", "a"), ("s", "c"), ("t", "d")]
    found = retention.of_demonstrations(pairs)
    assert found[0] == Choice("p", ("a", "b", "c", "d"))
    assert found[3] == Choice("s", ("c", "d", "a", "b"))
    assert len(found) == 5
    assert retention.of_demonstrations(pairs[:3]) == []


def test_what_is_shipped_can_be_read(models_here: Path) -> None:
    asked = probes.questions("english")
    assert len(asked) >= 30
    assert {len(question.endings) for question in asked} == {4}
    assert all(len(set(question.endings)) == 4 and question.endings[0].startswith(" ") for question in asked)
    assert len(probes.texts("english")) >= 12
    found = Probes(settings(general="english", questions="english"))("sft", Path("models/sft"), CPU)
    assert found["choice/sft/low"] <= found["choice/sft"] <= found["choice/sft/high"]
    assert found["perplexity/general/sft"] > 1


def test_a_file_that_is_no_probe_is_told(tmp_path: Path) -> None:
    file = tmp_path / "probe.txt"
    with pytest.raises(UserError, match=r"cannot be read.*give english, or a file"):
        probes.texts(str(file))
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no text"):
        probes.texts(str(file))
    with pytest.raises(UserError, match="holds no question"):
        probes.questions(str(file))
    file.write_text("A beginning\nright\nwrong\n\nAnother\nright\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"three lines or more.*'Another right' is none"):
        probes.questions(str(file))

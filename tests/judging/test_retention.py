"""Retention against one row at a time through the bare model; what a file of texts or questions must hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rouge_score.tokenize import tokenize
from transformers import PreTrainedModel

from rlhf_tasks.config.judge import Retention
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import encode, encode_rows, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import retention
from rlhf_tasks.judging.responses import RougeTokenizer, SampledResponses, response_statistics
from rlhf_tasks.judging.results import RetentionResult
from rlhf_tasks.judging.retention import Choice, Probes
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.project.paths import Paths
from tests import small

CPU = torch.device("cpu")
POLICY = Path("models/policy")


def measure(folder: Path, **changes: object) -> RetentionResult:
    settings = {
        "num_examples": 6,
        "micro_batch_tokens": 256,
        "general": None,
        "questions": None,
        "tasks": None,
    }
    results, _ = Probes(Retention.model_validate(settings | changes), Paths()).measure_all({"x": folder}, CPU)
    return results["x"]


def logprob_alone(model: PreTrainedModel, query: list[int], response: list[int]) -> float:
    """Σ log p of a response, without padding, mask or batch."""
    logprobs = small.logits_alone(model, query, response).log_softmax(-1)
    return float(sum(logprobs[t, token] for t, token in enumerate(response)))


def test_perplexity_of_demonstrations_equals_that_of_single_rows(models_here: Path) -> None:
    model, tokenizer = load_causal(POLICY).eval(), load_tokenizer(POLICY)
    rows = read_table(Paths(), "sft", "test")[:6]
    queries, responses = encode_rows(
        tokenizer, [row["prompt"] for row in rows], [row["completion"] for row in rows]
    )
    total = sum(logprob_alone(model, q, r) for q, r in zip(queries, responses, strict=True))
    expected = math.exp(-total / sum(map(len, responses)))
    result = measure(POLICY).perplexity
    assert result == {"sft_text": pytest.approx(expected, rel=1e-5)}


def test_perplexity_of_a_text_counts_all_tokens_but_the_first(models_here: Path) -> None:
    texts = ["my boss stole my lamp", "i feel sad .\nit was at the park ."]
    Path("general.txt").write_text("\n\n".join(texts) + "\n\nmy\n", encoding="utf-8")
    model, tokenizer = load_causal(POLICY).eval(), load_tokenizer(POLICY)
    ids = encode(tokenizer, [text.replace("\n", " ") for text in texts])
    total = sum(logprob_alone(model, row[:1], row[1:]) for row in ids)
    expected = math.exp(-total / sum(len(row) - 1 for row in ids))
    result = measure(POLICY, general="general.txt").perplexity
    assert result["general"] == pytest.approx(expected, rel=1e-5)
    Path("general.txt").write_text("my\n\nboss\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"judge\.retention\.general: no paragraph has two tokens"):
        measure(POLICY, general="general.txt")


def test_the_perplexity_of_responses_is_that_by_the_given_model(models_here: Path) -> None:
    model, tokenizer = load_causal(POLICY).eval(), load_tokenizer(POLICY)
    prompts = ["my boss stole my lamp", "i feel sad .", "not measured"]
    responses = encode(tokenizer, ["so sad", "it was at the park .", "never read"])
    queries = encode(tokenizer, prompts[:2])
    total = sum(logprob_alone(model, q, r) for q, r in zip(queries, responses[:2], strict=True))
    expected = math.exp(-total / sum(map(len, responses[:2])))
    sampled = {"policy": SampledResponses(responses, responses, ["", "", ""], [True] * 3)}
    settings = Retention(num_examples=2)
    found = retention.measure_responses(POLICY, prompts, sampled, None, settings, torch.device("cpu"))
    assert found["policy"].sft_perplexity == pytest.approx(expected, rel=1e-5)


def test_different_two_grams_are_counted_over_all_responses() -> None:
    """^1, 12 and 23 in two responses, ^1 and 12 once more, and ^7: 4 of 9; of nothing but EOS, 1 of n."""
    ids = [[1, 2, 3], [1, 2, 3], [1, 2], [7]]
    responses = SampledResponses(sampled=ids, ids=ids, texts=["", "", "", ""], ended=[True] * 4)
    assert response_statistics(responses, None, 1.0).corpus_distinct_2 == 4 / 9
    short = SampledResponses(sampled=[[7]] * 5, ids=[[7]] * 5, texts=[""] * 5, ended=[True] * 5)
    assert response_statistics(short, None, 1.0).corpus_distinct_2 == 1 / 5


def test_rouge_reads_words_of_any_language() -> None:
    texts = ["Он жил у моря", "l'été à Rome", "海は青い", "Two_words in 1 line."]
    same = SampledResponses(sampled=[[7]] * 4, ids=[[7]] * 4, texts=texts, ended=[True] * 4)
    assert response_statistics(same, texts, 1.0).rouge_l == 1
    half = SampledResponses(sampled=[[7]], ids=[[7]], texts=["Он жил"], ended=[True])
    assert response_statistics(half, texts[:1], 1.0).rouge_l == pytest.approx(2 / 3)
    english = "it's a can't-miss U.S. movie_1, 10/10"
    assert RougeTokenizer().tokenize(english) == tokenize(english, None)
    assert RougeTokenizer().tokenize("AIは青い") == ["ai", "は", "青", "い"]


def test_the_model_chooses_the_ending_that_is_likeliest_per_character(models_here: Path) -> None:
    model, tokenizer = load_causal(POLICY).eval(), load_tokenizer(POLICY)
    endings = (" my lamp", " at the park .", " sad", " i want a refund")
    rates = []
    for ending in endings:
        query, response = encode(tokenizer, ["my boss stole", ending])
        rates.append(logprob_alone(model, query, response) / len(ending))
    best = endings[rates.index(max(rates))]
    others = tuple(ending for ending in endings if ending != best)
    questions = [Choice("my boss stole", (best, *others)), Choice("my boss stole", (*others, best))]
    assert retention.answer_questions(model, tokenizer, questions, 64) == [True, False]


def test_questions_of_demonstrations_have_the_next_completions_as_wrong_endings() -> None:
    pairs = [("p", "a"), ("q", "b"), ("r", "a"), ("s", "c"), ("t", "d")]
    questions = retention.make_questions(pairs)
    assert questions[0] == Choice("p", ("a", "b", "c", "d"))
    assert questions[3] == Choice("s", ("c", "d", "a", "b"))
    assert len(questions) == 5
    assert retention.make_questions(pairs[:3]) == []


def test_the_shipped_texts_and_questions_can_be_measured(models_here: Path) -> None:
    questions = retention.read_questions("english", Path())
    assert len(questions) >= 30
    assert {len(question.endings) for question in questions} == {4}
    assert all(len(set(one.endings)) == 4 and one.endings[0].startswith(" ") for one in questions)
    assert len(retention.read_texts("english", Path())) >= 12
    result = measure(Path("models/sft"), general="english", questions="english")
    assert result.multiple_choice is not None
    assert result.multiple_choice.low <= result.multiple_choice.value <= result.multiple_choice.high
    assert result.perplexity["general"] > 1


def test_a_file_of_another_form_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "probe.txt"
    with pytest.raises(UserError, match=r"cannot be read.*give english, or a file"):
        retention.read_texts("probe.txt", tmp_path)
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no text"):
        retention.read_texts("probe.txt", tmp_path)
    with pytest.raises(UserError, match="holds no question"):
        retention.read_questions("probe.txt", tmp_path)
    file.write_text("A beginning\nright\nwrong\n\nAnother\nright\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"three lines or more.*'Another right' has fewer lines"):
        retention.read_questions("probe.txt", tmp_path)

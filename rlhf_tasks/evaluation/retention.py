"""What a language model still knows: perplexity, and questions answered by likelihood.

RLHF moves a model away from the text it was trained on. Base, SFT and policy read the same texts, so that
the cost is seen, and what PPO-ptx saves of it.

B batch · R response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config.judge import Retention
from rlhf_tasks.data.batches import (
    Ids,
    collate,
    encode,
    encode_answers,
    load_tokenizer,
    micro_batches,
    read_table,
    sizes,
)
from rlhf_tasks.evaluation import probes, statistics
from rlhf_tasks.evaluation.probes import Choice
from rlhf_tasks.modeling import models
from rlhf_tasks.modeling.tensors import gather_logprobs
from rlhf_tasks.project.paths import Paths

NUM_WRONG = 3  # endings of a question that is made of demonstrations


class Probes:
    """The texts and questions of `judge.retention`, read once.

    Raises:
        UserError: if a file of them is none.
    """

    def __init__(self, settings: Retention) -> None:
        self._settings, count = settings, settings.num_examples
        rows = read_table(Paths(), "sft", "test")[:count]
        self._demonstrations = [(row["prompt"], row["completion"]) for row in rows]
        self._general = None if settings.general is None else probes.texts(settings.general)[:count]
        self._questions = (
            of_demonstrations(self._demonstrations)
            if settings.questions is None
            else probes.questions(settings.questions)[:count]
        )

    def __call__(self, name: str, folder: Path, device: torch.device) -> dict[str, float]:
        """`perplexity/sft_text/NAME`, `perplexity/general/NAME`, `choice/NAME` with its interval."""
        tokenizer = load_tokenizer(folder)
        model = models.place(models.load_causal(folder), device).eval()
        most = self._settings.micro_batch_tokens
        found: dict[str, float] = {}
        if self._demonstrations:
            prompts, completions = zip(*self._demonstrations, strict=True)
            rows = encode(tokenizer, prompts), encode_answers(tokenizer, completions)
            found[f"perplexity/sft_text/{name}"] = perplexity(model, *rows, tokenizer, most)
        if self._general is not None:
            texts = _whole(model, tokenizer, self._general)
            found[f"perplexity/general/{name}"] = perplexity(model, *texts, tokenizer, most)
        if self._questions:
            right = answered(model, tokenizer, self._questions, most)
            share = statistics.wilson(sum(right), len(right))
            key = f"choice/{name}"
            found |= {key: share.value, f"{key}/low": share.low, f"{key}/high": share.high}
        return found


def of_demonstrations(pairs: Sequence[tuple[str, str]]) -> list[Choice]:
    """Which completion belongs to a prompt: its own, or those of the next prompts.

    Empty where there are not enough different completions.
    """
    found = []
    for i, (prompt, completion) in enumerate(pairs):
        others = (pairs[(i + step) % len(pairs)][1] for step in range(1, len(pairs)))
        wrong = list(dict.fromkeys(other for other in others if other != completion))[:NUM_WRONG]
        if len(wrong) == NUM_WRONG:
            found.append(Choice(prompt, (completion, *wrong)))
    return found


def perplexity(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> float:
    """exp of the mean −log p of a response token, over all of them."""
    found = logprob_sums(model, queries, responses, tokenizer, max_tokens)
    return math.exp(-math.fsum(found) / sum(map(len, responses)))


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Choice], max_tokens: int
) -> list[bool]:
    """Whether the right ending is the likeliest, by log p over its number of characters.

    Per character, as the rate per byte of common harnesses, so that short endings are not favoured.
    """
    beginnings = encode(tokenizer, [q.beginning for q in questions for _ in q.endings])
    endings = [ending for q in questions for ending in q.endings]
    sums = iter(logprob_sums(model, beginnings, encode(tokenizer, endings), tokenizer, max_tokens))
    right = []
    for question in questions:
        rates = [next(sums) / len(ending) for ending in question.endings]
        right.append(rates[0] > max(rates[1:]))
    return right


@torch.no_grad()
def logprob_sums(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> list[float]:
    """Σ log p of each response's tokens after its query; no query may be empty."""
    found = [0.0] * len(queries)
    device = next(model.parameters()).device
    for rows in micro_batches(sizes(queries, responses), max_tokens):
        batch = collate([queries[i] for i in rows], [responses[i] for i in rows], tokenizer.pad_token_id)
        batch = batch.to(device)
        logprobs = gather_logprobs(models.response_logits(model, batch), batch.responses)
        summed = torch.where(batch.response_mask, logprobs, 0).sum(1).tolist()
        for i, value in zip(rows, summed, strict=True):
            found[i] = value
    return found


def _whole(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[list[Ids], list[Ids]]:
    """Texts as rows: the first token is given (BOS where the tokenizer has one), the others are counted.

    What a model cannot read at once is cut off.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    ids = [row[:longest] for row in tokenizer(list(texts))["input_ids"]]
    ids = [row for row in ids if len(row) > 1]
    return [row[:1] for row in ids], [row[1:] for row in ids]

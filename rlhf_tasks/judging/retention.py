"""What a language model still knows: perplexity, and multiple-choice questions answered by likelihood.

RLHF moves a model away from the text of its training. Base, SFT and policy read the same texts, so that the
results show what RLHF costs, and how much of the cost PPO-ptx avoids.

A file of texts holds paragraphs with an empty line between two. A question is a paragraph too: a line with
its beginning, one with the right ending, and one for each wrong ending. B batch · R response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import judge as config
from rlhf_tasks.config.judge import ENGLISH
from rlhf_tasks.data import positions
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import Ids, encode, encode_rows, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import harness, statistics
from rlhf_tasks.judging.harness import HarnessTasks, TaskResult
from rlhf_tasks.judging.responses import SampledResponses, response_statistics
from rlhf_tasks.judging.results import ResponseStatistics, RetentionResult, TaskChange
from rlhf_tasks.models.load import load_causal, place
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.passes import TokenBudget, read_rows
from rlhf_tasks.project.paths import Paths

PROBES = Path(__file__).parent / "probes"  # the shipped texts and questions
NUM_WRONG = 3  # wrong endings of a question that is made of demonstrations


class Choice(NamedTuple):
    """A beginning and its endings, the right one first."""

    beginning: str
    endings: tuple[str, ...]


class Probes:
    """The texts, questions and tasks of `judge.retention`, read once.

    Raises:
        UserError: if a file of them cannot be read, or has another form, or a task cannot be loaded.
    """

    def __init__(self, settings: config.Retention, paths: Paths) -> None:
        self._settings, count = settings, settings.num_examples
        rows = read_table(paths, "sft", "test")[:count]
        self._demonstrations = [(row["prompt"], row["completion"]) for row in rows]
        self.has_demonstrations = bool(rows)
        self._general = None if settings.general is None else read_texts(settings.general, paths.root)[:count]
        self._questions = (
            make_questions(self._demonstrations)
            if settings.questions is None
            else read_questions(settings.questions, paths.root)[:count]
        )
        self._tasks = None if settings.tasks is None else HarnessTasks(settings.tasks, paths.root)

    def measure_all(
        self, folders: Mapping[str, Path], device: torch.device
    ) -> tuple[dict[str, RetentionResult], dict[str, TaskChange]]:
        """The results of checkpoints by name, and what changed on each task from `sft` to `policy`."""
        results, done = dict[str, RetentionResult](), dict[str, dict[str, TaskResult]]()
        most = self._settings.micro_batch_tokens
        for name, folder in folders.items():
            tokenizer, texts, accuracy = load_tokenizer(folder), {}, None
            model = place(load_causal(folder), device).eval()
            with console.part(f"what {name} retains"):
                if self._demonstrations:
                    texts["sft_text"] = encode_rows(tokenizer, *zip(*self._demonstrations, strict=True))
                if self._general is not None:
                    texts["general"] = _encode_texts(model, tokenizer, self._general)
                perplexities = {
                    text: perplexity(model, *rows, tokenizer, most) for text, rows in texts.items()
                }
                if self._questions:
                    right = answer_questions(model, tokenizer, self._questions, most)
                    accuracy = statistics.wilson(sum(right), len(right))
            if self._tasks is not None:
                with torch.random.fork_rng(), console.part(f"tasks of {name}"):
                    done[name] = self._tasks.measure(model, tokenizer)
            scores = {task: result.scores for task, result in done.get(name, {}).items()}
            results[name] = RetentionResult(perplexity=perplexities, multiple_choice=accuracy, tasks=scores)
        return results, harness.compare_results(done["sft"], done["policy"]) if done else {}


def make_questions(pairs: Sequence[tuple[str, str]]) -> list[Choice]:
    """Questions which completion belongs to a prompt: its own, or one of the next prompts.

    Empty where there are not enough different completions.
    """
    questions = []
    for i, (prompt, completion) in enumerate(pairs):
        others = (pairs[(i + step) % len(pairs)][1] for step in range(1, len(pairs)))
        wrong = list(dict.fromkeys(other for other in others if other != completion))[:NUM_WRONG]
        if len(wrong) == NUM_WRONG:
            questions.append(Choice(prompt, (completion, *wrong)))
    return questions


def perplexity(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> float:
    """exp of the mean −log p of a response token, over all of them."""
    sums = logprob_sums(model, queries, responses, tokenizer, max_tokens)
    return math.exp(-math.fsum(sums) / sum(map(len, responses)))


def measure_responses(
    folder: Path,
    prompts: Sequence[str],
    responses: Mapping[str, SampledResponses],
    references: Sequence[str] | None,
    settings: config.Retention | None,
    device: torch.device,
) -> dict[str, ResponseStatistics]:
    """Statistics of the responses of each model, in ids of the tokenizer of the SFT model in `folder`."""
    settings = settings or config.Retention()
    tokenizer, count = load_tokenizer(folder), settings.num_examples
    model = place(load_causal(folder), device).eval()
    queries = encode(tokenizer, prompts[:count])
    with console.part("how likely the responses are by sft"):
        most = settings.micro_batch_tokens
        perplexities = {
            who: perplexity(model, queries, one.ids[:count], tokenizer, most)
            for who, one in responses.items()
        }
    return {who: response_statistics(one, references, perplexities[who]) for who, one in responses.items()}


def answer_questions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Choice], max_tokens: int
) -> list[bool]:
    """Whether the right ending is the likeliest, by log p divided by its number of characters.

    The rate per character does not favor short endings; common harnesses use the rate per byte.
    """
    beginnings = [q.beginning for q in questions for _ in q.endings]
    endings = [ending for q in questions for ending in q.endings]
    rows = encode_rows(tokenizer, beginnings, endings, eos=False)
    sums = iter(logprob_sums(model, *rows, tokenizer, max_tokens))
    right = []
    for question in questions:
        rates = [next(sums) / len(ending) for ending in question.endings]
        right.append(rates[0] > max(rates[1:]))
    return right


def logprob_sums(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    temperature: float = 1.0,
) -> list[float]:
    """Σ log p of each response's tokens after its query; no query may be empty."""
    return read_rows(
        lambda batch: response_logprobs(model, batch, temperature).sum(1),
        queries,
        responses,
        pad=tokenizer.pad_token_id,
        device=next(model.parameters()).device,
        budget=TokenBudget(max_tokens),
    ).tolist()


def _encode_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[list[Ids], list[Ids]]:
    """Texts as queries and responses: the first token is the query (BOS where the tokenizer has one).

    Tokens beyond the model's longest input are cut off.

    Raises:
        UserError: if no text has two tokens.
    """
    longest = positions.max_positions(model.config)
    ids = [row[:longest] for row in tokenizer(list(texts))["input_ids"]]
    if not (ids := [row for row in ids if len(row) > 1]):
        raise UserError("judge.retention.general: no paragraph has two tokens; give longer ones, or null")
    return [row[:1] for row in ids], [row[1:] for row in ids]


def read_texts(name: str, root: Path) -> list[str]:
    """The paragraphs of `english`, or of a file below `root`, each on one line.

    Raises:
        UserError: if the file cannot be read, or holds no text.
    """
    lines = [" ".join(lines) for lines in _paragraphs(name, "texts", root)]
    if not lines:
        raise UserError(f"judge.retention.general: {name} holds no text; give paragraphs")
    return lines


def read_questions(name: str, root: Path) -> list[Choice]:
    """The questions of `english`, or of a file below `root`. An ending begins with a space.

    Raises:
        UserError: if the file cannot be read, or a question has no wrong ending.
    """
    paragraphs = _paragraphs(name, "questions", root)
    short = [" ".join(lines) for lines in paragraphs if len(lines) < 3]
    if short or not paragraphs:
        problem = f"{short[0]!r} has fewer lines" if short else "it holds no question"
        raise UserError(
            f"judge.retention.questions: {name} must hold questions of three lines or more, with an empty "
            f"line between two: a beginning, the right ending, wrong endings; {problem}"
        )
    return [Choice(lines[0], tuple(f" {line}" for line in lines[1:])) for lines in paragraphs]


def _paragraphs(name: str, kind: str, root: Path) -> list[list[str]]:
    file = PROBES / f"{ENGLISH}_{kind}.txt" if name == ENGLISH else root / name
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"judge.retention: {name!r} cannot be read ({error}); give {ENGLISH}, or a file"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    return [list(paragraph) for has_text, paragraph in groupby(lines, bool) if has_text]

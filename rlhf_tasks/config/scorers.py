"""The scorers of `ppo.scorers`, which give each response its score, and the checks of a verifier."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhf_tasks.config import types as t
from rlhf_tasks.config.types import Section

OPTIMIZED, HELDOUT = "models/reward", "models/reward_heldout"
"""The reward model that a scorer of kind reward_model optimizes, and the one that PPO never optimizes."""
COLUMNS_OF_SAMPLES = ("episode", "prompt", "response", "score", "reward_heldout")
"""Columns of samples.parquet that are not scorers."""


class Check(Section):
    """One check of the answer in a response against a column of the prompt's row."""

    kind: Literal["exact", "number", "regex", "json_schema"]
    """`exact`: the column's text; `number`: its number, within `tolerance`; `regex`: the column's expression
    matches the whole answer; `json_schema`: JSON that the column's schema allows."""
    column: Annotated[str, Field(min_length=1)]
    """Column of `data.columns.keep` with the right answer, the expression or the schema."""
    tolerance: t.NonNegativeFloat = 0.0
    """Largest absolute difference from the right number; 0 for any other kind."""
    weight: t.FiniteFloat = 1.0
    """Score of an answer that passes; one that does not gets 0."""


def _has_one_group(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"{pattern!r} has {groups} groups; give one group, the answer, and write the others as (?:…)"
        )
    return pattern


class Format(Section):
    """What must stand around the answer."""

    pattern: Annotated[str, AfterValidator(_has_one_group)]
    """Regular expression for the whole stripped response; its one group is the answer, `.` matches line
    breaks."""
    weight: t.FiniteFloat = 0.0
    """Score of a response that the pattern matches, whether the answer is right or not."""


class Checks(Section):
    """Answers that are right or wrong, checked against columns of the prompts' rows; no model is needed."""

    checks: Annotated[tuple[Check, ...], t.at_least_one("{kind: exact, column: answer}")] = Field(
        strict=False
    )
    """List of checks by kind; a response is right if it passes all of them."""
    format: Format | None = None
    """What must stand around the answer; null: the whole response is the answer."""


class Weighted(Section):
    """What every scorer but `dummy` has."""

    weight: t.FiniteFloat = 1.0
    """Factor of this score in the sum."""


class RewardModelScorer(Weighted):
    """A reward model: models/reward, which stage reward makes, or a folder."""

    kind: Literal["reward_model"]
    path: str | None = None
    """Folder of a reward model, whose tokenizer and chat template may be others; null: models/reward."""
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Name in the metrics: lower-case letters, digits, `_`; null: its kind, numbered from the second on."""


class FunctionScorer(Weighted):
    """A Python function that scores responses."""

    kind: Literal["function"]
    function: t.ImportPath
    """`module:function`, called with the lists `prompts` and `responses` (or `completions`) and the columns
    of `data.columns.keep`, by its parameters' names; it returns one float per response."""


class HttpScorer(Weighted):
    """A server that scores responses. Requests are retried after status 429 or 5xx and after timeouts."""

    kind: Literal["http"]
    url: t.Address
    """Address that receives {"prompts": […], "responses": […]}, and {"columns": {NAME: […]}} where columns
    are kept, and returns {"scores": […]}. It holds no login."""
    key_variable: t.KeyVariable | None = None
    """Environment variable with a key, sent as `Authorization: Bearer …`; null: the server needs none."""
    timeout_seconds: t.PositiveFloat = 30.0
    """Longest wait for a reply, in seconds."""
    batch_size: t.PositiveInt = 64
    """Responses per request."""


class Budget(Section):
    """The limits of one run of a stage. Requests that are open when a limit is reached are completed."""

    requests: t.PositiveInt | None = None
    """Largest number of requests, without retries; null: no limit."""
    tokens: t.PositiveInt | None = None
    """Largest number of tokens, prompt and completion, as the server counts; null: no limit."""


class ChatModel(Section):
    """A language model behind an endpoint with OpenAI's chat completions."""

    base_url: t.Address
    """Address of the endpoint, such as https://HOST/v1."""
    model: str
    """Name of the model on the server."""
    key_variable: t.KeyVariable | None = None
    """Environment variable that holds the API key; null: the server needs no key."""
    max_reply_tokens: t.PositiveInt = 4
    """Longest reply, in tokens; what it decides stands on its last line."""
    concurrency: t.PositiveInt = 8
    """Number of requests open at the same time."""
    timeout_seconds: t.PositiveFloat = 60.0
    """Longest wait for a connection, or between two parts of a reply, in seconds."""
    max_retries: t.Count = 5
    """Retries of one request after status 429 or 5xx, a timeout or a broken connection."""
    budget: Budget | None = None
    """Limits of one run; null: no limits."""


class LlmScorer(Weighted, ChatModel):
    """A language model that scores each response on a scale; a reply without a score ends the stage.

    Replies are kept in .rlhf/scores.jsonl. Each process asks for its responses, with a budget of its own.
    """

    kind: Literal["llm"]
    prompt: str = "rubric"
    """Prompt of the scorer: `rubric`, `reference` (with `column`), or a file with {prompt} and {response},
    {reference} with `column`, and at will {lowest} and {highest}."""
    column: str | None = None
    """Column of `data.columns.keep` with the right answer, for {reference}; null: none."""
    lowest: t.FiniteFloat = 0.0
    """Lowest score of the scale; a reply below it is no score."""
    highest: t.FiniteFloat = 10.0
    """Highest score of the scale; a reply above it is no score."""

    def problems(self) -> Iterator[str]:
        if self.lowest >= self.highest:
            yield f"lowest={self.lowest:g} must be below highest={self.highest:g}"
        if (self.prompt, self.column) == ("reference", None):
            yield "prompt=reference compares with the right answer: name its column, or set prompt to rubric"
        if self.prompt == "rubric" and self.column is not None:
            yield f"prompt=rubric reads no column: set prompt to reference, or column={self.column} to null"


class LengthPenalty(Weighted):
    """A soft penalty on long responses (DAPO, arXiv 2503.14476, eq. 13): from 0 down to −1."""

    kind: Literal["length_penalty"]
    weight: t.PositiveFloat = 1.0
    max_tokens: t.PositiveInt
    """Length from which the penalty is −1, in tokens: with the stop token, and EOS after one that is text."""
    buffer: t.PositiveInt
    """Number of tokens below max_tokens over which the penalty grows linearly from 0."""

    def problems(self) -> Iterator[str]:
        if self.buffer > self.max_tokens:
            yield (
                f"buffer={self.buffer} exceeds max_tokens={self.max_tokens}, so that an empty response would "
                "have a penalty; lower the buffer"
            )


class VerifierScorer(Weighted, Checks):
    """Answers that are right or wrong, checked against columns of the prompts' rows; no model is needed."""

    kind: Literal["verifier"]


class DummyScorer(Section):
    """Zero for every response: it tests the pipeline without a reward."""

    kind: Literal["dummy"]


Scorer = Annotated[
    RewardModelScorer
    | FunctionScorer
    | HttpScorer
    | LlmScorer
    | VerifierScorer
    | LengthPenalty
    | DummyScorer,
    Field(discriminator="kind"),
]


def scorer_names(scorers: Sequence[Scorer]) -> list[str]:
    """The name of each scorer: its own, else its kind; further ones of the kind are `kind_2`, `kind_3`, …."""
    names, unnamed = [], Counter[str]()
    for one in scorers:
        unnamed[one.kind] += 1
        number, given = unnamed[one.kind], one.name if isinstance(one, RewardModelScorer) else None
        names.append(given or (one.kind if number == 1 else f"{one.kind}_{number}"))
    return names


def reward_folders(scorers: Sequence[Scorer]) -> list[str]:
    """The folder of each reward model that PPO optimizes, as configured; models/reward for a null path."""
    models = [one for one in scorers if isinstance(one, RewardModelScorer)]
    return [OPTIMIZED if one.path is None else Path(one.path).as_posix() for one in models]


def chat_models(scorers: Sequence[Scorer]) -> list[str]:
    """The names of the language models behind endpoints that PPO optimizes."""
    return sorted({one.model for one in scorers if isinstance(one, LlmScorer)})


def conflicts(scorers: Sequence[Scorer], response_length: int) -> Iterator[str]:
    """The problems of `ppo.scorers` with each other."""
    if (dummies := sum(one.kind == "dummy" for one in scorers)) > 1:
        yield f"scorers: dummy is named {dummies} times; keep one"
    for name, count in Counter(scorer_names(scorers)).items():
        if count > 1 or name in COLUMNS_OF_SAMPLES:
            other = "several scorers have" if count > 1 else "a column of samples.parquet has"
            yield f"scorers: {name!r}: {other} this name; give the scorer another one"
    for one in scorers:
        if isinstance(one, LengthPenalty) and one.max_tokens - one.buffer >= response_length:
            yield (
                f"scorers: length_penalty starts above max_tokens − buffer = {one.max_tokens - one.buffer} "
                f"tokens, which no response exceeds with response_length={response_length}; lower max_tokens"
            )
        if isinstance(one, RewardModelScorer) and one.path and Path(one.path).as_posix() == OPTIMIZED:
            yield f"scorers: path={OPTIMIZED} is the default; remove path, or set it to null"
    folders = reward_folders(scorers)
    for folder, count in Counter(folders).items():
        if count > 1:
            yield f"scorers: the reward model {folder} is named {count} times; name each one once"
    if HELDOUT in folders:
        yield f"scorers: PPO must not optimize {HELDOUT}, which selects and judges; give another reward model"

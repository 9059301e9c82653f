"""The scorers of `ppo.scorers`, which give each response its score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_tasks.config.judge import HELDOUT, OPTIMISED
from rlhf_tasks.config.types import Address, FiniteFloat, KeyVariable, PositiveFloat, PositiveInt, Section
from rlhf_tasks.config.verifier import Check, Format

COLUMNS_OF_SAMPLES = ("episode", "prompt", "response", "score", "reward_heldout")
"""Columns of samples.parquet that are no scorers."""


class RewardModelScorer(Section):
    """A reward model: models/reward, which stage reward makes, or a folder.

    `path` and `name` may be left out for null.
    """

    kind: Literal["reward_model"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score, before the reward models are combined."""
    path: str | None = None
    """Folder of a ready reward model, which may have another tokenizer and chat template; null:
    models/reward."""
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Name of the scorer in the metrics: lower-case letters, digits and `_`; null: its kind, numbered from
    the second of a kind."""


class FunctionScorer(Section):
    """A Python function that scores responses."""

    kind: Literal["function"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, called with a list of prompts and a list of responses, and with the columns of
    `data.columns.keep` that it takes by keyword; it returns one float per response."""


class HttpScorer(Section):
    """A server that scores responses. Requests are retried after status 429 or 5xx and after timeouts.

    `key_variable` may be left out for null.
    """

    kind: Literal["http"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""
    url: Address
    """Address that receives {"prompts": […], "responses": […]} and returns {"scores": […]}; where columns are
    kept, it also receives {"columns": {NAME: […]}}. It holds no login."""
    key_variable: KeyVariable | None = None
    """Environment variable that holds a key, sent as `Authorization: Bearer …`; null: the server needs
    none."""
    timeout_seconds: PositiveFloat
    """Longest wait for a reply, in seconds."""
    batch_size: PositiveInt
    """Responses per request."""


class LengthPenalty(Section):
    """A soft penalty on long responses (DAPO, arXiv 2503.14476, eq. 13): from 0 down to −1."""

    kind: Literal["length_penalty"]
    """Kind of this scorer."""
    weight: PositiveFloat
    """Factor of this score in the sum."""
    max_tokens: PositiveInt
    """Length from which the penalty is −1, in tokens, stop token included."""
    buffer: PositiveInt
    """Number of tokens below max_tokens over which the penalty grows linearly from 0."""

    @model_validator(mode="after")
    def _starts_above_zero(self) -> LengthPenalty:
        if self.buffer > self.max_tokens:
            raise ValueError(
                f"buffer={self.buffer} exceeds max_tokens={self.max_tokens}, so that an empty response would "
                "have a penalty; lower the buffer"
            )
        return self


class VerifierScorer(Section):
    """Answers that are right or wrong, checked against columns of the prompts' rows; no model is needed."""

    kind: Literal["verifier"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""
    checks: tuple[Check, ...] = Field(strict=False, min_length=1)
    """List of checks by kind; a response is right if it passes all of them."""
    format: Format | None
    """What must stand around the answer; null: the whole response is the answer."""


class DummyScorer(Section):
    """Zero for every response: it tests the pipeline without a reward."""

    kind: Literal["dummy"]
    """Kind of this scorer."""


Scorer = Annotated[
    RewardModelScorer | FunctionScorer | HttpScorer | VerifierScorer | LengthPenalty | DummyScorer,
    Field(discriminator="kind"),
]


class MeanMinusDeviations(Section):
    """The mean of the reward models' scores minus a multiple of their standard deviation."""

    mean_minus_deviations: PositiveFloat
    """Multiple of the standard deviation."""


def _a_rule(value: Any) -> Any:
    if value in ("sum", "min") or isinstance(value, dict | MeanMinusDeviations):
        return value
    raise ValueError("must be sum, min or {mean_minus_deviations: 1.0}")


Combination = Annotated[Literal["sum", "min"] | MeanMinusDeviations, BeforeValidator(_a_rule)]


# ----------------------------------------------------------------------------- rules of the list


def scorer_names(scorers: Sequence[Scorer]) -> list[str]:
    """The name of each scorer: its own, else its kind; further ones of the kind are `kind_2`, `kind_3`, …."""
    names, unnamed = [], Counter[str]()
    for one in scorers:
        unnamed[one.kind] += 1
        number = unnamed[one.kind]
        given = one.name if isinstance(one, RewardModelScorer) else None
        names.append(given or (one.kind if number == 1 else f"{one.kind}_{number}"))
    return names


def reward_folders(scorers: Sequence[Scorer]) -> list[str]:
    """The folder of each reward model that PPO optimises, as configured; models/reward for a null path."""
    return [
        OPTIMISED if one.path is None else Path(one.path).as_posix()
        for one in scorers
        if isinstance(one, RewardModelScorer)
    ]


def conflicts(scorers: Sequence[Scorer], combine: Combination, response_length: int) -> Iterator[str]:
    """The problems of `ppo.scorers` with each other and with how they are combined."""
    if not scorers:
        yield "scorers is empty; add at least one, such as {kind: dummy}"
    dummies = sum(one.kind == "dummy" for one in scorers)
    if dummies > 1:
        yield f"scorers: dummy is named {dummies} times; keep one"
    for name, count in Counter(scorer_names(scorers)).items():
        if count > 1 or name in COLUMNS_OF_SAMPLES:
            other = "several scorers have" if count > 1 else "a column of samples.parquet has"
            yield f"scorers: {name!r}: {other} this name; give the scorer another one"
    yield from _reward_model_conflicts(scorers, combine)
    for one in scorers:
        if isinstance(one, LengthPenalty) and one.max_tokens - one.buffer >= response_length:
            yield (
                f"scorers: length_penalty starts above max_tokens − buffer = {one.max_tokens - one.buffer} "
                f"tokens, which no response exceeds with response_length={response_length}; lower max_tokens"
            )


def _reward_model_conflicts(scorers: Sequence[Scorer], combine: Combination) -> Iterator[str]:
    folders = reward_folders(scorers)
    for folder, count in Counter(folders).items():
        if count > 1:
            yield f"scorers: the reward model {folder} is named {count} times; name each one once"
    if HELDOUT in folders:
        yield f"scorers: PPO must not optimise {HELDOUT}, which selects and judges; give another reward model"
    paths = [one.path for one in scorers if isinstance(one, RewardModelScorer) and one.path is not None]
    if OPTIMISED in {Path(path).as_posix() for path in paths}:
        yield f"scorers: path={OPTIMISED} is the default; remove path, or set it to null"
    if combine != "sum" and len(folders) < 2:
        yield (
            f"combine_reward_models needs at least two reward models, and scorers has "
            f"{len(folders)}; add another one, or set it to sum"
        )

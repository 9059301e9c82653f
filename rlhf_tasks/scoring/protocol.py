"""What a scorer is, and what it scores: one protocol for PPO, its selection, stage reward and judges.

B responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tokenizer import Ids, encode_rows, response_texts
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.models.tensors import NonFiniteError

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Responses:
    """B responses to score, with their prompts and the kept columns of the prompts' rows.

    PPO makes them from token ids, judges from texts; the other form is made when a scorer asks for it. Texts
    of a `words` tokenizer have one space between words, whatever the original white space was.
    """

    prompts: Sequence[str]
    """The prompts as the data has them, with special tokens and chat template; ids would lose some of it."""
    given: tuple[Sequence[Any], Sequence[Any]]
    """Queries and responses as ids of the tokenizer; without one, prompts and responses as texts."""
    tokenizer: PreTrainedTokenizerBase | None
    columns: Columns

    @classmethod
    def of_ids(
        cls,
        prompts: Sequence[str],
        queries: Sequence[Ids],
        responses: Sequence[Ids],
        tokenizer: PreTrainedTokenizerBase,
        columns: Columns = NONE,
    ) -> Responses:
        """Rows of PPO, in the ids of `tokenizer`; a response that ended has its EOS."""
        return cls(prompts, (queries, responses), tokenizer, columns)

    @classmethod
    def of_texts(cls, prompts: Sequence[str], texts: Sequence[str], columns: Columns = NONE) -> Responses:
        """Rows of a judge; every response counts as ended."""
        return cls(prompts, (prompts, texts), None, columns)

    def __len__(self) -> int:
        return len(self.given[0])

    @cached_property
    def texts(self) -> list[str]:
        """The responses without their EOS."""
        if self.tokenizer is None:
            return list(self.given[1])
        return response_texts(self.tokenizer, *self.given)

    @property
    def ended(self) -> list[bool]:
        """Whether each response ended with EOS."""
        if self.tokenizer is None:
            return [True] * len(self)
        return [response[-1:] == [self.tokenizer.eos_token_id] for response in self.given[1]]

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[Ids], Sequence[Ids]]:
        """Queries and responses: the given ids, or the texts in the ids of `tokenizer`, with EOS."""
        if self.tokenizer is None:
            return encode_rows(tokenizer, self.prompts, self.texts)
        return self.given


class Scorer(Protocol):
    """A function of responses: a reward in PPO, a measure of quality for a judge."""

    def __call__(self, rows: Responses) -> Tensor:
        """(B,) on the CPU, float32 or float64, in the order of the rows; a higher score is better.

        NaN says that the scorer cannot decide: a judge counts a failure, and PPO's guards handle it.
        """


class ScorerError(RuntimeError):
    """A scorer returned no finite number for a response, or could not be reached."""


class ServiceFailed(ScorerError, OutsideFault):
    """A service that scores was busy or away in all tries."""


class UnusableScores(ScorerError, UserError):
    """A scorer returned a wrong type or number of scores, or refused the request; the user can fix it."""


class NonFiniteScore(NonFiniteError, ScorerError):
    """A scorer returned NaN or infinity; PPO's guards handle it."""


def read_scores(
    name: str, returned: Any, count: int, per: str = "response", undecided: bool = False
) -> Tensor:
    """What a function or a service returned, as (count,) float32; `name` is its name in messages.

    An `undecided` None is NaN.

    Raises:
        UnusableScores: with the value that is not `count` numbers.
    """
    try:
        if isinstance(returned, Mapping | Set | bytes | bytearray) or hasattr(returned, "columns"):
            raise TypeError(f"a {type(returned).__name__} is no list in the order of the rows")
        given = [math.nan if x is None and undecided else x for x in returned]
        if any(isinstance(x, str | bytes) for x in given):
            raise TypeError("text is not a number")
        scores = torch.tensor([float(x) for x in given], dtype=torch.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UnusableScores(
            f"{name} must return one number per {per}, but returned {excerpt(returned)}: {error}"
        ) from error
    if len(scores) != count:
        raise UnusableScores(f"{name} must return one number per {per}, but gave {len(scores)} for {count}")
    return scores


def excerpt(value: Any) -> str:
    """The beginning of a value, for a message."""
    return shorten(value.decode(errors="replace") if isinstance(value, bytes) else repr(value))


def shorten(text: str) -> str:
    return text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")

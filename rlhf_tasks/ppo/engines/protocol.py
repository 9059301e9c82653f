"""What PPO expects of a program that samples its rollouts: token ids in, token ids and log-probs out.

B batch · n samples. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhf_tasks.errors import OutsideFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = list[int]
ABOVE_ZERO = 1e-4  # nats by which rounding may lift a log-prob above 0


class EngineError(OutsideFault):
    """An engine gave no answers, or answers that cannot be right."""


class EngineGone(EngineError):
    """The engine does not answer, or answers with an error of its own: a new start may help."""


@dataclass(frozen=True)
class Answers:
    """Responses in the order p_1 … p_B, again p_1 … p_B, and so on, `n` times."""

    responses: list[Ids]
    logprobs: list[list[float]]
    """Of each token of each response, in nats, at the sampling temperature."""
    version: int
    """The version of the weights that every token was sampled from."""


class Engine(Protocol):
    """A program that samples from the weights that it was given last."""

    name: str
    """The program and its version, such as `vLLM 0.32.0`, for the model card."""

    def load(self, weights: PreTrainedModel, version: int) -> None:
        """Sample from these weights from now on. No `sample` runs meanwhile.

        Raises:
            EngineError: if the engine does not take them.
        """

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        """`n` responses to each query; the draws for a query depend on its seed.

        Raises:
            EngineError: after a bounded time, if there is no usable answer.
        """

    def close(self) -> None:
        """End what the engine has started; it may be called twice."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What every response must fit: it ends with `stop`, or has `length` tokens."""

    stop: int
    length: int
    vocab: int


def check(answers: Answers, count: int, version: int, limits: Limits) -> None:
    """Check that answers can be samples: their number, version, tokens, ends and log-probs.

    Raises:
        EngineError: naming the first problem.
    """
    if answers.version != version:
        raise EngineError(
            f"the engine answered with weights of version {answers.version}, and version {version} is in "
            "use: the answers are stale"
        )
    if len(answers.responses) != count or len(answers.logprobs) != count:
        raise EngineError(f"the engine gave {len(answers.responses)} responses to {count} requests")
    for response, logprobs in zip(answers.responses, answers.logprobs, strict=True):
        if problem := _problem(response, logprobs, limits):
            raise EngineError(f"the engine gave a response {problem}")


def _problem(response: Ids, logprobs: list[float], limits: Limits) -> str | None:
    if not response:
        return "without a token"
    if any(not 0 <= token < limits.vocab for token in response):
        return f"with a token that the model does not have; it has {limits.vocab}"
    if len(response) > limits.length:
        return f"of {len(response)} tokens; {limits.length} are allowed"
    if limits.stop in response[:-1]:
        return f"that continues after the stop token {limits.stop}"
    if response[-1] != limits.stop and len(response) < limits.length:
        return f"that was cut after {len(response)} of {limits.length} tokens, without the stop token"
    if len(logprobs) != len(response):
        return f"of {len(response)} tokens with {len(logprobs)} log-probs"
    if not all(math.isfinite(x) and x <= ABOVE_ZERO for x in logprobs):
        return "with a log-prob that is NaN, infinite or above 0"
    return None

"""The scorers of `ppo.scorers`, which give each response its score."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_tasks.config.types import FiniteFloat, PositiveFloat, PositiveInt, Section


class RewardModelScorer(Section):
    """The reward model models/reward, trained by stage reward or fetched by `reward.from`."""

    kind: Literal["reward_model"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""


class FunctionScorer(Section):
    """A Python function that scores responses. Add its file to the deps of stage ppo in dvc.yaml."""

    kind: Literal["function"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, called with a list of prompts and a list of responses; it returns one float per
    response."""


class HttpScorer(Section):
    """A server that scores responses. Requests are retried after status 429 or 5xx and after timeouts."""

    kind: Literal["http"]
    """Kind of this scorer."""
    weight: FiniteFloat
    """Factor of this score in the sum."""
    url: Annotated[str, Field(pattern=r"^https?://")]
    """Address that receives {"prompts": […], "responses": […]} and returns {"scores": […]}."""
    timeout_seconds: PositiveFloat
    """Longest wait for a reply, in seconds."""
    batch_size: PositiveInt
    """Responses per request."""


class DummyScorer(Section):
    """Zero for every response: it tests the pipeline without a reward."""

    kind: Literal["dummy"]
    """Kind of this scorer."""


Scorer = Annotated[RewardModelScorer | FunctionScorer | HttpScorer | DummyScorer, Field(discriminator="kind")]

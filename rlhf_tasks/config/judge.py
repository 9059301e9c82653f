"""Judges, and what else is measured of the answers and the models at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_tasks.config.types import (
    Count,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    check_source,
)

TAKEN = (
    "agreement", "calibration", "choice", "distinct_1", "distinct_2", "ended", "human", "kappa", "length",
    "perplexity", "repetition", "reward_gap",
)  # fmt: skip
"""First parts of the stage's other metric keys."""
OPTIMISED, HELDOUT = "models/reward", "models/reward_heldout"
"""What a scorer of kind reward_model gives PPO to optimise, and what it does not."""
LISTED = "judge.judges"
"""Where judges stand in params.yaml, but for the one of ppo.select_by."""


def _free(name: str) -> str:
    if name in TAKEN or name.startswith("rouge"):
        raise ValueError(f"{name!r} is the name of another metric; call the judge otherwise")
    return name


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), AfterValidator(_free)]


class GoldJudge(Section):
    """The synthetic task's own judge."""

    kind: Literal["gold"]
    name: Name


class RewardModelJudge(Section):
    """A reward model's folder; not the one that PPO optimised."""

    kind: Literal["reward_model"]
    name: Name
    path: str


class FunctionJudge(Section):
    kind: Literal["function"]
    name: Name
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        description="`module:function`, called with lists of prompts and of answers; gives a float for each, "
        "NaN where it cannot tell"
    )


class Budget(Section):
    """What one run of a judge may spend; requests that are in flight when it is reached are finished."""

    requests: PositiveInt | None = Field(description="replies asked for; tries after a failure not counted")
    tokens: PositiveInt | None = Field(description="prompt and completion, as the server counts them")


class LlmJudge(Section):
    """A model behind an OpenAI-compatible endpoint, asked which of two answers is better."""

    kind: Literal["llm"]
    name: Name
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")]
    model: str
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = Field(
        description="the environment variable that holds the key; null: the server asks for none"
    )
    prompt: str = Field(description="tldr, hhh, or a file with {prompt}, {first} and {second}")
    logprobs: bool = Field(description="ask for the probabilities of the verdict; else the reply is parsed")
    max_reply_tokens: PositiveInt = Field(description="of a reply whose last line is A or B")
    concurrency: PositiveInt
    timeout_seconds: PositiveFloat = Field(description="for connecting, and for each silence")
    max_retries: Count = Field(description="after 429, 5xx, a timeout or a broken connection")
    budget: Budget | None


class OwnModel(Section):
    """A model of this machine, asked `prompt`."""

    name: Name
    path: str = Field(description="a folder or a hub id")
    revision: Revision | None
    prompt: str = Field(description="a shipped one, or a file with {prompt}, {first} and {second}")
    micro_batch_tokens: PositiveInt

    @model_validator(mode="after")
    def _origin(self) -> Self:
        check_source(self.path, self.revision, f"path of judge {self.name}")
        return self


class LocalJudge(OwnModel):
    """A causal model, asked as `llm` is; shipped prompts: tldr, hhh."""

    kind: Literal["local"]


class PairRmJudge(OwnModel):
    """A ranker: a sequence classifier that reads a prompt and two answers; shipped prompt: ranker."""

    kind: Literal["pair_rm"]


class Mixture(Section):
    """Judges of the list as one: `all_of` must agree, of `majority` the more."""

    kind: Literal["all_of", "majority"]
    name: Name
    judges: tuple[str, ...] = Field(strict=False, min_length=2, description="names of other judges")


Judge = Annotated[
    GoldJudge | RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge | PairRmJudge | Mixture,
    Field(discriminator="kind"),
]


Referee = Annotated[
    RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge | PairRmJudge, Field(discriminator="kind")
]
"""Who may choose a checkpoint: not the gold judge, whose word is for verdicts alone."""


class Selection(Section):
    """A judge of its own that chooses which of PPO's checkpoints is kept."""

    judge: Referee
    max_failure_share: Fraction = Field(description="of its verdicts on one checkpoint; above it PPO fails")

    @model_validator(mode="after")
    def _is_another(self) -> Self:
        if isinstance(self.judge, RewardModelJudge) and _shipped(self.judge):
            raise ValueError(
                f"{self.judge.path} needs no judge: select_by: null chooses by models/reward_heldout, and "
                "never by models/reward, which is optimised"
            )
        return self


class Retention(Section):
    """What the language model still knows: base, SFT and policy on the same texts and questions."""

    num_examples: PositiveInt = Field(description="of each kind, at most")
    micro_batch_tokens: PositiveInt
    general: str | None = Field(
        description="english, or a text file, a text a paragraph; null: SFT text only"
    )
    questions: str | None = Field(
        description="english, or a file (README: Judges); null: made of SFT text, whose completion belongs "
        "to a prompt"
    )


class Judging(Section):
    judges: tuple[Judge, ...] = Field(strict=False, min_length=1)
    max_failure_share: Fraction = Field(description="of a comparison's prompts; above it the stage fails")
    num_examples: PositiveInt
    temperature: PositiveFloat
    num_samples_shown: Count
    num_traces: Count = Field(description="replies of each llm judge that MLflow shows as traces")
    labels: str = Field(description="what people said of pairs; `rlhf label` makes it, and DVC keeps it")
    retention: Retention | None

    @model_validator(mode="after")
    def _names(self) -> Judging:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        counts = Counter(judge.name for judge in self.judges)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            yield f"judges: {', '.join(twice)} is the name of several; each needs a name of its own"
        plain = {judge.name for judge in self.judges if not isinstance(judge, Mixture)}
        for judge in self.judges:
            if isinstance(judge, Mixture):
                unknown = sorted(set(judge.judges) - plain)
                if unknown:
                    known = ", ".join(sorted(plain)) or "none"
                    yield (
                        f"judges: {judge.name} mixes {', '.join(unknown)}, which is no judge of the list, or "
                        f"a mixture itself; known: {known}"
                    )
                if len(set(judge.judges)) < len(judge.judges):
                    yield f"judges: {judge.name} names a judge twice"

    @property
    def scoring(self) -> set[str]:
        """Names of the judges that give each answer a number: these cost no request."""
        kinds = (GoldJudge, RewardModelJudge, FunctionJudge)
        return {judge.name for judge in self.judges if isinstance(judge, kinds)}

    @property
    def asks_for_own_reward_model(self) -> bool:
        """Whether a judge is a reward model that this pipeline makes."""
        return any(_shipped(judge) for judge in self.judges if isinstance(judge, RewardModelJudge))


def _shipped(judge: RewardModelJudge) -> bool:
    return Path(judge.path).as_posix() in (OPTIMISED, HELDOUT)

"""The section `judge`: judges, human labels, retention, and the judge that selects PPO's checkpoint."""

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

RESERVED = (
    "agreement", "calibration", "choice", "distinct_1", "distinct_2", "ended", "human", "kappa", "length",
    "perplexity", "repetition", "reward_gap",
)  # fmt: skip
"""First parts of the other metric keys of stage judge: no judge can have such a name."""
OPTIMISED, HELDOUT = "models/reward", "models/reward_heldout"
"""The reward model that PPO optimises as a scorer of kind reward_model, and the one that it never does."""
LISTED = "judge.judges"
"""The place of judges in params.yaml, except the one of ppo.select_by."""


def _not_reserved(name: str) -> str:
    if name in RESERVED or name.startswith("rouge"):
        raise ValueError(f"{name!r} is the name of another metric; give the judge another name")
    return name


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), AfterValidator(_not_reserved)]


class GoldJudge(Section):
    """The synthetic task's own judge."""

    kind: Literal["gold"]
    name: Name


class RewardModelJudge(Section):
    """A reward model that PPO did not optimise."""

    kind: Literal["reward_model"]
    name: Name
    path: str


class FunctionJudge(Section):
    """A Python function that scores responses."""

    kind: Literal["function"]
    name: Name
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        description="`module:function`, called with lists of prompts and of answers; gives a float for each, "
        "NaN where it cannot tell"
    )


class Budget(Section):
    """What one run of a judge may spend. Requests in flight are finished when the budget is reached."""

    requests: PositiveInt | None = Field(description="replies asked for; tries after a failure not counted")
    tokens: PositiveInt | None = Field(description="prompt and completion, as the server counts them")


class LlmJudge(Section):
    """A model behind an OpenAI-compatible endpoint that compares two responses."""

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


class LocalModel(Section):
    """A model on this machine that replies to `prompt`."""

    name: Name
    path: str = Field(description="a folder or a hub id")
    revision: Revision | None
    prompt: str = Field(description="a shipped one, or a file with {prompt}, {first} and {second}")
    micro_batch_tokens: PositiveInt

    @model_validator(mode="after")
    def _origin(self) -> Self:
        check_source(self.path, self.revision, f"path of judge {self.name}")
        return self


class LocalJudge(LocalModel):
    """A causal model that replies with a letter, as kind `llm`; shipped prompts: tldr, hhh."""

    kind: Literal["local"]


class PairRmJudge(LocalModel):
    """A ranker: a sequence classifier that reads a prompt and two responses; shipped prompt: ranker."""

    kind: Literal["pair_rm"]


class CombinedJudge(Section):
    """Several judges of the list as one: `all_of` needs all of them, `majority` the larger number."""

    kind: Literal["all_of", "majority"]
    name: Name
    judges: tuple[str, ...] = Field(strict=False, min_length=2, description="names of other judges")


Judge = Annotated[
    GoldJudge | RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge | PairRmJudge | CombinedJudge,
    Field(discriminator="kind"),
]


SelectionJudge = Annotated[
    RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge | PairRmJudge, Field(discriminator="kind")
]
"""A judge that may select a checkpoint. The gold judge may not: it only measures the result."""


class Selection(Section):
    """The judge that selects which checkpoint PPO keeps."""

    judge: SelectionJudge
    max_failure_share: Fraction = Field(description="of its verdicts on one checkpoint; above it PPO fails")

    @model_validator(mode="after")
    def _is_not_a_pipeline_model(self) -> Self:
        if isinstance(self.judge, RewardModelJudge) and _is_pipeline_model(self.judge):
            raise ValueError(
                f"{self.judge.path} cannot be the judge: PPO optimises models/reward, and select_by: null "
                "selects by models/reward_heldout; give another judge, or null"
            )
        return self


class Retention(Section):
    """What the language models still know: base, SFT and policy on the same texts and questions."""

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
    """How stage judge compares and measures the policies."""

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
            yield f"judges: {', '.join(twice)} is the name of several judges; give each another name"
        plain = {judge.name for judge in self.judges if not isinstance(judge, CombinedJudge)}
        for judge in self.judges:
            if isinstance(judge, CombinedJudge):
                unknown = sorted(set(judge.judges) - plain)
                if unknown:
                    known = ", ".join(sorted(plain)) or "none"
                    yield (
                        f"judges: {judge.name} combines {', '.join(unknown)}, which is not in the list or "
                        f"is a combined judge too; give some of: {known}"
                    )
                if len(set(judge.judges)) < len(judge.judges):
                    yield f"judges: {judge.name} names a judge twice"

    @property
    def scoring(self) -> set[str]:
        """Names of the judges that give each response a score: they cost no request."""
        kinds = (GoldJudge, RewardModelJudge, FunctionJudge)
        return {judge.name for judge in self.judges if isinstance(judge, kinds)}

    @property
    def needs_pipeline_reward_model(self) -> bool:
        """Whether a judge is a reward model that this pipeline trains."""
        return any(_is_pipeline_model(judge) for judge in self.judges if isinstance(judge, RewardModelJudge))


def _is_pipeline_model(judge: RewardModelJudge) -> bool:
    return Path(judge.path).as_posix() in (OPTIMISED, HELDOUT)

"""The judges, and the other measurements of stage judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_tasks.config.types import (
    Address,
    Count,
    Fraction,
    KeyVariable,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    check_source,
)
from rlhf_tasks.config.verifier import Check, Format

RESERVED = (
    "agreement", "calibration", "choice", "distinct_1", "distinct_2", "ended", "human", "kappa", "length",
    "perplexity", "repetition", "reward_gap", "task", "task_drop",
)  # fmt: skip
"""First parts of the names of the other metrics of stage judge; no judge may have such a name."""
OPTIMISED, HELDOUT = "models/reward", "models/reward_heldout"
"""The reward model that a scorer of kind reward_model optimises, and the one that PPO never optimises."""
LISTED = "judge.judges"
"""The key of the judges in params.yaml; only the judge of ppo.select_by has another key."""


def _not_reserved(name: str) -> str:
    if name in RESERVED or name.startswith("rouge"):
        raise ValueError(f"{name!r} is the name of another metric; give the judge another name")
    return name


Name = Annotated[
    str,
    Field(pattern=r"^[a-z][a-z0-9_]*$"),
    AfterValidator(_not_reserved),
]


class GoldJudge(Section):
    """The judge of the synthetic task, which knows the facts of every post."""

    kind: Literal["gold"]
    """Kind of this judge."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""


class RewardModelJudge(Section):
    """A reward model that scores each response, such as models/reward_heldout.

    A judge that is the reward model that PPO optimised is marked in the metrics and in the report.
    """

    kind: Literal["reward_model"]
    """Kind of this judge."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    path: str
    """Folder of the reward model."""


class FunctionJudge(Section):
    """A Python function that scores each response, or compares two."""

    kind: Literal["function"]
    """Kind of this judge."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, called with a list of prompts and a list of responses, and with the columns of
    `data.columns.keep` that it takes by keyword; it returns one float per response, NaN for one that it
    cannot score."""
    pairwise: bool = False
    """Whether the function compares: it is called with a list of prompts and two lists of responses, once in
    each order, and returns per prompt the probability that the first response is better, or None."""


class VerifierJudge(Section):
    """Answers that are right or wrong, checked against columns of the prompts' rows; no model is needed."""

    kind: Literal["verifier"]
    """Kind of this judge."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    checks: tuple[Check, ...] = Field(strict=False, min_length=1)
    """List of checks by kind; a response is right if it passes all of them."""
    format: Format | None
    """What must stand around the answer; null: the whole response is the answer."""


class Budget(Section):
    """The limits of one run of a judge. Requests that are open when a limit is reached are completed."""

    requests: PositiveInt | None
    """Largest number of requests, without retries; null: no limit."""
    tokens: PositiveInt | None
    """Largest number of tokens, prompt and completion, as the server counts; null: no limit."""


class LlmJudge(Section):
    """A language model behind an endpoint with OpenAI's chat completions; it compares two responses."""

    kind: Literal["llm"]
    """Kind of this judge."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    base_url: Address
    """Address of the endpoint, such as https://HOST/v1."""
    model: str
    """Name of the model on the server."""
    key_variable: KeyVariable | None
    """Environment variable that holds the API key; null: the server needs no key."""
    prompt: str
    """Prompt of the judge: tldr, hhh, or a file with {prompt}, {first} and {second}."""
    logprobs: bool
    """Whether the request includes log-probabilities, so that the comparison is the probability of A against
    B; if false, or if the server sends none, the reply is parsed."""
    max_reply_tokens: PositiveInt
    """Longest reply, in tokens; its last line must be A or B."""
    concurrency: PositiveInt
    """Number of requests open at the same time."""
    timeout_seconds: PositiveFloat
    """Longest wait for a connection, or between two parts of a reply, in seconds."""
    max_retries: Count
    """Retries of one request after status 429 or 5xx, a timeout or a broken connection."""
    budget: Budget | None
    """Limits of one run; null: no limits."""


class LocalModel(Section):
    """A model on this machine that compares two responses."""

    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    path: str
    """Folder or hub id of the model."""
    revision: Revision | None
    """Commit hash of a hub id in `path`; null otherwise."""
    prompt: str
    """Prompt of the judge: tldr, hhh, ranker, or a file with {prompt}, {first} and {second}."""
    micro_batch_tokens: PositiveInt
    """Most padded tokens per forward pass."""

    @model_validator(mode="after")
    def _origin(self) -> Self:
        check_source(self.path, self.revision, f"path of judge {self.name}")
        return self


class LocalJudge(LocalModel):
    """A causal language model, prompted as `llm` is; shipped prompts are tldr and hhh.

    The comparison is the probability of the next token, A against B.
    """

    kind: Literal["local"]
    """Kind of this judge."""


class PairRmJudge(LocalModel):
    """A ranker: a sequence classifier that reads a prompt and two responses; the shipped prompt is ranker.

    Its model has one label (the first response is better) or two.
    """

    kind: Literal["pair_rm"]
    """Kind of this judge."""


class CombinedJudge(Section):
    """Several judges of the list combined into one."""

    kind: Literal["all_of", "majority"]
    """`all_of`: a win or loss needs all judges, else it is a tie; `majority`: the side with more judges
    wins."""
    name: Name
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""
    judges: tuple[str, ...] = Field(strict=False, min_length=2)
    """Names of the judges of `judge.judges` that are combined."""


Judge = Annotated[
    GoldJudge
    | RewardModelJudge
    | FunctionJudge
    | VerifierJudge
    | LlmJudge
    | LocalJudge
    | PairRmJudge
    | CombinedJudge,
    Field(discriminator="kind"),
]


SelectionJudge = Annotated[
    RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge | PairRmJudge, Field(discriminator="kind")
]
"""A judge that may select a checkpoint: not the gold judge, which only judges the final policy."""


class Selection(Section):
    """A judge that selects the checkpoint that PPO keeps."""

    judge: SelectionJudge
    """Judge that compares the checkpoint's responses with the references."""
    max_failure_share: Fraction
    """Largest share of failed comparisons on one checkpoint; above it the stage fails."""

    @model_validator(mode="after")
    def _is_not_a_pipeline_model(self) -> Self:
        if isinstance(self.judge, RewardModelJudge) and _is_pipeline_model(self.judge):
            raise ValueError(
                f"select_by cannot name {self.judge.path}: set select_by to null to select by "
                "models/reward_heldout; models/reward, which PPO optimises, never selects"
            )
        return self


class Tasks(Section):
    """Tasks of lm-evaluation-harness, an extra (`pip install -e '.[eval]'`), done by base, SFT and policy."""

    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(strict=False, min_length=1)
    """Names of tasks, or of groups or tags of tasks."""
    folder: str | None
    """Folder of the tasks' YAML files, whose paths are relative to the project's folder; null: only the tasks
    of the harness, whose data is on a hub."""
    num_examples: PositiveInt | None
    """Largest number of documents per task; null: all of them."""
    batch_size: PositiveInt
    """Number of requests per forward pass."""

    @model_validator(mode="after")
    def _are_different(self) -> Self:
        twice = sorted(name for name, count in Counter(self.names).items() if count > 1)
        if twice:
            raise ValueError(f"names: {', '.join(twice)} is there twice; name each task once")
        return self


class Retention(Section):
    """What the language model retains: base, SFT and policy on the same texts and questions."""

    num_examples: PositiveInt
    """Largest number of texts, and of questions."""
    micro_batch_tokens: PositiveInt
    """Most padded tokens per forward pass."""
    general: str | None
    """General text for perplexity: `english` (a dozen shipped paragraphs), or a text file with one text per
    paragraph; null: only completions of demonstrations."""
    questions: str | None
    """Multiple-choice questions: `english` (thirty shipped ones, chance is 25%), or a file with one question
    per paragraph (beginning, right ending, wrong endings, one per line); null: which of four completions
    belongs to a prompt."""
    tasks: Tasks | None
    """Tasks of lm-evaluation-harness; null: none."""


class Judging(Section):
    """Win rates of SFT and policy on test prompts, retention and reward diagnostics."""

    judges: tuple[Judge, ...] = Field(strict=False, min_length=1)
    """List of judges by kind."""
    max_failure_share: Fraction
    """Largest share of failed comparisons of one judge and pair; above it the stage fails."""
    num_examples: PositiveInt
    """Largest number of test prompts."""
    temperature: PositiveFloat
    """Sampling temperature of SFT and policy."""
    num_samples_shown: Count
    """Number of prompts whose responses MLflow shows."""
    num_traces: Count
    """Number of replies per llm judge that MLflow shows as traces, beside those on pairs that people
    labelled; 0: none at all."""
    labels: str
    """File of human labels; `rlhf label` writes data/labels.jsonl, which DVC then tracks."""
    retention: Retention | None
    """Perplexity and multiple-choice accuracy of base, SFT and policy; null: not measured."""

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
            yield f"judges: several have the name {', '.join(twice)}; give each judge its own name"
        plain = {judge.name for judge in self.judges if not isinstance(judge, CombinedJudge)}
        for judge in self.judges:
            if isinstance(judge, CombinedJudge):
                unknown = sorted(set(judge.judges) - plain)
                if unknown:
                    known = ", ".join(sorted(plain)) or "none"
                    yield (
                        f"judges: {judge.name} combines {', '.join(unknown)}, which is not in the list or "
                        f"is a combination itself; known: {known}"
                    )
                if len(set(judge.judges)) < len(judge.judges):
                    yield f"judges: {judge.name} names a judge twice"

    @property
    def scoring(self) -> set[str]:
        """Names of the judges that score each response; they make no requests."""
        kinds = (GoldJudge, RewardModelJudge, FunctionJudge, VerifierJudge)
        return {
            judge.name
            for judge in self.judges
            if isinstance(judge, kinds) and not (isinstance(judge, FunctionJudge) and judge.pairwise)
        }

    @property
    def needs_pipeline_reward_model(self) -> bool:
        """Whether a judge is a reward model that this pipeline trains."""
        return any(_is_pipeline_model(judge) for judge in self.judges if isinstance(judge, RewardModelJudge))


def _is_pipeline_model(judge: RewardModelJudge) -> bool:
    return Path(judge.path).as_posix() in (OPTIMISED, HELDOUT)

"""The judges, and the other measurements of stage judge."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhf_tasks.config import types as t
from rlhf_tasks.config.scorers import (
    HELDOUT,
    OPTIMIZED,
    ChatModel,
    Checks,
    Scorer,
    chat_models,
    reward_folders,
)
from rlhf_tasks.config.types import Section, check_source

RESERVED = (
    "agreement|best_of_n|calibration|choice|corpus_distinct_2|distinct_1|distinct_2|ended|human|kappa|length"
    "|perplexity|repetition|sft_perplexity|task|task_drop"
)
"""Pattern of the first parts of the names of the other metrics of stage judge, which no judge may have."""
LISTED = "judge.judges"
"""The key of the judges in params.yaml; only the judge of ppo.select_by has another key."""
ENGLISH = "english"
"""The name of the shipped texts and questions of `judge.retention`."""
SELECTOR = "which selects the best of n: it cannot judge them; name another model, or set best_of_n to null"


def _not_reserved(name: str) -> str:
    if re.fullmatch(f"{RESERVED}|rouge.*", name):
        raise ValueError(f"{name!r} is the name of another metric; give the judge another name")
    return name


class NamedJudge(Section):
    """What every judge has."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), AfterValidator(_not_reserved)]
    """Name of the judge in the metrics: lower-case letters, digits and `_`."""

    @property
    def definition(self) -> str:
        """Everything but the name, as JSON: two judges of different names may be the same."""
        known = self.model_dump(mode="json", exclude={"name"})
        known |= {"path": Path(known["path"]).as_posix()} if "path" in known else {}
        return json.dumps(known, sort_keys=True)


class GoldJudge(NamedJudge):
    """The judge of the synthetic task, which knows the facts of every post."""

    kind: Literal["gold"]


class RewardModelJudge(NamedJudge):
    """A reward model that scores each response, such as models/reward_heldout.

    A judge that is the reward model that PPO optimized is marked in the metrics and in the report.
    """

    kind: Literal["reward_model"]
    path: str
    """Folder of the reward model."""

    @property
    def is_of_pipeline(self) -> bool:
        """Whether stage reward makes the model."""
        return Path(self.path).as_posix() in (OPTIMIZED, HELDOUT)


class FunctionJudge(NamedJudge):
    """A Python function that scores each response."""

    kind: Literal["function"]
    function: t.ImportPath
    """`module:function`, called with the lists `prompts` and `responses` (or `completions`) and the columns
    of `data.columns.keep`, by its parameters' names; it returns a float per response, NaN for no decision."""
    pairwise: bool = False
    """Whether the function compares: it gets `prompts` and two lists of responses, `a` and `b`, in both
    orders, and returns per prompt the probability that the first response is better, or None."""


class VerifierJudge(NamedJudge, Checks):
    """Answers that are right or wrong, checked against columns of the prompts' rows; no model is needed."""

    kind: Literal["verifier"]
    by: t.Names = ()
    """List of columns of `data.columns.keep`: accuracy is measured for each of their values too."""


class LlmJudge(NamedJudge, ChatModel):
    """A language model behind an endpoint with OpenAI's chat completions; it compares two responses.

    Its reply must end with a line of one letter, A or B.
    """

    kind: Literal["llm"]
    prompt: str = "tldr"
    """Prompt of the judge: tldr, hhh, or a file with {prompt}, {first} and {second}."""
    logprobs: bool = True
    """Whether the comparison is the probability of A against B; without log-probs the reply is parsed."""


class LocalJudge(NamedJudge):
    """A causal language model on this machine, prompted as `llm` is.

    The comparison is the probability of the next token, A against B.
    """

    kind: Literal["local"]
    path: str
    """Folder or hub id of the model."""
    revision: t.Revision | None = None
    """Commit hash of a hub id in `path`; null otherwise."""
    prompt: str = "tldr"
    """Prompt of the judge: tldr, hhh, or a file with {prompt}, {first} and {second}."""
    micro_batch_tokens: t.PositiveInt = 4096
    """Maximum padded tokens per micro-batch."""

    def problems(self) -> Iterator[str]:
        yield from check_source(self.path, self.revision, f"path of judge {self.name}")


class CombinedJudge(NamedJudge):
    """Several judges of the list combined into one."""

    kind: Literal["all_of", "majority"]
    """`all_of`: a win or loss needs all judges, else it is a tie; `majority`: the side with more judges."""
    judges: Annotated[t.Names, Field(min_length=2)]
    """Names of the judges of `judge.judges` that are combined."""


Judge = Annotated[
    GoldJudge | RewardModelJudge | FunctionJudge | VerifierJudge | LlmJudge | LocalJudge | CombinedJudge,
    Field(discriminator="kind"),
]


def optimized_by(scorers: Sequence[Scorer], judge: Judge) -> str | None:
    """The reward model, function or model of a judge that is also a scorer of PPO; None for any other judge.

    A model behind an endpoint is known by its name alone: another endpoint may serve the same.
    """
    if isinstance(judge, LlmJudge) and judge.model in chat_models(scorers):
        return f"the model {judge.model}"
    if isinstance(judge, FunctionJudge):
        functions = [scorer.function for scorer in scorers if scorer.kind == "function"]
        return judge.function if judge.function in functions else None
    if isinstance(judge, RewardModelJudge) and Path(judge.path).as_posix() in reward_folders(scorers):
        return judge.path
    return None


class Selection(Section):
    """A judge that selects the checkpoint that PPO keeps; the gold judge only judges the final policy."""

    judge: Annotated[RewardModelJudge | FunctionJudge | LlmJudge | LocalJudge, Field(discriminator="kind")]
    """Judge that compares the checkpoint's responses with the references."""
    max_failure_share: t.Fraction = 0.05
    """Largest share of failed comparisons on one checkpoint; above it the stage fails."""

    def problems(self) -> Iterator[str]:
        if isinstance(self.judge, RewardModelJudge) and self.judge.is_of_pipeline:
            yield (
                f"select_by cannot name {self.judge.path}: set select_by to null to select by "
                "models/reward_heldout; models/reward, which PPO optimizes, never selects"
            )


class Tasks(Section):
    """Tasks of lm-evaluation-harness, an extra (`pip install -e '.[eval]'`), done by base, SFT and policy."""

    names: Annotated[t.Names, Field(min_length=1)]
    """Names of tasks, or of groups or tags of tasks."""
    folder: str | None = None
    """Folder of the tasks' YAML files, whose paths are relative to the project; null: the harness's tasks."""
    num_examples: t.PositiveInt | None = None
    """Largest number of documents per task; null: all of them."""
    batch_size: t.PositiveInt = 32
    """Number of requests per forward pass."""


class Retention(Section):
    """What the language model retains: base, SFT and policy on the same texts and questions."""

    num_examples: t.PositiveInt = 500
    """Largest number of texts, and of questions."""
    micro_batch_tokens: t.PositiveInt = 4096
    """Maximum padded tokens per micro-batch."""
    general: str | None = None
    """General text for perplexity: `english` (a dozen shipped paragraphs), or a text file with one text per
    paragraph; null: only completions of demonstrations."""
    questions: str | None = None
    """Multiple-choice questions: `english` (120 shipped ones, chance is 25%), or a file with one question
    per paragraph (beginning, right ending, wrong endings, one per line); null: which of four completions
    belongs to a prompt."""
    tasks: Tasks | None = None
    """Tasks of lm-evaluation-harness; null: none."""


class Judging(Section):
    """Win rates of SFT and policy on test prompts, retention and reward diagnostics."""

    judges: Annotated[
        tuple[Judge, ...], t.at_least_one(f"{{kind: reward_model, name: reward_model, path: {HELDOUT}}}")
    ] = Field(
        default=(
            GoldJudge(kind="gold", name="gold"),
            RewardModelJudge(kind="reward_model", name="reward_model", path=HELDOUT),
        ),
        strict=False,
    )
    """List of judges by kind."""
    max_failure_share: t.Fraction = 0.05
    """Largest share of failed comparisons of one judge and pair; above it the stage fails."""
    num_examples: t.PositiveInt = 1000
    """Largest number of test prompts."""
    bar: Literal["base", "reference"] = "base"
    """What a policy must beat besides SFT as long as there is no champion: the untrained base model, whose
    responses are sampled too, or the references."""
    temperature: t.PositiveFloat = 1.0
    """Sampling temperature of SFT and policy."""
    best_of_n: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Number of responses per prompt, of which the best by models/reward is judged too; null: none."""
    best_of_n_model: Literal["base", "sft", "policy"] = "sft"
    """The model whose responses `best_of_n` takes."""
    labels: str | None = None
    """File of human labels, rows with the texts prompt, answer_a and answer_b and an outcome (1: A is better,
    0.5, 0, or null); null: none."""
    retention: Retention | None = Retention()
    """Perplexity and multiple-choice accuracy of base, SFT and policy; null: not measured."""

    def problems(self) -> Iterator[str]:
        twice = sorted(name for name, n in Counter(judge.name for judge in self.judges).items() if n > 1)
        if twice:
            yield f"judges: several have the name {', '.join(twice)}; give each judge its own name"
        combined = [judge for judge in self.judges if isinstance(judge, CombinedJudge)]
        plain = {judge.name for judge in self.judges if judge not in combined}
        for judge in combined:
            if unknown := sorted(set(judge.judges) - plain):
                yield (
                    f"judges: {judge.name} combines {', '.join(unknown)}, which is not in the list or is a "
                    f"combination itself; known: {', '.join(sorted(plain)) or 'none'}"
                )
        for one in self.judges if self.best_of_n is not None else ():
            if isinstance(one, RewardModelJudge) and Path(one.path).as_posix() == OPTIMIZED:
                yield f"best_of_n: the judge {one.name} is {OPTIMIZED}, {SELECTOR}"

    @property
    def scoring(self) -> set[str]:
        """Names of the judges that score each response; they make no requests."""
        kinds = (GoldJudge, RewardModelJudge, FunctionJudge, VerifierJudge)
        scoring = (judge for judge in self.judges if isinstance(judge, kinds))
        return {judge.name for judge in scoring if not getattr(judge, "pairwise", False)}

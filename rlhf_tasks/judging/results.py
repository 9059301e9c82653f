"""The results document of stage judge, `evaluation/judge/results.json`, as typed values. No torch.

Stage judge writes it, and derives metrics/judge.json from it by `EvaluationResults.metrics`. The gate and the
report read it. `rlhf judge MODEL` and `rlhf promote` return and use the same type for policies that the
pipeline did not train.

The models are `sft`, `policy`, `reference`, `base` and `best_of_n` in the stage; `rlhf judge MODEL` uses the
names it is given. Models of `retention` are `base`, `sft` and `policy`. Intervals are 95% intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.project import atomic

Metrics = dict[str, float]
COMPARISON_METRICS = (
    *("decisive", "length_controlled", "p_value", "ties", "examples", "failures"),
    *("position_bias", "first_share"),
)
"""Fields of `ComparisonResult` that are metrics of their own name."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cost(_Part):
    """What the replies of a judge model cost, in this run or in an earlier one."""

    replies: int
    tokens: int


class ComparisonResult(_Part):
    """A against B on the test prompts, by one judge."""

    judge: str
    a: str
    b: str
    win_rate: Interval
    """A's win rate; a tie counts half, failures are left out."""
    in_set: dict[str, Interval] = {}
    """The same by set of a mixture; without the sets of which no comparison was made."""
    decisive: Interval
    """A's share of the prompts that are not ties."""
    length_controlled: Interval
    """A's win rate at equal length."""
    p_value: float
    """Of the two-sided sign test."""
    ties: int
    examples: int
    """Prompts that were judged; failures are not among them."""
    failures: int
    position_bias: float | None = None
    """Share of pairs whose outcome changes with the order. None for a judge that scores, as the next two."""
    first_share: float | None = None
    """Share of replies that prefer the response shown first; 0.5 without bias."""
    cost: Cost | None = None

    @property
    def stem(self) -> str:
        """The first part of the keys in metrics/judge.json."""
        return f"{self.judge}/{self.a}_vs_{self.b}"

    @property
    def wins(self) -> int:
        """Prompts on which A wins."""
        return round(self.win_rate.value * self.examples - self.ties / 2)

    @property
    def losses(self) -> int:
        """Prompts on which B wins."""
        return self.examples - self.wins - self.ties


class ResponseStatistics(_Part):
    """Means over the responses that one model sampled to the test prompts."""

    rouge_l: float | None
    """ROUGE-L F measure against the references; None where the data has none."""
    length: float
    """In tokens."""
    ended: float
    """Share of responses that end with the stop token."""
    distinct_1: float
    distinct_2: float
    """Share of different n-grams in a response."""
    repetition: float
    """1 − distinct 3-grams."""
    corpus_distinct_2: float
    """Share of different 2-grams among those of all responses together, each with its start: low where they
    repeat each other, and lower for longer ones."""
    sft_perplexity: float
    """Of the responses by the SFT model: high where it would hardly write them."""


class TaskScore(_Part):
    """One metric of one language model on a task of lm-evaluation-harness."""

    value: float
    standard_error: float | None
    """As the harness estimates it; None where it does not."""
    examples: int
    """Documents of the task."""


class TaskChange(_Part):
    """What PPO changed of a task's first metric, from SFT to the policy."""

    metric: str
    drop: float
    """How much worse the policy is; negative where it is better."""
    standard_error: float | None
    """Of the drop. From the differences on the same documents where the metric is a mean over documents."""


class RetentionResult(_Part):
    """What one language model still knows."""

    perplexity: dict[str, float]
    """By text: `sft_text`, and `general` where such a text is configured."""
    multiple_choice: Interval | None
    """Accuracy on the questions; None without questions."""
    tasks: dict[str, dict[str, TaskScore]] = {}
    """By task of lm-evaluation-harness and metric."""


class RewardDiagnostic(_Part):
    """How well one reward model orders the pairs of one origin."""

    model: str
    """`reward` or `reward_heldout`."""
    origin: str
    """`given`, `sft_samples` or `policy_samples`."""
    calibration_error: float
    agreement: Interval | None
    """Agreement with the gold judge; only for pairs that this stage sampled."""


class HumanAgreement(_Part):
    """How far one judge agrees with the human labels."""

    kappa: Interval
    agreement: Interval | None
    """Share of human decisions that the judge shares; None where every label is a tie."""


class HumanLabels(_Part):
    labels: int
    judges: dict[str, HumanAgreement]
    """Without the judges that failed on every labeled pair."""


class Accuracy(_Part):
    """The shares of right responses by one verifier."""

    right: dict[str, Interval]
    """By model."""
    formatted: dict[str, Interval]
    """Share of responses that the format matches, by model; empty for a verifier without a format."""
    gain: Interval
    """Accuracy of the policy minus that of SFT, on the same prompts."""
    by: dict[str, Accuracy] = {}
    """The same on the prompts with one value of a column of the verifier's `by`, by `COLUMN.VALUE`."""


class BestOfN(_Part):
    """The best of n responses of a model by models/reward, per test prompt."""

    model: str = "sft"
    n: int
    kl: float
    """From that model, in nats."""
    kl_bound: float
    tokens: float
    """Of all n responses."""
    seconds: float | None = Field(default=None, exclude=True)
    """Of sampling and scoring; not in the document, since equal results give equal bytes."""


class JudgeKappa(_Part):
    """Cohen's kappa of two judges over all comparisons that both made."""

    first: str
    second: str
    kappa: Interval


class EvaluationResults(_Part):
    """Everything that an evaluation measured."""

    comparisons: tuple[ComparisonResult, ...] = ()
    has_reward: bool = True
    """False for a policy that only dummy scorers have trained."""
    is_trial: bool = False
    """True for a policy that was trained as a trial."""
    has_demonstrations: bool = True
    """False where the data has prompts alone."""
    optimised_judges: dict[str, str] = {}
    """Judges that are a reward which PPO optimized: judge → folder, or model behind an endpoint."""
    selecting_judges: dict[str, str] = {}
    """Judges by which PPO chose its checkpoint: judge → its folder, or its kind."""
    responses: dict[str, ResponseStatistics] = {}
    """By model; not of the references."""
    facets: dict[str, dict[str, dict[str, float]]] = {}
    """What a judge measures of a model's responses: judge → model → measure → mean."""
    accuracies: dict[str, Accuracy] = {}
    """By judge of kind verifier."""
    retention: dict[str, RetentionResult] = {}
    """By model."""
    task_changes: dict[str, TaskChange] = {}
    """By task."""
    best_of_n: BestOfN | None = None
    """None, and not in the document, without `judge.best_of_n`."""
    reward_diagnostics: tuple[RewardDiagnostic, ...] = ()
    human_labels: HumanLabels | None = None
    judge_kappas: tuple[JudgeKappa, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the document from a file.

        Raises:
            UserError: if the file does not exist, cannot be read, or is not such a document.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{path} is not a results document of stage judge ({place}: {first['msg']}); run `rlhf "
                "judge` to write it again"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}); run `rlhf judge` to write it") from None

    def write(self, path: Path) -> None:
        """Write the document as JSON with sorted keys: equal results give equal bytes."""
        values = self.model_dump(mode="python", exclude=None if self.best_of_n else {"best_of_n"})
        atomic.write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")

    @property
    def first_judge(self) -> str:
        """The judge that people are told of first: gold, or else the first of judge.judges that PPO has not
        optimized, or "" without one."""
        judges = dict.fromkeys(one.judge for one in self.comparisons)
        return min(judges, key=lambda one: (one != "gold", one in self.optimised_judges), default="")

    def comparison(self, judge: str, a: str, b: str) -> ComparisonResult | None:
        """One comparison; None where that judge did not compare A with B."""
        found = (one for one in self.comparisons if (one.judge, one.a, one.b) == (judge, a, b))
        return next(found, None)

    def metrics(self) -> Metrics:
        """The values of metrics/judge.json by their keys. An interval has KEY, KEY/low and KEY/high."""
        metrics: Metrics = {}
        for key, value in self._metrics():
            if isinstance(value, Interval):
                metrics |= {key: value.value, f"{key}/low": value.low, f"{key}/high": value.high}
            elif value is not None:
                metrics[key] = value
        return metrics

    def _metrics(self) -> Iterator[tuple[str, Interval | float | None]]:
        """The metrics before intervals are taken apart; None is no metric."""
        yield from ((f"{name}/is_optimised_reward", 1.0) for name in self.optimised_judges)
        for who, measured in self.responses.items():
            yield from ((f"{measure}/{who}", value) for measure, value in measured.model_dump().items())
        if {"policy", "sft"} <= set(self.responses):
            yield "length/policy_over_sft", self.responses["policy"].length / self.responses["sft"].length
        for who, retained in self.retention.items():
            yield from ((f"perplexity/{text}/{who}", value) for text, value in retained.perplexity.items())
            yield f"choice/{who}", retained.multiple_choice
            for task, scores in retained.tasks.items():
                for metric, score in scores.items():
                    yield f"task/{task}/{metric}/{who}", score.value
                    yield f"task/{task}/{metric}/{who}/standard_error", score.standard_error
        for task, change in self.task_changes.items():
            yield f"task_drop/{task}", change.drop
            yield f"task_drop/{task}/standard_error", change.standard_error
        for one in self.comparisons:
            yield from ((f"{one.stem}/{name}", getattr(one, name)) for name in COMPARISON_METRICS)
            yield f"{one.stem}/win_rate", one.win_rate.value
            yield from ((f"{one.stem}/{end}", getattr(one.win_rate, end)) for end in ("low", "high"))
            yield from ((f"{one.stem}/win_rate/in/{name}", rate) for name, rate in one.in_set.items())
            yield from ((f"{one.stem}/cost/{name}", number) for name, number in one.cost or ())
        yield from (
            (f"best_of_n/{name}", value) for name, value in self.best_of_n or () if name not in ("model", "n")
        )
        for judge, models in self.facets.items():
            for who, measures in models.items():
                yield from ((f"{judge}/{who}/{measure}", value) for measure, value in measures.items())
        for judge, whole in self.accuracies.items():
            parts = {"": whole} | {f"/in/{name}": part for name, part in whole.by.items()}
            for where, part in parts.items():
                yield f"{judge}/accuracy_gain{where}", part.gain
                for name, shares in (("accuracy", part.right), ("format", part.formatted)):
                    yield from ((f"{judge}/{name}/{who}{where}", share) for who, share in shares.items())
        for pair in self.judge_kappas:
            yield f"kappa/{pair.first}_and_{pair.second}", pair.kappa
        if self.human_labels is not None:
            yield "human/labels", self.human_labels.labels
            for judge, agreement in self.human_labels.judges.items():
                yield f"human/{judge}/kappa", agreement.kappa
                yield f"human/{judge}/agreement", agreement.agreement
        for diagnostic in self.reward_diagnostics:
            yield f"agreement/{diagnostic.model}/{diagnostic.origin}", diagnostic.agreement
            yield f"calibration/{diagnostic.model}/{diagnostic.origin}", diagnostic.calibration_error

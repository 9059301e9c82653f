"""The results document of stage judge, `evaluation/judge/results.json`, as typed values. No torch, no numpy.

Stage judge writes it, and derives metrics/judge.json from it by `EvaluationResults.metrics`. The gate, the
report and the flows read it. The comparison of runs and `rlhf lineage` make its type from those metrics,
which git and MLflow keep. `rlhf judge MODEL` and `rlhf promote` return and use the same type for policies
that the pipeline did not train.

Contenders are `sft`, `policy` and `reference` in the stage; `rlhf judge MODEL` uses the names it is given.
Models of `retention` are `base`, `sft` and `policy`. Intervals are 95% intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic

if TYPE_CHECKING:
    from rlhf_tasks.judging.statistics import Estimate

Metrics = dict[str, float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_Part):
    """A value with its 95% interval, `low <= value <= high`."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)

    def metrics(self, key: str) -> Metrics:
        return {key: self.value, f"{key}/low": self.low, f"{key}/high": self.high}


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
    matched_length_gain: Interval | None = None
    """How much higher A scores than B at equal length; only for a judge that scores."""

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

    def metrics(self) -> Metrics:
        rate = self.win_rate
        values: Metrics = {
            "win_rate": rate.value,
            "low": rate.low,
            "high": rate.high,
            "p_value": self.p_value,
            "ties": self.ties,
            "examples": self.examples,
            "failures": self.failures,
        }
        values |= self.decisive.metrics("decisive") | self.length_controlled.metrics("length_controlled")
        optional = {"position_bias": self.position_bias, "first_share": self.first_share}
        values |= {name: value for name, value in optional.items() if value is not None}
        if self.cost is not None:
            values |= {"cost/replies": self.cost.replies, "cost/tokens": self.cost.tokens}
        if self.matched_length_gain is not None:
            values |= self.matched_length_gain.metrics("matched_length_gain")
        return {f"{self.stem}/{name}": value for name, value in values.items()}


class ResponseStatistics(_Part):
    """Means over the responses that one model sampled to the test prompts."""

    rouge_l: float
    """ROUGE-L F measure against the references."""
    length: float
    """In tokens."""
    ended: float
    """Share of responses that end with the stop token."""
    distinct_1: float
    distinct_2: float
    """Share of different n-grams in a response."""
    repetition: float
    """1 − distinct 3-grams."""


class TaskScore(_Part):
    """One metric of one language model on a task of lm-evaluation-harness."""

    value: float
    standard_error: float | None
    """As the harness estimates it; None where it does not."""
    examples: int
    """Documents of the task."""

    def metrics(self, key: str) -> Metrics:
        error = {} if self.standard_error is None else {f"{key}/standard_error": self.standard_error}
        return {key: self.value} | error


class TaskChange(_Part):
    """What PPO changed of a task's first metric, from SFT to the policy."""

    metric: str
    drop: float
    """How much worse the policy is; negative where it is better."""
    standard_error: float | None
    """Of the drop. From the differences on the same documents where the metric is a mean over documents."""

    def metrics(self, task: str) -> Metrics:
        error = (
            {} if self.standard_error is None else {f"task_drop/{task}/standard_error": self.standard_error}
        )
        return {f"task_drop/{task}": self.drop} | error


class RetentionResult(_Part):
    """What one language model still knows."""

    perplexity: dict[str, float]
    """By text: `sft_text`, and `general` where such a text is configured."""
    multiple_choice: Interval | None
    """Accuracy on the questions; None without questions."""
    tasks: dict[str, dict[str, TaskScore]] = {}
    """By task of lm-evaluation-harness and metric."""

    def scores(self) -> Iterator[tuple[str, str, TaskScore]]:
        """Each task, metric and score."""
        for task, metrics in self.tasks.items():
            for metric, score in metrics.items():
                yield task, metric, score


class RewardDiagnostic(_Part):
    """How well one reward model orders the pairs of one origin."""

    model: str
    """`reward` or `reward_heldout`."""
    origin: str
    """`given`, `sft_samples` or `policy_samples`."""
    calibration_error: float
    agreement: Interval | None
    """Agreement with the gold judge; only for pairs that this stage sampled."""


class RewardGaps(_Part):
    """How much better the policy looks to the reward that PPO optimised than to each judge."""

    win_rate_by_reward: float
    """Of the policy over SFT."""
    by_judge: dict[str, float]
    """`win_rate_by_reward` minus the judge's win rate; a gap that grows is over-optimisation."""


class HumanAgreement(_Part):
    """How far one judge agrees with the human labels."""

    kappa: Interval
    agreement: Interval | None
    """Share of human decisions that the judge shares; None where every label is a tie."""


class HumanLabels(_Part):
    labels: int
    judges: dict[str, HumanAgreement]
    """Without the judges that failed on every labelled pair."""


class Accuracy(_Part):
    """The shares of right responses by one verifier."""

    right: dict[str, Interval]
    """By contender."""
    formatted: dict[str, Interval]
    """Share of responses that the format matches, by contender; empty for a verifier without a format."""
    gain: Interval
    """Accuracy of the policy minus that of SFT, on the same prompts."""

    def metrics(self, judge: str) -> Metrics:
        values = self.gain.metrics(f"{judge}/accuracy_gain")
        for name, shares in (("accuracy", self.right), ("format", self.formatted)):
            for who, share in shares.items():
                values |= share.metrics(f"{judge}/{name}/{who}")
        return values


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
    optimised_judges: dict[str, str] = {}
    """Judges that are the reward model which PPO optimised: judge → folder."""
    selecting_judges: dict[str, str] = {}
    """Judges that are the reward model by which PPO chose its checkpoint: judge → folder."""
    responses: dict[str, ResponseStatistics] = {}
    """By contender; not of the references."""
    facets: dict[str, dict[str, dict[str, float]]] = {}
    """What a judge measures of a contender's responses: judge → contender → measure → mean."""
    accuracies: dict[str, Accuracy] = {}
    """By judge of kind verifier."""
    retention: dict[str, RetentionResult] = {}
    """By model."""
    task_changes: dict[str, TaskChange] = {}
    """By task."""
    reward_diagnostics: tuple[RewardDiagnostic, ...] = ()
    reward_gaps: RewardGaps | None = None
    human_labels: HumanLabels | None = None
    judge_kappas: tuple[JudgeKappa, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the document from a file.

        Raises:
            UserError: if the file does not exist or cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}); run `rlhf judge` to write it") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, origin: str) -> Self:
        """The document from its text; `origin` names the text's place in the message.

        Raises:
            UserError: if the text is not such a document.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{origin} is not a results document of stage judge ({place}: {first['msg']}); run "
                "`rlhf judge` to write it again"
            ) from None

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Self:
        """The comparisons among the values of metrics/judge.json; everything else stays empty.

        It is the inverse of `metrics` for runs of which only flat values are known: MLflow and git keep
        those, but not the document. A comparison whose values are incomplete is left out.
        """
        stems = (key.removesuffix("/win_rate") for key in metrics if key.endswith("/win_rate"))
        comparisons = (_comparison(stem, metrics) for stem in stems if "_vs_" in stem)
        return cls(comparisons=tuple(one for one in comparisons if one is not None))

    def text(self) -> str:
        """The document as JSON with sorted keys: equal results give equal bytes."""
        return json.dumps(self.model_dump(mode="python"), indent=2, sort_keys=True) + "\n"

    def write(self, path: Path) -> None:
        atomic.write_text(path, self.text())

    def comparison(self, judge: str, a: str, b: str) -> ComparisonResult | None:
        """One comparison; None where that judge did not compare A with B."""
        found = (one for one in self.comparisons if (one.judge, one.a, one.b) == (judge, a, b))
        return next(found, None)

    def metrics(self) -> Metrics:
        """The values of metrics/judge.json by their keys."""
        metrics: Metrics = {f"{name}/is_optimised_reward": 1.0 for name in self.optimised_judges}
        for part in (
            *self._response_metrics(),
            *self._retention_metrics(),
            *(one.metrics() for one in self.comparisons),
            *self._facet_metrics(),
            *(one.metrics(judge) for judge, one in self.accuracies.items()),
            *self._agreement_metrics(),
            *self._reward_metrics(),
        ):
            metrics |= part
        return metrics

    def _response_metrics(self) -> Iterator[Metrics]:
        for name, one in self.responses.items():
            yield {f"{measure}/{name}": value for measure, value in one.model_dump().items()}
        if {"policy", "sft"} <= set(self.responses):
            ratio = self.responses["policy"].length / self.responses["sft"].length
            yield {"length/policy_over_sft": ratio}

    def _retention_metrics(self) -> Iterator[Metrics]:
        for name, one in self.retention.items():
            yield {f"perplexity/{text}/{name}": value for text, value in one.perplexity.items()}
            if one.multiple_choice is not None:
                yield one.multiple_choice.metrics(f"choice/{name}")
            for task, metric, score in one.scores():
                yield score.metrics(f"task/{task}/{metric}/{name}")
        yield from (change.metrics(task) for task, change in self.task_changes.items())

    def _facet_metrics(self) -> Iterator[Metrics]:
        for judge, contenders in self.facets.items():
            for name, measures in contenders.items():
                yield {f"{judge}/{name}/{measure}": value for measure, value in measures.items()}

    def _agreement_metrics(self) -> Iterator[Metrics]:
        for pair in self.judge_kappas:
            yield pair.kappa.metrics(f"kappa/{pair.first}_and_{pair.second}")
        if self.human_labels is None:
            return
        yield {"human/labels": self.human_labels.labels}
        for judge, one in self.human_labels.judges.items():
            yield one.kappa.metrics(f"human/{judge}/kappa")
            if one.agreement is not None:
                yield one.agreement.metrics(f"human/{judge}/agreement")

    def _reward_metrics(self) -> Iterator[Metrics]:
        for one in self.reward_diagnostics:
            if one.agreement is not None:
                yield one.agreement.metrics(f"agreement/{one.model}/{one.origin}")
            yield {f"calibration/{one.model}/{one.origin}": one.calibration_error}
        if self.reward_gaps is not None:
            yield {"reward_gap/win_rate_by_reward": self.reward_gaps.win_rate_by_reward}
            yield {f"reward_gap/{judge}": gap for judge, gap in self.reward_gaps.by_judge.items()}


def _comparison(stem: str, metrics: Mapping[str, float]) -> ComparisonResult | None:
    """The inverse of `ComparisonResult.metrics`; None if a value is missing."""
    judge, _, pair = stem.partition("/")
    a, _, b = pair.partition("_vs_")
    start = f"{stem}/"
    flat = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
    tree: dict[str, Any] = {key: value for key, value in flat.items() if key in ComparisonResult.model_fields}
    for name in ("decisive", "length_controlled", "matched_length_gain"):
        if name in flat:
            tree[name] = {"value": flat[name], **{end: flat.get(f"{name}/{end}") for end in ("low", "high")}}
    tree["win_rate"] = {"value": flat["win_rate"], "low": flat.get("low"), "high": flat.get("high")}
    if "cost/replies" in flat:
        tree["cost"] = {"replies": flat["cost/replies"], "tokens": flat.get("cost/tokens")}
    try:
        return ComparisonResult.model_validate({"judge": judge, "a": a, "b": b, **tree})
    except ValidationError:
        return None

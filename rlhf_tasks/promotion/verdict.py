"""The gate's verdict: what was measured of a policy against the criteria of `promotion`. No torch here.

Stage verdict imports no more than this: `measurement` would make it depend on the code of all judges.

A win rate passes by the lower end of its 95% interval, so that luck promotes nothing. Two judges agree here
if that end is above the bound for both. Cohen's kappa would not do: it falls as a policy gets so much better
that there is little left to disagree about (both judges see 95% wins, and kappa is near 0). It is also
computed over SFT's responses, which do not describe this policy.

A value that is missing or not finite fails its criterion, which gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import sub, truediv
from pathlib import Path
from typing import Any, Literal

from rlhf_tasks import console
from rlhf_tasks.config import Promotion
from rlhf_tasks.config.judge import Judge
from rlhf_tasks.config.schema import with_parts
from rlhf_tasks.judging.results import ComparisonResult, EvaluationResults
from rlhf_tasks.models import contracts
from rlhf_tasks.tracking import catalogue

Relation = Literal[">", ">=", "<="]
Value = float | str
"""A measured value, or the reason why it is not known."""
Opponent = Literal["sft", "champion", "base", "reference"]
OPPOSITES: Mapping[str, str] = {">": "≤", ">=": "<", "<=": ">"}
REASONS = ("trial", "no_reward", "withheld")
"""Criteria that are no value of the policy: they refuse it, and their title says why."""
TEXTS = {"sft_text": "SFT text", "general": "general text"}
OPPONENTS: Mapping[str, str] = {
    "sft": "SFT",
    "champion": "the champion",
    "base": "the base model",
    "reference": "the references",
}


@dataclass(frozen=True, kw_only=True)
class Kl:
    """KL of the policy from SFT, in nats per response: the mean over sampled responses."""

    mean: float
    standard_error: float | None


def read_kl(policy: Path) -> Kl | None:
    """The KL in the identity of a policy, whatever trained it; None if it has none, as older ones."""
    if (known := contracts.read_identity(policy).get("kl")) is None:
        return None
    mean, error = known
    return Kl(mean=mean, standard_error=error)


@dataclass(frozen=True)
class Criterion:
    """One bound on one value; `key` is its name in metrics and tags, `title` the one that people read."""

    key: str
    title: str
    value: float | None
    relation: Relation
    bound: float
    lacking: str = ""
    """Why the value is not known."""
    standard_error: float | None = None
    """Of the value. The bound applies to the value itself."""

    @property
    def margin(self) -> float | None:
        """Distance from the bound; positive on the right side, negative on the wrong one."""
        if self.value is None:
            return None
        return self.bound - self.value if self.relation == "<=" else self.value - self.bound

    @property
    def passed(self) -> bool:
        margin = self.margin
        return margin is not None and (margin > 0 if self.relation == ">" else margin >= 0)

    @property
    def text(self) -> str:
        """The value as people read it, such as `1.5 ± 0.02`."""
        if self.value is None:
            return "not known"
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{self.value:.4g}{error}"

    @property
    def complaint(self) -> str:
        """Why the criterion failed, such as `KL 11.2 > 10`."""
        if self.value is None:
            return f"{self.title} is not known: {self.lacking}"
        if self.key in REASONS:
            return self.title
        return f"{self.title} {self.text} {OPPOSITES[self.relation]} {self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """The gate's decision about one policy. It passes if every criterion does."""

    criteria: Sequence[Criterion]
    note: str = ""
    """What a reader must know first."""

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    @property
    def summary(self) -> str:
        failed = [criterion.complaint for criterion in self.criteria if not criterion.passed]
        return "; ".join(failed) if failed else f"all {len(self.criteria)} criteria are met"

    def withhold(self, reason: str) -> Verdict:
        """The same verdict, refused for a reason that is not one of the policy's values."""
        return replace(self, criteria=(*self.criteria, Criterion("withheld", reason, 1.0, "<=", 0.0)))

    def tree(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        criteria = [asdict(c) | {"margin": c.margin, "passed": c.passed} for c in self.criteria]
        note = {"note": self.note} if self.note else {}
        return {"passed": self.passed, **note, "summary": self.summary, "criteria": criteria}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Verdict:
        """The inverse of `tree`; a value that an earlier version did not write has its default."""
        names = {field.name for field in fields(Criterion)}
        known = [{name: one[name] for name in names & one.keys()} for one in tree["criteria"]]
        return cls(tuple(Criterion(**values) for values in known), tree.get("note", ""))

    def metrics(self) -> dict[str, float]:
        """`gate/passed`, and of each criterion `KEY/value`, `KEY/bound`, `KEY/margin` and `KEY/passed`."""
        metrics = {"gate/passed": float(self.passed)}
        for criterion in self.criteria:
            numbers = {"value": criterion.value, "bound": criterion.bound, "margin": criterion.margin}
            numbers["passed"] = float(criterion.passed)
            metrics |= {f"{criterion.key}/{name}": x for name, x in numbers.items() if x is not None}
        return metrics

    def rows(self) -> list[dict[str, str]]:
        """The rows of a table that people read."""
        return [
            {
                "criterion": c.title,
                "value": c.text,
                "required": f"{c.relation} {c.bound:g}",
                "margin": "" if c.margin is None else f"{c.margin:+.4g}",
                "result": "passed" if c.passed else "FAILED",
            }
            for c in self.criteria
        ]


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown; empty without rows."""
    names = list(rows[0]) if rows else []
    cells = [[str(row[name]).replace("|", "\\|").replace("\n", "<br>") for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *cells] if rows)


def decide(
    promotion: Promotion,
    results: EvaluationResults,
    kl: Kl | None,
    *,
    judges: Sequence[Judge],
    champion: bool,
    bar: Literal["base", "reference"] = "base",
) -> Verdict:
    """Apply every criterion that is not null.

    Args:
        promotion: The criteria.
        results: Comparisons of `policy` with the others, and what it and `sft` retain.
        kl: None if it was not measured.
        judges: All judges. Those of the gate, and those that they combine, may not be what PPO optimized.
        champion: Whether there is a champion that the policy must beat.
        bar: What it must beat without one.
    """
    used = {**results.optimised_judges, **results.selecting_judges}
    notes = []
    if all(judge in used for judge in promotion.named):
        notes.append(
            "No judge of the gate is independent: training has optimized, or chosen the policy by, "
            f"{', '.join(used[judge] for judge in promotion.named)}."
        )
    if lacking := _list_unmeasurable(promotion, results):
        notes.append(
            f"The data has no demonstrations, so {' and '.join(lacking)} cannot be measured and counts for "
            "nothing here; judge.retention.general and judge.retention.questions measure other texts."
        )
    bounds: dict[Opponent, float] = {"sft": promotion.over_sft}
    if champion and promotion.over_champion is not None:
        bounds["champion"] = promotion.over_champion
    else:
        bounds[bar] = promotion.over_bar
    return Verdict(tuple(_apply(promotion, results, kl, judges, bounds)), " ".join(notes))


def _list_unmeasurable(promotion: Promotion, results: EvaluationResults) -> list[str]:
    """The criteria that are left out because the data has prompts alone."""
    if results.has_demonstrations:
        return []
    has_questions = any(one.multiple_choice is not None for one in results.retention.values())
    growth = promotion.max_perplexity_growth is not None
    choice = promotion.max_choice_drop is not None and not has_questions
    named = {"promotion.max_perplexity_growth on their texts": growth, "promotion.max_choice_drop": choice}
    return [name for name, is_out in named.items() if is_out]


def _apply(
    promotion: Promotion,
    results: EvaluationResults,
    kl: Kl | None,
    judges: Sequence[Judge],
    bounds: Mapping[Opponent, float],
) -> Iterator[Criterion]:
    """The criteria; `bounds` are those of the win rates."""
    if promotion.trial or results.is_trial:
        what = "these settings" if promotion.trial else "the settings of its training"
        yield Criterion("trial", f"{what} only try the pipeline out (promotion.trial)", 1.0, "<=", 0.0)
    if not results.has_reward:
        yield Criterion("no_reward", "it was trained by a dummy reward", 1.0, "<=", 0.0)
    words, compared, missing = catalogue.words_of(judges), list[ComparisonResult](), ""
    for b, bound in bounds.items():
        for judge in promotion.named:
            by = catalogue.placeholder_in_words(judge, words)
            title = f"win rate over {OPPONENTS[b]} by {by} (95% low)"
            value: Value = f"{judge} has not compared this policy with {b}"
            if (one := results.comparison(judge, "policy", b)) is not None:
                compared.append(one)
                value = _low(one)
            elif not missing:
                missing = str(value)
            yield from _bound(f"over_{b}/{judge}", title, value, ">", bound)
    mean = "it was not measured of this policy" if kl is None else kl.mean
    error = None if kl is None else kl.standard_error
    yield from _bound("kl", "KL", mean, "<=", promotion.max_kl, standard_error=error)
    yield from _retention(promotion, results)
    share = missing or max(one.failures / (one.failures + one.examples) for one in compared)
    yield from _bound(
        "failure_share", "share of failed comparisons", share, "<=", promotion.max_failure_share
    )
    least = promotion.min_examples
    if not promotion.trial:
        least = max(least, promotion.least_examples)
    fewest = missing or min(one.examples for one in compared)
    yield from _bound("examples", "judged examples", fewest, ">=", least)
    used = {part for name in promotion.named for part in with_parts(judges, name)}
    optimized = sorted(used & results.optimised_judges.keys())
    title = "judges that are the optimized reward" + (f" ({', '.join(optimized)})" if optimized else "")
    yield Criterion("optimised_judges", title, float(len(optimized)), "<=", 0.0)


def _retention(promotion: Promotion, results: EvaluationResults) -> Iterator[Criterion]:
    """What the policy forgot since SFT, and whether it writes texts that SFT would, and different ones."""
    metrics = results.metrics()

    def compare(function: Callable[[float, float], float], metric: str, what: str) -> Value:
        """The function of the policy's value and of SFT's; `what` names it, with {} for the model."""
        for who in ("policy", "sft"):
            if f"{metric}/{who}" not in metrics:
                return f"{what.format(who)} was not measured"
        return function(metrics[f"{metric}/policy"], metrics[f"{metric}/sft"])

    for text, name in TEXTS.items():
        if text == "general" and not any(text in one.perplexity for one in results.retention.values()):
            continue  # judge.retention.general is null
        if text == "sft_text" and not results.has_demonstrations:
            continue
        growth = compare(truediv, f"perplexity/{text}", f"the perplexity of {{}} on {name}")
        title = f"perplexity on {name} over SFT's"
        yield from _bound(f"perplexity/{text}", title, growth, "<=", promotion.max_perplexity_growth)
    growth, ratio = (
        compare(truediv, name, f"{name} of the responses of {{}}")
        for name in ("sft_perplexity", "corpus_distinct_2")
    )
    title = "perplexity of its responses by SFT, over SFT's own"
    yield from _bound("response_perplexity", title, growth, "<=", promotion.max_response_perplexity_growth)
    title = "different 2-grams in its responses, over SFT's"
    yield from _bound("distinct_ratio", title, ratio, ">=", promotion.min_distinct_ratio)
    change = compare(sub, "choice", "the multiple-choice accuracy of {}")
    bound = None if promotion.max_choice_drop is None else 0.0 - promotion.max_choice_drop
    if "promotion.max_choice_drop" not in _list_unmeasurable(promotion, results):
        yield from _bound("choice_change", "multiple-choice accuracy, change from SFT", change, ">=", bound)
    bound = promotion.max_task_drop
    if not results.task_changes:
        lacking = "no task of judge.retention.tasks was measured of policy and sft"
        yield from _bound("task_drop", "drop on tasks from SFT", lacking, "<=", bound)
    for task, one in results.task_changes.items():
        title, error = f"drop on {task} ({one.metric}) from SFT", one.standard_error
        yield from _bound(f"task_drop/{task}", title, one.drop, "<=", bound, standard_error=error)


def _bound(
    key: str,
    title: str,
    value: Value,
    relation: Relation,
    bound: float | None,
    *,
    standard_error: float | None = None,
) -> Iterator[Criterion]:
    """One criterion; none where the bound is null. A value that is not finite is not known."""
    if bound is None:
        return
    if not isinstance(value, str) and not math.isfinite(value):
        value = f"the measured value is {value}"
    if isinstance(value, str):
        yield Criterion(key, title, None, relation, float(bound), value)
    else:
        yield Criterion(key, title, float(value), relation, float(bound), standard_error=standard_error)


def _low(one: ComparisonResult) -> float:
    """The lower end of the win rate's interval; at most a half where the exact sign test finds no difference.

    The bootstrap of a few prompts without ties is too narrow: 4 wins, no loss and 196 ties have p = 0.125.
    """
    return one.win_rate.low if one.p_value < 0.05 else min(one.win_rate.low, 0.5)


def show(verdict: Verdict) -> None:
    """Print the table of criteria, below what a reader must know first."""
    if verdict.note:
        console.say(verdict.note)
    rows = verdict.rows()
    console.table("the gate", list(rows[0]), [list(row.values()) for row in rows])

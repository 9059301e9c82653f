"""How far judges agree with each other and with human labels; position bias and cost of comparing judges."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_tasks.evaluation.results import EvaluationResults, Interval
from rlhf_tasks.report import charts, names


@dataclass(frozen=True)
class Agreement:
    """Cohen's κ of two judges, or of a judge and the human labels."""

    pair: str
    kappa: str
    interval: str
    share: str
    """Share of human decisions that the judge shares; empty for two judges."""


@dataclass(frozen=True)
class Bias:
    """Position bias and cost of one comparison, by a judge that is shown both responses."""

    title: str
    position_bias: float
    first_share: float
    replies: int
    tokens: int


def agreements(results: EvaluationResults) -> list[Agreement]:
    """Agreement with the human labels first, then that of every two judges."""
    rows = []
    labels = results.human_labels
    for judge, one in sorted(labels.judges.items()) if labels else ():
        share = "" if one.agreement is None else _percent(one.agreement)
        rows.append(_agreement(f"{names.judge(judge)} and people", one.kappa, share))
    for two in sorted(results.judge_kappas, key=lambda pair: (pair.first, pair.second)):
        title = f"{names.judge(two.first)} and {_in_sentence(names.judge(two.second))}"
        rows.append(_agreement(title, two.kappa, ""))
    return rows


def biases(results: EvaluationResults) -> list[Bias]:
    """A row for each comparison by a judge that compares."""
    rows = []
    for one in sorted(results.comparisons, key=lambda one: one.stem):
        if one.position_bias is not None and one.first_share is not None and one.cost is not None:
            title = f"{names.judge(one.judge)}: {names.model(one.a)} against {names.model(one.b)}"
            rows.append(Bias(title, one.position_bias, one.first_share, one.cost.replies, one.cost.tokens))
    return rows


def _agreement(pair: str, kappa: Interval, share: str) -> Agreement:
    interval = f"{kappa.low:.2f} to {kappa.high:.2f}".replace("-", "−")
    return Agreement(pair, f"{kappa.value:.2f}".replace("-", "−"), interval, share)


def _percent(share: Interval) -> str:
    ends = f"{charts.percent(share.low)} to {charts.percent(share.high)}"
    return f"{charts.percent(share.value)} ({ends})"


def _in_sentence(name: str) -> str:
    return name[:1].lower() + name[1:]

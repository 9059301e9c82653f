"""How far judges agree with each other and with human labels; which comparisons have a position bias."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_tasks.judging.results import ComparisonResult, EvaluationResults
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.report import names


class Agreement(NamedTuple):
    """Cohen's κ of two judges, or of a judge and the human labels."""

    pair: str
    kappa: Interval
    share: Interval | None
    """Share of human decisions that the judge shares; None for two judges."""


def agreements(results: EvaluationResults) -> list[Agreement]:
    """Agreement with the human labels first, then that of every two judges."""
    labels = results.human_labels
    return [
        *(
            Agreement(f"{names.judge(judge)} and people", one.kappa, one.agreement)
            for judge, one in (sorted(labels.judges.items()) if labels else ())
        ),
        *(
            Agreement(
                f"{names.judge(one.first)} and {_in_sentence(names.judge(one.second))}", one.kappa, None
            )
            for one in sorted(results.judge_kappas, key=lambda pair: (pair.first, pair.second))
        ),
    ]


def biased(results: EvaluationResults) -> list[ComparisonResult]:
    """The comparisons by judges that are shown both responses, which may prefer the first one."""
    comparisons = (one for one in results.comparisons if one.position_bias is not None)
    return sorted(comparisons, key=lambda one: one.stem)


def _in_sentence(name: str) -> str:
    return name[:1].lower() + name[1:]

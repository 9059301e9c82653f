"""Several judges as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging.judges.comparisons import Comparisons, Judge
from rlhf_tasks.judging.statistics import Floats

Rule = Callable[[Floats], Floats]
"""(M, N) outcomes of M judges → (N,) outcomes of the combined judge."""


def all_of(outcomes: NDArray[np.float64]) -> Floats:
    """A win or a loss needs all judges; a failure of one is a failure; everything else is a tie."""
    won, lost = (outcomes == 1).all(axis=0), (outcomes == 0).all(axis=0)
    return np.where(np.isnan(outcomes).any(axis=0), np.nan, 0.5 + 0.5 * won - 0.5 * lost)


def majority(outcomes: NDArray[np.float64]) -> Floats:
    """The side that more judges prefer; equal numbers are a tie. Failures of half of them are a failure."""
    lead = np.sign((outcomes == 1).sum(axis=0) - (outcomes == 0).sum(axis=0))
    failed = 2 * np.isnan(outcomes).sum(axis=0) >= len(outcomes)
    return np.where(failed, np.nan, 0.5 + 0.5 * lead)


RULES: Mapping[str, Rule] = {"all_of": all_of, "majority": majority}


class CombinedJudge:
    """A judge made of others by one of the rules. It adds nothing to their cost."""

    def __init__(self, name: str, rule: Rule, judges: Sequence[Judge]) -> None:
        self.name = name
        self._rule, self._judges = rule, judges

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        outcomes = self._rule(
            np.stack([judge.compare(prompts, a, b, columns).outcomes for judge in self._judges])
        )
        failed = np.isnan(outcomes).nonzero()[0].tolist()
        names = ", ".join(judge.name for judge in self._judges)
        return Comparisons(outcomes, failures=dict.fromkeys(failed, f"too many of {names} failed"))

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return {}

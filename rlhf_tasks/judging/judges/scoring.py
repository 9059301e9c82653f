"""Judges that give each response a score: the higher score wins, and the order of a pair plays no part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_tasks.data import synthetic
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Comparisons
from rlhf_tasks.scoring.protocol import Responses, Scorer

Facets = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""Means of other measures over prompts and their responses."""


class ScoringJudge:
    """A judge made of a scorer; a score that is not finite is a failure.

    A set of responses is scored once, however often it is compared.
    """

    def __init__(self, name: str, scorer: Scorer, facets: Facets = lambda prompts, responses: {}) -> None:
        self.name = name
        self._scorer, self._facets = scorer, facets
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[float]] = {}

    def _scores(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> list[float]:
        key = (tuple(prompts), tuple(responses), repr(columns))
        if key not in self._known:
            scores: list[float] = self._scorer(Responses.of_texts(prompts, responses, columns)).tolist()
            self._known[key] = [score if math.isfinite(score) else math.nan for score in scores]
        return self._known[key]

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        scores = np.array(self._scores(prompts, a, columns)), np.array(self._scores(prompts, b, columns))
        outcomes = statistics.outcomes(*scores)
        failed = np.isnan(outcomes).nonzero()[0].tolist()
        return Comparisons(outcomes, scores=scores, failures=dict.fromkeys(failed, "no finite score"))

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        finite = [score for score in self._scores(prompts, responses, columns) if not math.isnan(score)]
        mean = {"score": sum(finite) / len(finite)} if finite else {}
        return self._facets(prompts, responses) | mean


def score_gold(rows: Responses) -> Tensor:
    """(B,) float64: the synthetic task's own score, which knows the facts of every post."""
    return torch.tensor(synthetic.gold_scores(rows.prompts, rows.texts), dtype=torch.float64)


def gold_facets(prompts: Sequence[str], responses: Sequence[str]) -> dict[str, float]:
    """What the gold score is made of."""
    scores = [synthetic.gold(p, r) for p, r in zip(prompts, responses, strict=True)]
    names = ("coverage", "faithfulness", "brevity")
    return {name: sum(getattr(s, name) for s in scores) / len(scores) for name in names}

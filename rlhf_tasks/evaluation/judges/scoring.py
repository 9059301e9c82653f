"""Judges that give each response a score: the higher score wins, and the order of a pair plays no part."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rlhf_tasks.data import synthetic
from rlhf_tasks.data.batches import encode, encode_answers, load_tokenizer
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.comparisons import Comparisons
from rlhf_tasks.modeling.functions import TextFunction
from rlhf_tasks.modeling.load import load_reward
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.modeling.scorers import numbers
from rlhf_tasks.modeling.verifier import Verifier


class TextScorer(Protocol):
    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> list[float]:
        """One number per response; higher is better, NaN is a failure."""

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        """Means of other measures over the responses."""


class ScoringJudge:
    """A judge made of scores. A set of responses is scored once, however often it is compared."""

    def __init__(self, name: str, scorer: TextScorer) -> None:
        self.name = name
        self._scorer = scorer
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[float]] = {}

    def _scores(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> list[float]:
        key = (tuple(prompts), tuple(responses), repr(columns))
        if key not in self._known:
            scores = self._scorer.scores(prompts, responses, columns)
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
        return self._scorer.facets(prompts, responses, columns) | mean


class GoldScorer:
    """The synthetic task's own score, which knows the facts of every post."""

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> list[float]:
        return synthetic.gold_scores(prompts, responses)

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        scores = [synthetic.gold(p, r) for p, r in zip(prompts, responses, strict=True)]
        names = ("coverage", "faithfulness", "brevity")
        return {name: sum(getattr(s, name) for s in scores) / len(scores) for name in names}


class RewardModelScorer:
    """A reward model; as a judge models/reward_heldout, which PPO never optimises.

    It scores the text that a reader gets: a response cut off at the limit is scored as if it ended there.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._scorer = RewardScorer(load_reward(folder).to(device), self._tokenizer)

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> list[float]:
        query_ids = encode(self._tokenizer, prompts)
        response_ids = encode_answers(self._tokenizer, responses)
        return [float(score) for score in self._scorer(query_ids, response_ids)]

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return {}


class VerifierScorer:
    """Checks of the answers against the columns, and the format's weight."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> list[float]:
        return self._verifier.scores(responses, columns)

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return {}


class TextFunctionScorer:
    """`module:function`, called with all prompts and all responses as texts; returns a float for each.

    Raises:
        UserError: as `TextFunction`, and later if it does not return one number per response.
    """

    def __init__(self, function: str, key: str, root: Path, columns: Collection[str] = ()) -> None:
        self._key, self._function = key, TextFunction(function, key, root, columns)

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> list[float]:
        returned, name = self._function(prompts, responses, columns), f"{self._key}: {self._function.name}"
        scores: list[float] = numbers(name, returned, len(prompts)).tolist()
        return scores

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return {}

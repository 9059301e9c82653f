"""Judges that give each answer a number; the higher one wins, and which is shown first plays no part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rlhf_tasks.data import synthetic
from rlhf_tasks.data.batches import encode, encode_answers, load_tokenizer
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.verdicts import Verdicts
from rlhf_tasks.modeling import models
from rlhf_tasks.modeling.scorers import RewardScorer, imported, numbers


class Scores(Protocol):
    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        """One number an answer, higher is better; NaN where it cannot tell."""

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        """Means over the answers, beside the mean score."""


class Scoring:
    """A judge made of scores. A set of answers is scored once, however often it is compared."""

    def __init__(self, name: str, scores: Scores) -> None:
        self.name = name
        self._scores = scores
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], list[float]] = {}

    def _of(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        key = (tuple(prompts), tuple(answers))
        if key not in self._known:
            found = self._scores.scores(prompts, answers)
            self._known[key] = [score if math.isfinite(score) else math.nan for score in found]
        return self._known[key]

    def compare(self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        scores = np.array(self._of(prompts, a)), np.array(self._of(prompts, b))
        outcomes = statistics.outcomes(*scores)
        failed = np.isnan(outcomes).nonzero()[0].tolist()
        return Verdicts(outcomes, scores=scores, failures=dict.fromkeys(failed, "no finite score"))

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        finite = [score for score in self._of(prompts, answers) if not math.isnan(score)]
        mean = {"score": sum(finite) / len(finite)} if finite else {}
        return self._scores.facets(prompts, answers) | mean


class Gold:
    """The synthetic task's own judge, that knows the facts of every post."""

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        return synthetic.gold_scores(prompts, answers)

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        found = [synthetic.gold(p, a) for p, a in zip(prompts, answers, strict=True)]
        names = ("coverage", "faithfulness", "brevity")
        return {name: sum(getattr(f, name) for f in found) / len(found) for name in names}


class RewardModel:
    """A reward model; as a judge, models/reward_heldout: trained on other prompts, never optimised.

    It judges the text a reader would get: an answer that was cut off is scored as if it ended there.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._scorer = RewardScorer(models.load_reward(folder).to(device), self._tokenizer)

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        queries, responses = encode(self._tokenizer, prompts), encode_answers(self._tokenizer, answers)
        return [float(score) for score in self._scorer(queries, responses)]

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return {}


class Function:
    """`module:function`, called with all prompts and all answers as they are; gives a float for each.

    Raises:
        UserError: naming the parameter `key`, if it cannot be imported or called, and later if what it
            gives is no number for each answer. What it raises itself is a fault.
    """

    def __init__(self, function: str, key: str) -> None:
        self._name, self._function = f"{key}: function {function}", imported(function, key)

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        given = self._function(list(prompts), list(answers))
        found: list[float] = numbers(self._name, given, len(prompts)).tolist()
        return found

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return {}

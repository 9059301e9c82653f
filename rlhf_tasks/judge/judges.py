"""Judges: a score for every answer, by which two answers to one prompt are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from rlhf_tasks import models
from rlhf_tasks.config import JudgeName, UserError
from rlhf_tasks.data import synthetic
from rlhf_tasks.data.batches import encode, encode_answers, load_tokenizer
from rlhf_tasks.scorers import RewardScorer

HELDOUT = Path("models/reward_heldout")


class Judge(Protocol):
    name: JudgeName

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        """One number an answer, higher is better; NaN where the judge failed."""

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        """What else this judge measures of a set of answers, as means."""


class Gold:
    """The synthetic task's own judge, that knows the facts of every post."""

    name: JudgeName = "gold"

    def __init__(self, source: str) -> None:
        if source != "synthetic":
            raise UserError(
                f"judge.judges: gold knows the synthetic task only, data.source is {source!r}; "
                "use reward_model"
            )

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        return synthetic.gold_scores(prompts, answers)

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        found = [synthetic.gold(p, a) for p, a in zip(prompts, answers, strict=True)]
        names = ("coverage", "faithfulness", "brevity", "score")
        return {name: sum(getattr(f, name) for f in found) / len(found) for name in names}


class RewardJudge:
    """A reward model; as a judge, models/reward_heldout: trained on other prompts, never optimised.

    It judges the text a reader would get: an answer that was cut off is scored as if it ended there.
    """

    name: JudgeName = "reward_model"

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._scorer = RewardScorer(models.load_reward(folder).to(device), self._tokenizer)

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        queries, responses = encode(self._tokenizer, prompts), encode_answers(self._tokenizer, answers)
        return [float(score) for score in self._scorer(queries, responses)]

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        scores = self.scores(prompts, answers)
        return {"score": sum(scores) / len(scores)}


def build(name: JudgeName, source: str, device: torch.device) -> Judge:
    made: dict[JudgeName, Callable[[], Judge]] = {
        "gold": lambda: Gold(source),
        "reward_model": lambda: RewardJudge(HELDOUT, device),
    }
    return made[name]()

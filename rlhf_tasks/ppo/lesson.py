"""What the epochs learn from a rollout: scores and KL → rewards → advantages; and the objective's metrics.

Every sum here runs over the real response tokens, or the answers, of all processes.
B batch · R response.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.modeling.tensors import Reduce, distinct, masked_moments, masked_sum, whiten
from rlhf_tasks.ppo.advantages import gae
from rlhf_tasks.ppo.kl import ESTIMATORS, KlController, k1
from rlhf_tasks.ppo.rewards import ScoreScaler, token_rewards, truncated_scores
from rlhf_tasks.ppo.rollout import Episodes

Metrics = dict[str, float]
LARGEST_NATS = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Lesson:
    """Per token, (B, R)."""

    episodes: Episodes
    advantages: Tensor
    returns: Tensor
    kl_coef: float
    """As it was for this rollout."""

    def content(self) -> dict[str, Any]:
        """By name, what a fault is looked into with."""
        return vars(self.episodes) | {"advantages": self.advantages, "returns": self.returns}


def joined(parts: Sequence[Lesson]) -> Lesson:
    """Of lessons on rows dealt in turn (`Runtime.share`), equally many to each, one in the rows' order."""
    episodes = {
        field.name: dealt_back([getattr(part.episodes, field.name) for part in parts])
        for field in fields(Episodes)
    }
    return Lesson(
        Episodes(**episodes), dealt_back([part.advantages for part in parts]),
        dealt_back([part.returns for part in parts]), parts[0].kl_coef,
    )  # fmt: skip


def dealt_back(parts: Sequence[Any]) -> Any:
    """Rows as tensors or lists, or dicts of these."""
    if isinstance(parts[0], dict):
        return {key: dealt_back([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], Tensor):
        return torch.stack(list(parts), dim=1).flatten(0, 1)
    return [row for rows in zip(*parts, strict=True) for row in rows]


def perplexity(nats: float) -> float:
    """exp of the mean −log p of a token; infinite where no float holds it, some 700 nats a token."""
    return math.exp(nats) if nats < LARGEST_NATS else math.inf


def standard_error(mean: float, squares: float, count: float) -> float:
    """Of a mean of `count` numbers, by the sum of their squares; of one, which shows no spread, its size."""
    return abs(mean) if count == 1 else (max(0.0, squares / count - mean**2) / count) ** 0.5


class Teacher:
    """Makes lessons of rollouts; what goes on from one to the next are kl_coef and the scores' moments."""

    def __init__(self, settings: Ppo, reduce: Reduce) -> None:
        self._settings, self._reduce = settings, reduce
        self.kl = KlController(settings.kl_coef, settings.adaptive_kl)
        self.scaler = ScoreScaler(settings.score_scaling)

    def __call__(self, episodes: Episodes) -> tuple[Lesson, Metrics]:
        settings, mask = self._settings, episodes.mask
        scores = truncated_scores(
            self.scaler(episodes.scores, self._reduce), episodes.ended, settings.truncation,
            missing_eos_score=settings.missing_eos_score, gamma=settings.gamma,
            last_values=episodes.last_values,
        )  # fmt: skip
        divergence = ESTIMATORS[settings.kl_estimator](episodes.logprobs, episodes.ref_logprobs)
        in_reward = self.kl.coef if settings.kl_in == "reward" else 0.0
        rewards = token_rewards(scores, divergence, mask, in_reward)
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, reduce=self._reduce)
        advantages, returns = gae(rewards, episodes.values, mask, settings.gamma, settings.lam)
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask, reduce=self._reduce)
        if settings.advantage_clip is not None:
            advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
        lesson = Lesson(episodes, advantages, returns, self.kl.coef)
        metrics = self._objective(episodes, scores, divergence, in_reward)
        metrics |= self._answers(episodes) | {"val/explained_variance": self._explained(lesson)}
        return lesson, metrics

    def _objective(self, episodes: Episodes, scores: Tensor, divergence: Tensor, in_reward: float) -> Metrics:
        mask = episodes.mask
        signed = torch.where(mask, k1(episodes.logprobs, episodes.ref_logprobs), 0).sum(1)
        sums = {
            "count": torch.tensor(float(len(scores))),
            "tokens": mask.sum(),
            "kl": masked_sum(divergence, mask),
            "k1": signed.sum(),
            "k1_squared": (signed**2).sum(),
            "surprise": -masked_sum(episodes.logprobs, mask),
            "ref_surprise": -masked_sum(episodes.ref_logprobs, mask),
            "scores": scores.sum(),
            "raw": episodes.scores.sum(),
            **{f"part/{name}": part.sum() for name, part in episodes.parts.items()},
        }
        found = self._summed(sums)
        count, tokens, kl = found["count"], found["tokens"], found["kl"] / found["count"]
        kl_k1 = found["k1"] / count
        metrics = {
            "objective/kl": kl,
            "objective/kl_k1": kl_k1,
            "objective/kl_k1_standard_error": standard_error(kl_k1, found["k1_squared"], count),
            "objective/kl_coef": self.kl.coef,
            "objective/entropy": found["surprise"] / count,
            "objective/perplexity": perplexity(found["surprise"] / tokens),
            "objective/ref_perplexity": perplexity(found["ref_surprise"] / tokens),
            "objective/non_score_reward": -in_reward * kl,
            "objective/scores": found["scores"] / count,
            "objective/raw_scores": found["raw"] / count,
        }
        metrics["objective/rlhf_reward"] = metrics["objective/scores"] + metrics["objective/non_score_reward"]
        if len(episodes.parts) > 1:
            metrics |= {f"objective/scores/{name}": found[f"part/{name}"] / count for name in episodes.parts}
        return metrics

    def _answers(self, episodes: Episodes) -> Metrics:
        """Whether answers end, how long they are, how often they repeat themselves."""
        found = self._summed({
            "count": torch.tensor(float(len(episodes.responses))),
            "tokens": episodes.mask.sum(),
            "ended": episodes.ended.sum(),
            **{f"distinct_{n}": distinct(episodes.responses, n).sum() for n in (1, 2, 3)},
        })  # fmt: skip
        count = found["count"]
        return {
            "val/num_eos_tokens": found["ended"],
            "val/truncated_share": 1 - found["ended"] / count,
            "val/response_length": found["tokens"] / count,
            "val/distinct_1": found["distinct_1"] / count,
            "val/distinct_2": found["distinct_2"] / count,
            "val/repetition": 1 - found["distinct_3"] / count,
        }

    def _explained(self, lesson: Lesson) -> float:
        """1 − Var(returns − values) / Var(returns) over tokens; 0 where all returns are equal."""
        mask = lesson.episodes.mask
        left = masked_moments(lesson.returns - lesson.episodes.values, mask, self._reduce)[1]
        whole = masked_moments(lesson.returns, mask, self._reduce)[1]
        return 1 - float(left / whole) if whole > 0 else 0.0

    def _summed(self, sums: dict[str, Tensor]) -> Metrics:
        values = self._reduce(torch.stack([value.float() for value in sums.values()])).tolist()
        return dict(zip(sums, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl.coef, "scores": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.coef = state["kl_coef"]
        self.scaler.load_state_dict(state["scores"])

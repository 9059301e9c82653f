"""From one score per response to one reward per token.

The order is: the scorers' sum → scaling → the rule for responses that did not end → the last token.
Departure from TRL: the score is put on the last real response token (EOS, or the last one of a
truncated response); TRL adds it one slot after EOS when there is room.

B batch · R response. `mask` (B, R) is True on real response tokens, EOS included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_tasks.config.ppo import ScoreScaling, Truncation
from rlhf_tasks.models.tensors import last_token


def truncated_scores(scores: Tensor, ended: Tensor, rule: Truncation) -> Tensor:
    """The scores (B,); where a response did not end (`ended` (B,) bool is False) the rule decides its score.

    - eos_trick_replace: `missing_eos_score` (Ziegler et al. 2019; arXiv 2403.17031, detail 4.2).
    - eos_trick_subtract: the score plus `missing_eos_score`.
    - bootstrap: none; `bootstrap_values` stand in for it.
    - bootstrap_add: the score, beside `bootstrap_values`, which counts one outcome twice; none: the score.
    """
    unfinished = scores
    if rule.kind == "eos_trick_replace":
        unfinished = torch.full_like(scores, rule.missing_eos_score)
    elif rule.kind == "eos_trick_subtract":
        unfinished = scores + rule.missing_eos_score
    elif rule.kind == "bootstrap":
        unfinished = torch.zeros_like(scores)
    return torch.where(ended, scores, unfinished)


def bootstrap_values(last_values: Tensor, ended: Tensor, rule: Truncation) -> Tensor:
    """(B,) the value of the state after the last token, as GAE is to take it; 0 where the episode is over.

    The rules `bootstrap` and `bootstrap_add` take `last_values` (B,) where a response did not end, because
    the episode continues there (Pardo et al. 2018). Whitening the rewards must not rescale these values.
    """
    if not rule.kind.startswith("bootstrap"):
        return torch.zeros_like(last_values)
    return torch.where(ended, 0, last_values)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """−kl_coef · kl on each real token, plus the score on the last one; (B, R), zero on padding.

    Ziegler et al. 2019, eq. 2, spread over tokens.
    """
    return torch.where(mask, -kl_coef * kl, 0) + last_token(mask) * scores[:, None]


class ScoreScaler:
    """clip((score − μ) / σ, ±clip), μ and σ over all scores so far: PPO-max, arXiv 2307.04964, eq. 18.

    Without `subtract_mean` it is score / σ.
    """

    def __init__(self, settings: ScoreScaling | None) -> None:
        self._settings = settings
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0
        """Σ 1, the mean, and Σ (x − mean)²."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Add the scores (B,) to the moments, and return them scaled; without settings, unchanged."""
        if self._settings is None:
            return scores
        # the moments of two sets combined (Chan et al. 1979)
        x = scores.double()
        number, mean = len(x), float(x.mean())
        squares = float(((x - mean) ** 2).sum())
        shift, both = mean - self.mean, self.count + number
        self.squares += squares + shift**2 * self.count * number / both
        self.mean += shift * number / both
        self.count = both
        std = (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0
        scaled = (scores - self.mean if self._settings.subtract_mean else scores) / std
        clip = self._settings.clip
        return scaled if clip is None else scaled.clamp(-clip, clip)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]

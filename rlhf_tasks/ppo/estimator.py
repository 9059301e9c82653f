"""From a rollout to the PPO batch: scores and KL → rewards → advantages and returns.

B batch · R response.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import EosTrick, Gae, OwnEstimator
from rlhf_tasks.modeling.tensors import Reduce, whiten
from rlhf_tasks.ppo.advantages import WITHOUT_CRITIC, gae, response_returns
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.kl import ESTIMATORS, KlController
from rlhf_tasks.ppo.rewards import ScoreScaler, token_rewards, truncated_scores, values_beyond
from rlhf_tasks.ppo.rollout import Rollout
from rlhf_tasks.ppo.rollout_metrics import (
    Metrics,
    explained_variance,
    group_metrics,
    objective_metrics,
    response_metrics,
)


class AdvantageEstimator:
    """Estimates advantages; kl_coef and the moments of the scores are its state from rollout to rollout."""

    def __init__(self, settings: Ppo, reduce: Reduce) -> None:
        self._settings, self._reduce = settings, reduce
        self.kl = KlController(settings.kl_coef, settings.adaptive_kl)
        self.scaler = ScoreScaler(settings.score_scaling)

    def estimate(self, rollout: Rollout) -> tuple[PPOBatch, Metrics]:
        """The batch that the epochs learn from, and the metrics of the rollout.

        The order is: scaled scores → EOS rule → KL and score as token rewards → whitening → advantages. If
        the rule bootstraps, GAE takes the critic's value of the state after a response that did not end.
        """
        settings, mask, reduce = self._settings, rollout.mask, self._reduce
        rule, gamma = settings.truncation, getattr(settings.advantages, "gamma", 1.0)
        scores = truncated_scores(
            self.scaler(rollout.scores, reduce),
            rollout.ended,
            rule.kind,
            missing_eos_score=rule.missing_eos_score if isinstance(rule, EosTrick) else 0.0,
        )
        beyond = values_beyond(rollout.last_values, rollout.ended, rule.kind)
        kl = ESTIMATORS[settings.kl.estimator](rollout.logprobs, rollout.ref_logprobs)
        reward_kl_coef = self.kl.coef if settings.kl.kind == "in_reward" else 0.0
        rewards = token_rewards(scores, kl, mask, reward_kl_coef)
        if isinstance(settings.advantages, Gae | OwnEstimator) and settings.advantages.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, reduce=reduce)
        advantages, returns, measured = self._advantages(rewards, rollout, beyond)
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask, reduce=reduce)
        if settings.advantage_clip is not None:
            advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
        metrics = objective_metrics(
            rollout, scores + gamma * beyond, kl, kl_coef=self.kl.coef,
            reward_kl_coef=reward_kl_coef, reduce=reduce,
        )  # fmt: skip
        metrics |= response_metrics(rollout, reduce) | measured
        return PPOBatch(rollout, advantages, returns, self.kl.coef), metrics

    def _advantages(
        self, rewards: Tensor, rollout: Rollout, beyond: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Advantages and returns, both (B, R), and what is measured of them."""
        settings, mask = self._settings, rollout.mask
        estimator = settings.advantages
        if estimator.kind == "gae":
            advantages, returns = gae(rewards, rollout.values, mask, estimator.gamma, estimator.lam, beyond)
            explained = explained_variance(returns, rollout.values, mask, self._reduce)
            return advantages, returns, {"val/explained_variance": explained}
        num_samples, of_responses = settings.samples_per_prompt, response_returns(rewards, mask)
        gains = WITHOUT_CRITIC[estimator.kind](of_responses, num_samples)
        advantages, returns = (x.to(rewards.dtype)[:, None] * mask for x in (gains, of_responses))
        return advantages, returns, group_metrics(of_responses, num_samples, self._reduce)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl.coef, "scores": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.coef = state["kl_coef"]
        self.scaler.load_state_dict(state["scores"])

"""Guards check the metrics of each update: which condition failed, and its likely cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.config import ppo as config
from rlhf_tasks.errors import UserError

LONGER, MORE_REPETITION = 1.2, 0.1
"""Growth that the guard `pattern_collapse` asks for: the first rollout's length times 1.2, or its repetition
plus 0.1."""

ROUNDING = 1e-4
"""Nats of a response that float32 may be off by: the KL of an unchanged policy has this size."""

FLOAT32_RATIO_ERROR, BF16_RATIO_ERROR, SHARDED_BF16_RATIO_ERROR = 1e-3, 0.05, 0.1
"""Tolerated deviation of the first minibatch's ratio from 1. In bf16 it is 0 in the micro-batches of scoring;
after out-of-memory they are others, which is measured in tests/training/test_first_update.py."""

NON_FINITE = "non_finite"  # the guard of NaN and infinity, which stops whatever the action is
MIN_ENDED_SHARE = 0.2
"""A share of ended responses below which its fall is noise."""


@dataclass(frozen=True)
class GuardTrip:
    """A condition that failed for `patience` updates in a row."""

    name: str
    what: str
    cause: str
    kl_helps: bool = True
    """Whether a higher kl_coef may help."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}; likely cause: {self.cause}"


class GuardTripped(UserError):
    """A guard has stopped the training."""


class GuardChecks:
    """Checks each update; a guard trips when its condition fails for `patience` updates in a row.

    `num_episodes` is the size of a rollout; `ratio_error` the largest val/first_ratio_error by rounding.
    """

    def __init__(
        self, settings: config.Guards, num_episodes: int, *, ratio_error: float = FLOAT32_RATIO_ERROR
    ) -> None:
        self.settings, self._num_episodes, self._ratio_error = settings, num_episodes, ratio_error
        self._failures: dict[str, int] = {}
        """Updates in a row at which each condition has failed."""
        self._first: list[float] = []
        """Length and repetition of the first rollout."""
        self._most_ended = 0.0

    def begin(self, ended: float) -> None:
        """Note the share of responses that end before training."""
        self._most_ended = max(self._most_ended, ended)

    def check(self, metrics: Mapping[str, float]) -> list[GuardTrip]:
        """The guards that trip at this update, whose metrics include those of its evaluation, if it has one.

        A condition that keeps failing trips its guard once, but with `raise_kl` again after as many updates.
        `gap` trips at each evaluation above the bound: it is a mean over all selection prompts.
        """
        self._most_ended = max(self._most_ended, 1 - metrics["val/truncated_share"])
        self._first = self._first or [metrics["val/response_length"], metrics["val/repetition"]]
        failed = {trip.name: trip for trip in self._find_failures(metrics)}
        self._failures = {name: self._failures.get(name, 0) + 1 for name in failed}
        patience, acts_again = self.settings.patience, self.settings.action == "raise_kl"
        return [
            failed[name]
            for name, count in self._failures.items()
            if name == "gap" or count == patience or (acts_again and count % patience == 0)
        ]

    def _find_failures(self, metrics: Mapping[str, float]) -> Iterator[GuardTrip]:
        settings, kl, perplexity = self.settings, metrics["objective/kl_k1"], metrics["objective/perplexity"]
        # an update whose losses read no response has taken no step
        ratio, error = metrics.get("val/ratio", 1.0), metrics.get("val/first_ratio_error", 0.0)
        if error > self._ratio_error:
            yield GuardTrip(
                "first_ratio",
                f"val/first_ratio_error = {error:.3g} exceeds {self._ratio_error:g} before any step",
                "the model gives other probabilities in training than in sampling; run `rlhf check-model`",
                kl_helps=False,
            )
        noise = ROUNDING + 2 * metrics["objective/kl_k1_standard_error"]
        if kl < settings.kl_min - noise:
            yield GuardTrip(
                "kl_low",
                f"objective/kl_k1 = {kl:.3f} is below {settings.kl_min:g} by more than its noise",
                "the responses are not samples of the distribution that the log-probs describe",
                kl_helps=False,
            )
        if kl > settings.kl_max:
            yield GuardTrip(
                "kl_high",
                f"objective/kl_k1 = {kl:.2f} exceeds {settings.kl_max:g}",
                "the reward is over-optimised: kl_coef is too low or learning_rate too high",
            )
        gap = metrics.get("eval/standardized_gap")
        if settings.gap_max is not None and gap is not None and gap > settings.gap_max:
            yield GuardTrip(
                "gap",
                f"eval/standardized_gap = {gap:.2f} exceeds {settings.gap_max:g}",
                "the reward is over-optimised, models/reward_heldout does not follow it: kl_coef is too low, "
                "or the reward model knows too few pairs",
            )
        if not settings.ratio_min <= ratio <= settings.ratio_max:
            yield GuardTrip(
                "ratio",
                f"val/ratio = {ratio:.3f} is outside {settings.ratio_min:g}–{settings.ratio_max:g}",
                "steps are too big: lower learning_rate or num_ppo_epochs",
            )
        if perplexity < settings.perplexity_min and self._drifts(metrics):
            yield GuardTrip(
                "pattern_collapse",
                f"objective/perplexity = {perplexity:.3f} is below {settings.perplexity_min:g} while length "
                "or repetition rises",
                "the policy repeats one pattern that the reward scores high; raise kl_coef, read the samples",
            )
        ended, least = 1 - metrics["val/truncated_share"], settings.eos_share_min * self._most_ended
        noise = 2 * (least * (1 - least) / self._num_episodes) ** 0.5
        if self._most_ended > MIN_ENDED_SHARE and ended < least - noise:
            yield GuardTrip(
                "eos",
                f"{ended:.0%} of the responses end, before {self._most_ended:.0%} did",
                "nothing rewards an end: use truncation: eos_trick_replace, or a longer response_length",
            )

    def _drifts(self, metrics: Mapping[str, float]) -> bool:
        """Whether responses are longer, or repeat themselves more, than in the first rollout."""
        length, repetition = self._first
        longer = metrics["val/response_length"] > LONGER * length
        return longer or metrics["val/repetition"] > repetition + MORE_REPETITION

    def state_dict(self) -> dict[str, Any]:
        return {"failures": self._failures, "first": self._first, "most_ended": self._most_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._failures, self._first = state["failures"], state["first"]
        self._most_ended = state["most_ended"]

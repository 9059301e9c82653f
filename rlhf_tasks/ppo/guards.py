"""A watchdog on each update's metrics: what went wrong, and its likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.config.ppo_options import Guards
from rlhf_tasks.errors import UserError

LONGER, MORE_REPETITION = 1.2, 0.1
"""Times the first rollout's length, and above its repetition: then they are said to rise."""

ROUNDING = 1e-4
"""Nats an answer that float32 may be off by: a policy that stands still has a KL of such numbers."""

RARE = 0.2
"""A share of ended answers below which its falling is noise."""


@dataclass(frozen=True)
class Trip:
    name: str
    what: str
    cause: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}; likely cause: {self.cause}"


class GuardTripped(UserError):
    """Training was stopped by a guard."""


class Watchdog:
    """Says which guard trips after an update; a condition must hold for `patience` updates in a row."""

    def __init__(self, settings: Guards, num_episodes: int) -> None:
        """`num_episodes` of an update: the fewer, the noisier its shares."""
        self._settings, self._num_episodes = settings, num_episodes
        self._seen: dict[str, int] = {}
        self._first: list[float] = []
        """Length and repetition of the first rollout."""
        self._most_ended = 0.0

    def look(self, metrics: Mapping[str, float]) -> list[Trip]:
        """The guards that trip by these metrics; one that goes on being wrong is told once."""
        found = {trip.name: trip for trip in self._wrong(metrics)}
        self._most_ended = max(self._most_ended, 1 - metrics["val/truncated_share"])
        self._first = self._first or [metrics["val/response_length"], metrics["val/repetition"]]
        self._seen = {name: self._seen.get(name, 0) + 1 for name in found}
        return [found[name] for name, times in self._seen.items() if times == self._settings.patience]

    @property
    def is_calm(self) -> bool:
        """Nothing was wrong with the last update: what was then is good to roll back to."""
        return not self._seen

    def _wrong(self, metrics: Mapping[str, float]) -> list[Trip]:
        settings, kl, ratio = self._settings, metrics["objective/kl_k1"], metrics["val/ratio"]
        noise = ROUNDING + 2 * metrics["objective/kl_k1_standard_error"]
        ended, least = 1 - metrics["val/truncated_share"], settings.eos_share_min * self._most_ended
        eos_noise = 2 * (least * (1 - least) / self._num_episodes) ** 0.5
        trips = []
        if kl < settings.kl_min - noise:
            trips.append(Trip(
                "kl_low", f"objective/kl_k1 = {kl:.3f} is below {settings.kl_min:g} by more than its noise",
                "the answers are not samples of the distribution that the log-probs speak of",
            ))  # fmt: skip
        if kl > settings.kl_max:
            trips.append(Trip(
                "kl_high", f"objective/kl_k1 = {kl:.2f} exceeds {settings.kl_max:g}",
                "the reward is over-optimised: kl_coef is too low or learning_rate too high",
            ))  # fmt: skip
        if not settings.ratio_min <= ratio <= settings.ratio_max:
            trips.append(Trip(
                "ratio", f"val/ratio = {ratio:.3f} is outside {settings.ratio_min:g}–{settings.ratio_max:g}",
                "steps are too big: lower learning_rate or num_ppo_epochs",
            ))  # fmt: skip
        if metrics["objective/perplexity"] < settings.perplexity_min and self._drifts(metrics):
            trips.append(Trip(
                "pattern_collapse",
                f"objective/perplexity = {metrics['objective/perplexity']:.3f} is below "
                f"{settings.perplexity_min:g} while length or repetition rises",
                "the policy has found one pattern that the reward likes; raise kl_coef, look at the samples",
            ))  # fmt: skip
        if self._most_ended > RARE and ended < least - eos_noise:
            trips.append(Trip(
                "eos", f"{ended:.0%} of the answers end, where {self._most_ended:.0%} did",
                "nothing makes answers end: use truncation: eos_trick_replace, or a longer response_length",
            ))  # fmt: skip
        return trips

    def _drifts(self, metrics: Mapping[str, float]) -> bool:
        """Answers are longer, or repeat themselves more, than at the start."""
        if not self._first:
            return False
        length, repetition = self._first
        longer = metrics["val/response_length"] > LONGER * length
        return longer or metrics["val/repetition"] > repetition + MORE_REPETITION

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": dict(self._seen),
            "first": list(self._first),
            "ended": self._most_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen, self._most_ended = dict(state["seen"]), state["ended"]
        self._first = list(state["first"])

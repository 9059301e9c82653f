"""PPO's training loop: updates one after another, evaluated, logged, guarded, and resumed from snapshots."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_tasks import console
from rlhf_tasks.config import Ppo, PpoView
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.evaluator import Evaluator
from rlhf_tasks.ppo.guards import (
    BF16_RATIO_ERROR,
    FLOAT32_RATIO_ERROR,
    Guards,
    GuardTrip,
    GuardTripped,
)
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.state import State

Metrics = dict[str, float]


@dataclass
class TrainingLoop:
    rt: Runtime
    config: PpoView
    paths: Paths
    trainer: Trainer
    evaluator: Evaluator
    tracker: Tracker
    metrics: Metrics = field(default_factory=dict)
    """The last update's."""
    roll_backs: int = 0
    num_rollouts: int = 0
    """All rollouts, those of updates that were rolled back included: it never falls."""
    undone: int = 0
    """Episodes that were rolled back: curves continue behind them, so that no point is overwritten."""
    trips: list[dict[str, Any]] = field(default_factory=list)
    """The guards' trips with the episode of the curves, those before a roll back included."""

    def __post_init__(self) -> None:
        self._good: State = {}
        """The state that `guards.action: roll_back` returns to."""
        self._newest: State = {}
        """The newest state; it is good too if the next rollout passes all guards."""
        self._has_begun = False
        settings, num_updates = self.settings, self.trainer.num_updates
        guards = settings.guards
        error = FLOAT32_RATIO_ERROR if self.rt.is_float32 else BF16_RATIO_ERROR
        self.guards = (
            None if guards is None else Guards(guards, settings.rollout_batch_size, ratio_error=error)
        )
        self._selections = selection_updates(settings.num_selections, num_updates)
        self._showings = sample_updates(settings.num_sample_generations, num_updates)

    @property
    def settings(self) -> Ppo:
        return self.config.ppo

    def run(self) -> Metrics:
        """Train to the end; returns the last update's metrics and the number of guard trips.

        Raises:
            GuardTripped: a guard stopped it.
        """
        bar = console.progress("ppo", self.settings.total_episodes, unit="episodes")
        with checkpoint.open(self.rt, self.paths, self.config, "ppo") as snapshots, bar as meter:
            state = snapshots.load()
            if state is not None:
                self.load_state_dict(state)
                meter.skip(self.trainer.update * self.settings.rollout_batch_size)
            while self.trainer.update < self.trainer.num_updates:
                try:
                    if not self._has_begun:
                        self._begin()
                    self._updates(meter, snapshots)
                except NonFiniteError as error:
                    self._handle(self._fault(error))
        return self.metrics | {"guards/trips": float(len(self.trips))}

    def _begin(self) -> None:
        self.metrics = self._evaluate(0, select=True, show=0 in self._showings)
        self.tracker.metrics(self.metrics, step=0)
        self._keep_good_state()
        self._has_begun = True

    def _updates(self, meter: console.Meter, snapshots: checkpoint.Checkpoint) -> None:
        for metrics in self.trainer.updates():
            self.num_rollouts += 1
            episode = int(metrics["episode"])
            if "lr" in metrics:
                self._after_update(episode + self.undone, metrics, meter)
            else:  # the critic's warm-up has an axis of its own
                warmup = {key: value for key, value in metrics.items() if key != "episode"}
                self.tracker.metrics(warmup, step=episode)
                self._keep_good_state()
            if snapshots.due():
                snapshots.save(self.num_rollouts, self.state_dict())

    def _after_update(self, episode: int, metrics: Metrics, meter: console.Meter) -> None:
        update = self.trainer.update
        self.metrics = metrics | {"episode": float(episode)}
        self.tracker.metrics(self.metrics, step=episode)
        evaluation = self._evaluate(episode, select=update in self._selections, show=update in self._showings)
        if evaluation:
            self.metrics |= evaluation
            self.tracker.metrics(evaluation, step=episode)
        meter.advance(
            self.settings.rollout_batch_size,
            score=metrics["objective/scores"], kl=metrics["objective/kl"],
            clipfrac=metrics["policy/clipfrac_avg"],
        )  # fmt: skip
        if self.guards is None:
            return
        for trip in self.guards.check(metrics):
            if self._handle(trip):
                return
        self._keep_good_state()

    def _evaluate(self, episode: int, *, select: bool, show: bool) -> Metrics:
        metrics = self.evaluator.evaluate(episode) if select else {}
        rows = self.evaluator.show(episode) if show else []  # on all processes: NaN must stop all of them
        if rows and self.rt.is_main:
            self.tracker.table("samples", rows)
            console.table(
                f"samples at episode {episode}", ["query", "response", "score"],
                [(row["prompt"], row["response"], f"{row['score']:.2f}") for row in rows],
            )  # fmt: skip
        return metrics

    # -------------------------------------------------------------------------------------- guards

    def _keep_good_state(self) -> None:
        guards = self.settings.guards
        if self.guards is None or guards is None or guards.action != "roll_back":
            return
        if self.trainer.update == 0:
            self._good = on_cpu(self._training_state())
            return
        if self.guards.all_passed:
            self._good = self._newest or self._good
        self._newest = {}
        if self.guards.all_passed and self.trainer.update % guards.checkpoint_every == 0:
            self._newest = on_cpu(self._training_state())

    def _fault(self, error: NonFiniteError) -> GuardTrip:
        """The guard `non_finite`; what the error was computed from is written out for inspection."""
        folder = self.paths.home / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        update = self.trainer.update
        when = f"{self.num_rollouts}-{time.time_ns()}"  # several runs share the folder
        file = folder / f"ppo-after-update-{update}-rank-{self.rt.rank}-{when}.pt"
        torch.save(error.batch, file)
        return GuardTrip(
            "non_finite", f"{error} (after update {update}; see {file})",
            "steps are too big, or a scorer gives extreme numbers",
        )  # fmt: skip

    def _handle(self, trip: GuardTrip) -> bool:
        """Whether the trip was answered by a roll back.

        Raises:
            GuardTripped: if training is to stop.
        """
        guards, update = self.settings.guards, self.trainer.update
        step = update * self.settings.rollout_batch_size + self.undone
        self.tracker.event(f"guard.{trip.name}", str(trip), step=step)
        self.trips.append({"episode": step, "guard": trip.name, "message": str(trip)})
        action = "stop" if guards is None else guards.action
        if action == "warn" and trip.name != "non_finite":
            console.say(f"guard {trip}")
            return False
        if guards is None or action != "roll_back" or not self._good or not trip.can_be_undone:
            raise GuardTripped(f"PPO was stopped at update {update} by the guard {trip}")
        if self.roll_backs == guards.max_roll_backs:
            raise GuardTripped(
                f"PPO was stopped at update {update} after {self.roll_backs} roll backs by the guard {trip}"
            )
        self._roll_back(trip, guards.kl_coef_factor)
        return True

    def _roll_back(self, trip: GuardTrip, factor: float) -> None:
        count, update = self.roll_backs + 1, self.trainer.update
        coef = self.trainer.estimator.kl.coef * factor
        self._load_training_state(on_cpu(self._good))
        self._newest = {}
        self.roll_backs, self.trainer.estimator.kl.coef = count, coef
        self.undone += (update - self.trainer.update) * self.settings.rollout_batch_size
        console.say(
            f"guard {trip}. Rolled back from update {update} to {self.trainer.update}; "
            f"kl_coef is now {coef:g}"
        )

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        return self._training_state() | {
            "good": self._good,
            "newest": self._newest,
            "num_rollouts": self.num_rollouts,
            "undone": self.undone,
            "trips": list(self.trips),
            "tracker": self.tracker.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._load_training_state(state)
        self._good, self._newest = state["good"], state["newest"]
        self.num_rollouts, self.undone = state["num_rollouts"], state["undone"]
        self.trips = list(state["trips"])
        self.tracker.load_state_dict(state["tracker"])
        self._has_begun = True

    def _training_state(self) -> State:
        """The part of the state that a roll back returns to."""
        return {
            "shared": {
                "trainer": self.trainer.state_dict(),
                "evaluator": self.evaluator.state_dict(),
                "guards": self.guards.state_dict() if self.guards else {},
                "metrics": dict(self.metrics),
                "roll_backs": self.roll_backs,
            },
            "sampling": self.trainer.collector.generator.get_state(),
            "rng": self.rt.rng_state(),
        }

    def _load_training_state(self, state: State) -> None:
        shared = state["shared"]
        self.trainer.load_state_dict(shared["trainer"])
        self.evaluator.load_state_dict(shared["evaluator"])
        if self.guards:
            self.guards.load_state_dict(shared["guards"])
        self.metrics, self.roll_backs = dict(shared["metrics"]), shared["roll_backs"]
        self.trainer.collector.generator.set_state(state["sampling"])
        self.rt.set_rng_state(state["rng"])


def on_cpu(part: Any) -> Any:
    """A copy of a state, its tensors on the CPU."""
    if isinstance(part, torch.Tensor):
        return part.detach().cpu().clone()
    if isinstance(part, dict):
        return {key: on_cpu(value) for key, value in part.items()}
    return [on_cpu(value) for value in part] if isinstance(part, list) else part


def selection_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced; the last update is one of them."""
    return {max(1, round((i + 1) * num_updates / count)) for i in range(count)}


def sample_updates(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced from 0, before training, to the last."""
    return {num_updates} if count == 1 else {round(i * num_updates / (count - 1)) for i in range(count)}

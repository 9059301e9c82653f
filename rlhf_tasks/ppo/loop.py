"""The updates of a run, one after another: looked at, logged, guarded, and gone on with after a kill."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_tasks import console
from rlhf_tasks.config import Ppo, PpoView
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.guards import GuardTripped, Trip, Watchdog
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.ppo.watch import Watch
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import resume
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.state import State

Metrics = dict[str, float]


@dataclass
class Loop:
    rt: Runtime
    config: PpoView
    trainer: Trainer
    watch: Watch
    tracker: Tracker
    metrics: Metrics = field(default_factory=dict)
    """The last update's."""
    roll_backs: int = 0
    num_rollouts: int = 0
    """Those rolled back too: it never falls."""
    undone: int = 0
    """Episodes rolled back: curves go on behind them, where no point is yet."""
    trips: list[dict[str, Any]] = field(default_factory=list)
    """What the guards said, at which episode of the curves; what was rolled back too."""

    def __post_init__(self) -> None:
        self._good: State = {}
        """What `guards.action: roll_back` goes back to."""
        self._newest: State = {}
        """Good too, if the next rollout shows nothing wrong with its policy."""
        self._has_begun = False
        settings = self.settings
        guards = settings.guards
        self.watchdog = None if guards is None else Watchdog(guards, settings.rollout_batch_size)
        self._selections = _spread(settings.num_selections, self.trainer.num_updates)
        self._shown = _shown(settings.num_sample_generations, self.trainer.num_updates)

    @property
    def settings(self) -> Ppo:
        settings: Ppo = self.config.ppo
        return settings

    def run(self) -> Metrics:
        """The last update's metrics, and how often a guard tripped.

        Raises:
            GuardTripped: a guard stopped it.
        """
        bar = console.progress("ppo", self.settings.total_episodes, unit="episodes")
        with resume.open(self.rt, Paths(), self.config, "ppo") as snapshots, bar as meter:
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
                    self._handle(self._kept(error))
        return self.metrics | {"guards/trips": float(len(self.trips))}

    def _begin(self) -> None:
        self.metrics = self._look(0, select=True, show=0 in self._shown)
        self.tracker.metrics(self.metrics, step=0)
        self._keep_good()
        self._has_begun = True

    def _updates(self, meter: console.Meter, snapshots: resume.Loop) -> None:
        for found in self.trainer.updates():
            self.num_rollouts += 1
            episode = int(found["episode"])
            if "lr" in found:
                self._after_update(episode + self.undone, found, meter)
            else:  # the critic's warm-up, on an axis of its own episodes
                self.tracker.metrics({key: found[key] for key in found.keys() - {"episode"}}, step=episode)
                self._keep_good()
            if snapshots.due():
                snapshots.save(self.num_rollouts, self.state_dict())

    def _after_update(self, episode: int, found: Metrics, meter: console.Meter) -> None:
        update = self.trainer.update
        self.metrics = found | {"episode": float(episode)}
        self.tracker.metrics(self.metrics, step=episode)
        looked = self._look(episode, select=update in self._selections, show=update in self._shown)
        if looked:
            self.metrics |= looked
            self.tracker.metrics(looked, step=episode)
        meter.advance(
            self.settings.rollout_batch_size,
            score=found["objective/scores"], kl=found["objective/kl"], clipfrac=found["policy/clipfrac_avg"],
        )  # fmt: skip
        if self.watchdog is None:
            return
        for trip in self.watchdog.look(found):
            if self._handle(trip):
                return
        self._keep_good()

    def _look(self, episode: int, *, select: bool, show: bool) -> Metrics:
        metrics = self.watch.select(episode) if select else {}
        rows = self.watch.show(episode) if show else []  # by all: NaN must stop all of them
        if rows and self.rt.is_main:
            self.tracker.table("samples", rows)
            console.table(
                f"samples at episode {episode}", ["query", "response", "score"],
                [(row["prompt"], row["response"], f"{row['score']:.2f}") for row in rows],
            )  # fmt: skip
        return metrics

    # -------------------------------------------------------------------------------------- guards

    def _keep_good(self) -> None:
        guards = self.settings.guards
        if self.watchdog is None or guards is None or guards.action != "roll_back":
            return
        if self.trainer.update == 0:
            self._good = on_cpu(self._place())
            return
        if self.watchdog.is_calm:
            self._good = self._newest or self._good
        self._newest = {}
        if self.watchdog.is_calm and self.trainer.update % guards.checkpoint_every == 0:
            self._newest = on_cpu(self._place())

    def _kept(self, error: NonFiniteError) -> Trip:
        """What was no number, written out for inspection."""
        folder = Paths().home / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        update = self.trainer.update
        when = f"{self.num_rollouts}-{time.time_ns()}"  # several runs share the folder
        file = folder / f"ppo-after-update-{update}-rank-{self.rt.rank}-{when}.pt"
        torch.save(error.batch, file)
        return Trip(
            "non_finite", f"{error} (after update {update}; see {file})",
            "steps are too big, or a scorer gives extreme numbers",
        )  # fmt: skip

    def _handle(self, trip: Trip) -> bool:
        """True after a roll back.

        Raises:
            GuardTripped: where training is to stop.
        """
        guards, update = self.settings.guards, self.trainer.update
        step = update * self.settings.rollout_batch_size + self.undone
        self.tracker.event(f"guard.{trip.name}", str(trip), step=step)
        self.trips.append({"episode": step, "guard": trip.name, "said": str(trip)})
        action = "stop" if guards is None else guards.action
        if action == "warn" and trip.name != "non_finite":
            console.say(f"guard {trip}")
            return False
        if guards is None or action != "roll_back" or not self._good:
            raise GuardTripped(f"PPO was stopped at update {update} by the guard {trip}")
        if self.roll_backs == guards.max_roll_backs:
            raise GuardTripped(
                f"PPO was stopped at update {update} after {self.roll_backs} roll backs by the guard {trip}"
            )
        self._roll_back(trip, guards.kl_coef_factor)
        return True

    def _roll_back(self, trip: Trip, factor: float) -> None:
        times, was = self.roll_backs + 1, self.trainer.update
        coef = self.trainer.teach.kl.coef * factor
        self._go_to(on_cpu(self._good))
        self._newest = {}
        self.roll_backs, self.trainer.teach.kl.coef = times, coef
        self.undone += (was - self.trainer.update) * self.settings.rollout_batch_size
        console.say(f"guard {trip}. Back from update {was} to {self.trainer.update}, kl_coef is now {coef:g}")

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        return self._place() | {
            "good": self._good,
            "newest": self._newest,
            "num_rollouts": self.num_rollouts,
            "undone": self.undone,
            "trips": list(self.trips),
            "tracker": self.tracker.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._go_to(state)
        self._good, self._newest = state["good"], state["newest"]
        self.num_rollouts, self.undone = state["num_rollouts"], state["undone"]
        self.trips = list(state["trips"])
        self.tracker.load_state_dict(state["tracker"])
        self._has_begun = True

    def _place(self) -> State:
        """Where training stands: all but what was told of it, and what it could go back to."""
        return {
            "shared": {
                "trainer": self.trainer.state_dict(),
                "watch": self.watch.state_dict(),
                "watchdog": self.watchdog.state_dict() if self.watchdog else {},
                "metrics": dict(self.metrics),
                "roll_backs": self.roll_backs,
            },
            "sampling": self.trainer.collect.generator.get_state(),
            "rng": self.rt.rng_state(),
        }

    def _go_to(self, state: State) -> None:
        shared = state["shared"]
        self.trainer.load_state_dict(shared["trainer"])
        self.watch.load_state_dict(shared["watch"])
        if self.watchdog:
            self.watchdog.load_state_dict(shared["watchdog"])
        self.metrics, self.roll_backs = dict(shared["metrics"]), shared["roll_backs"]
        self.trainer.collect.generator.set_state(state["sampling"])
        self.rt.set_rng_state(state["rng"])


def on_cpu(part: Any) -> Any:
    """A copy of a state, its tensors on the CPU."""
    if isinstance(part, torch.Tensor):
        return part.detach().cpu().clone()
    if isinstance(part, dict):
        return {key: on_cpu(value) for key, value in part.items()}
    return [on_cpu(value) for value in part] if isinstance(part, list) else part


def _spread(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced, the last update among them."""
    return {max(1, round((i + 1) * num_updates / count)) for i in range(count)}


def _shown(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced from 0, before training, to the last."""
    return {num_updates} if count == 1 else {round(i * num_updates / (count - 1)) for i in range(count)}

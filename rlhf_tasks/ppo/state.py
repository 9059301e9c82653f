"""The state of PPO's training between two updates, and what brings it back: snapshots and roll backs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import TokenBudget
from rlhf_tasks.models.load import num_bytes
from rlhf_tasks.models.tensors import NonFiniteError, copy_to_cpu
from rlhf_tasks.ppo.evaluate import EvaluationState
from rlhf_tasks.ppo.guards import (
    BF16_RATIO_ERROR,
    FLOAT32_RATIO_ERROR,
    SHARDED_BF16_RATIO_ERROR,
    Guards,
    GuardTrip,
    GuardTripped,
)
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rewards import ScoreScaler
from rlhf_tasks.ppo.rollout import ActorCritic, NoCritic, Reference, ReferenceCopy
from rlhf_tasks.ppo.sampler import PolicySampler, Sampler, VllmSampler
from rlhf_tasks.ppo.vllm import VllmServer
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.optim import adamw


class ShuffledRows:
    """Row numbers in shuffled passes: every row comes once before any comes again."""

    def __init__(self, num_rows: int, generator: torch.Generator) -> None:
        self._num_rows, self._generator = num_rows, generator
        self.waiting: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next rows; a new pass is drawn where those that wait do not suffice."""
        while len(self.waiting) < count:
            self.waiting += torch.randperm(self._num_rows, generator=self._generator).tolist()
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


@dataclass
class TrainState:
    """All that one update leaves to the next. A snapshot holds this, and a roll back returns to it."""

    actor_critic: ActorCritic
    wrapped: nn.Module
    """The actor-critic wrapped for DDP, ZeRO or FSDP2: what is called where a pass needs gradients."""
    optimizer: torch.optim.Optimizer
    num_policy_groups: int
    """The optimizer's first groups; the others are the critic's."""
    reference: Reference
    sampler: Sampler
    order_rng: torch.Generator
    """Draws prompts, demonstrations and minibatches; on the CPU, of the same state on all ranks."""
    token_rng: torch.Generator
    """Draws tokens; on the device, of the same state on all ranks."""
    prompt_order: ShuffledRows
    ptx: ShuffledRows | None
    score_scaler: ScoreScaler
    guards: Guards | None
    kl_coef: float
    penalty_beta: float
    budget: TokenBudget
    """Of the passes that score and train; out-of-memory lowers it."""
    evaluation_budget: TokenBudget
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    update: int = 0
    """Finished updates."""
    warmup_losses: list[float] = field(default_factory=list)
    """The critic's loss, one for each update of its warm-up."""
    was_evaluated: bool = False
    """Whether the policy was evaluated before training."""
    metrics: Metrics = field(default_factory=dict)
    """The last update's."""
    roll_backs: int = 0
    num_rollouts: int = 0
    """All rollouts, those of updates that were rolled back included: it never falls."""
    undone_episodes: int = 0
    """Episodes that were rolled back: curves continue behind them, so that no point is overwritten."""
    trips: list[dict[str, Any]] = field(default_factory=list)
    """The guards' trips with the episode of the curves, those before a roll back included."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts that are kept to be read, rows of rollouts.parquet, those before a roll back included."""
    rollback_target: dict[str, Any] = field(default_factory=dict)
    """The training state that `guards.action: roll_back` returns to."""
    rollback_candidate: dict[str, Any] = field(default_factory=dict)
    """The newest training state; it becomes the target if the next rollout passes all guards."""

    @property
    def moving_reference(self) -> ReferenceCopy | None:
        """The reference if its weights change, so that a snapshot must hold them."""
        reference = self.reference
        return reference if isinstance(reference, ReferenceCopy) and reference.moves else None

    @property
    def num_bytes(self) -> int:
        """The most that a snapshot takes: weights, moments, the best policy, two states to roll back to."""
        policy = num_bytes(self.actor_critic.policy)
        training = num_bytes(self.actor_critic) + 2 * num_bytes(self.actor_critic, trained=True)
        one = training + policy + (policy if self.moving_reference is not None else 0)
        return 3 * one if self.guards is not None and self.guards.rolls_back else one

    def rollback_state(self, dist: Distributed) -> dict[str, Any]:
        """What a roll back returns to. `shared` is equal on all ranks; the generators are each rank's own."""
        moving = self.moving_reference
        shared = {
            "reference": {} if moving is None else sharding.weights_of(moving.model),
            "sampler": self.sampler.name,
            "prompts": list(self.prompt_order.waiting),
            "ptx": list(self.ptx.waiting) if self.ptx else [],
            "order_rng": self.order_rng.get_state(),
            "score_scaler": self.score_scaler.state_dict(),
            "guards": self.guards.state_dict() if self.guards else {},
            "budgets": [self.budget.state_dict(), self.evaluation_budget.state_dict()],
            "evaluation": vars(self.evaluation) | {"responses": list(self.evaluation.responses)},
            "plain": {name: getattr(self, name) for name in ROLLED_BACK} | {"metrics": dict(self.metrics)},
        }
        training = dist.training_state(self.wrapped, self.optimizer)
        own = {"token_rng": self.token_rng.get_state(), "rng": dist.rng_state()}
        return {"training": training, "shared": shared, **own}

    def load_rollback_state(self, dist: Distributed, state: dict[str, Any]) -> None:
        """Restore `rollback_state`."""
        shared = state["shared"]
        dist.load_training_state(self.wrapped, self.optimizer, state["training"])
        if self.moving_reference is not None:
            sharding.load_weights(self.moving_reference.model, shared["reference"])
        self.sampler.name = shared["sampler"]
        self.prompt_order.waiting = list(shared["prompts"])
        if self.ptx:
            self.ptx.waiting = list(shared["ptx"])
        self.order_rng.set_state(shared["order_rng"])
        self.score_scaler.load_state_dict(shared["score_scaler"])
        if self.guards:
            self.guards.load_state_dict(shared["guards"])
        for budget, own in zip((self.budget, self.evaluation_budget), shared["budgets"], strict=True):
            budget.load_state_dict(own)
        self.evaluation = EvaluationState(**shared["evaluation"])
        self.evaluation.weights = sharding.keep_on_first_rank(
            self.actor_critic.policy, self.evaluation.weights
        )
        for name, value in shared["plain"].items():
            setattr(self, name, value)
        self.token_rng.set_state(state["token_rng"])
        dist.set_rng_state(state["rng"])

    def state_dict(self, dist: Distributed) -> dict[str, Any]:
        """The content of a snapshot, but for the tracker's."""
        return self.rollback_state(dist) | {
            name: getattr(self, name) for name in (*NOT_ROLLED_BACK, "rollback_target", "rollback_candidate")
        }

    def load_state_dict(self, dist: Distributed, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.load_rollback_state(dist, state)
        for name in (*NOT_ROLLED_BACK, "rollback_target", "rollback_candidate"):
            setattr(self, name, state[name])


ROLLED_BACK = ("kl_coef", "penalty_beta", "update", "warmup_losses", "was_evaluated")
"""Fields that a roll back returns to, and that are numbers or lists of numbers."""
NOT_ROLLED_BACK = ("num_rollouts", "roll_backs", "undone_episodes", "trips", "rollouts")
"""Fields that a roll back leaves as they are."""


def initial_state(
    dist: Distributed,
    config: Ppo,
    actor_critic: ActorCritic,
    reference: Reference,
    tokenizer: PreTrainedTokenizerBase,
    server: VllmServer | None = None,
    *,
    num_prompts: int,
    num_demonstrations: int,
    seed: int,
) -> TrainState:
    """The state before training; where vLLM samples, the first rank gives its `server`."""
    optimizer: torch.optim.Optimizer = adamw(actor_critic.policy, config)
    num_policy_groups = len(optimizer.param_groups)
    if not isinstance(actor_critic.critic, NoCritic):
        # one AdamW for both; the critic's groups may have a learning rate of their own
        own_rate: float | None = getattr(config.critic, "learning_rate", None)
        scale = (own_rate or config.learning_rate) / config.learning_rate
        for group in adamw(actor_critic.critic, config).param_groups:
            optimizer.add_param_group({"params": group["params"], "weight_decay": 0.0, "scale": scale})
    wrapped, optimizer = dist.prepare(actor_critic, optimizer, config.max_grad_norm)
    order_rng, token_rng = torch.Generator().manual_seed(seed), torch.Generator(dist.device).manual_seed(seed)
    sampler: Sampler = PolicySampler(dist, config, actor_critic.policy, tokenizer, token_rng)
    if config.sampler.kind == "vllm":
        sampler = VllmSampler(dist, config, actor_critic.policy, tokenizer, token_rng, server)
    guards = None
    if config.guards is not None:
        ratio_error = FLOAT32_RATIO_ERROR
        if not dist.is_float32:
            ratio_error = SHARDED_BF16_RATIO_ERROR if dist.rounds_weights else BF16_RATIO_ERROR
        guards = Guards(config.guards, config.rollout_batch_size, ratio_error=ratio_error)
    return TrainState(
        actor_critic=actor_critic,
        wrapped=wrapped,
        optimizer=optimizer,
        num_policy_groups=num_policy_groups,
        reference=reference,
        sampler=sampler,
        order_rng=order_rng,
        token_rng=token_rng,
        prompt_order=ShuffledRows(num_prompts, order_rng),
        ptx=ShuffledRows(num_demonstrations, order_rng) if num_demonstrations else None,
        score_scaler=ScoreScaler(config.score_scaling),
        guards=guards,
        kl_coef=config.kl_coef,
        penalty_beta=config.kl_penalty.beta if config.kl_penalty else 0.0,
        budget=TokenBudget(config.micro_batch_tokens),
        evaluation_budget=TokenBudget(config.micro_batch_tokens),
    )


# -------------------------------------------------------------------------------- roll backs and faults


def keep_rollback_target(dist: Distributed, state: TrainState) -> None:
    """Keep what a roll back returns to: the start, then states whose next rollout passed all guards.

    With `gap_max` these are states whose gap an evaluation has just measured.
    """
    guards = state.guards
    if guards is None or not guards.rolls_back:
        return
    if state.update == 0:
        state.rollback_target = copy_to_cpu(state.rollback_state(dist))
        return
    passed = guards.all_passed
    if passed and state.rollback_candidate:
        state.rollback_target = state.rollback_candidate
    is_due = passed and state.update % guards.settings.checkpoint_every == 0
    if guards.settings.gap_max is not None:
        is_due = passed and "eval/standardized_gap" in state.metrics
    state.rollback_candidate = copy_to_cpu(state.rollback_state(dist)) if is_due else {}


def handle_trips(
    dist: Distributed, config: Ppo, state: TrainState, trips: Sequence[GuardTrip], tracker: Tracker
) -> bool:
    """Whether an update's trips, all of which are recorded, were answered by a roll back.

    With `raise_kl` they raise kl_coef, once for all of them.

    Raises:
        GuardTripped: if training is to stop.
    """
    guards, update, batch_size = config.guards, state.update, config.rollout_batch_size
    step = update * batch_size + state.undone_episodes
    for trip in trips:
        tracker.event(f"guard.{trip.name}", str(trip), step=step)
        state.trips.append({"episode": step, "guard": trip.name, "message": str(trip)})
    action = "stop" if guards is None else guards.action
    if action == "warn":
        for trip in trips:
            console.say(f"guard {trip}")
        trips = [trip for trip in trips if trip.name == "non_finite"]
    if not trips:
        return False
    trip = min(trips, key=lambda trip: trip.can_be_undone)  # the first that cannot be undone, if there is one
    if guards is not None and action == "raise_kl" and trip.can_be_undone and trip.name != "non_finite":
        state.kl_coef *= guards.kl_coef_factor
        console.say(f"guard {trip}. kl_coef is now {state.kl_coef:g}")
        return False
    if guards is None or action != "roll_back" or not state.rollback_target or not trip.can_be_undone:
        raise GuardTripped(f"PPO was stopped at update {update} by the guard {trip}")
    if state.roll_backs == guards.max_roll_backs:
        raise GuardTripped(
            f"PPO was stopped at update {update} after {state.roll_backs} roll backs by the guard {trip}"
        )
    kl_coef = state.kl_coef * guards.kl_coef_factor
    state.load_rollback_state(dist, copy_to_cpu(state.rollback_target))
    state.rollback_candidate, state.kl_coef = {}, kl_coef
    state.roll_backs += 1
    state.undone_episodes += (update - state.update) * batch_size
    console.say(
        f"guard {trip}. Rolled back from update {update} to {state.update}; kl_coef is now {kl_coef:g}"
    )
    return True


def write_fault(dist: Distributed, state: TrainState, error: NonFiniteError, folder: Path) -> GuardTrip:
    """The guard `non_finite`; what the error was computed from is written out for inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    when = f"{state.num_rollouts}-{time.time_ns()}"  # several runs share the folder
    file = folder / f"ppo-after-update-{state.update}-rank-{dist.rank}-{when}.pt"
    torch.save(error.batch, file)
    return GuardTrip(
        "non_finite",
        f"{error} (after update {state.update}; see {file})",
        "steps are too big, or a scorer gives extreme numbers",
    )

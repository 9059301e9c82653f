"""The state of PPO's training between two updates, and what a guard's trip does to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import SeparateCritic
from rlhf_tasks.models.heads import ActorCritic
from rlhf_tasks.models.load import moment_bytes, num_bytes
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.stop_tokens import StopTokens
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.advantages import Estimator
from rlhf_tasks.ppo.evaluate import EvaluationState, Evaluator
from rlhf_tasks.ppo.guards import (
    BF16_RATIO_ERROR,
    FLOAT32_RATIO_ERROR,
    NON_FINITE,
    SHARDED_BF16_RATIO_ERROR,
    GuardChecks,
    GuardTrip,
    GuardTripped,
)
from rlhf_tasks.ppo.losses import PolicyLoss
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rewards import ScoreScaler
from rlhf_tasks.ppo.rollout import Prompts, Reference
from rlhf_tasks.ppo.sampler import LocalSampler, Sampler, ServedSampler
from rlhf_tasks.ppo.vllm import VllmServer
from rlhf_tasks.scoring.build import WeightedSum
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.optim import adamw
from rlhf_tasks.training.tasks import LanguageModeling


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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What PPO trains with, and where it reports; nothing of it changes."""

    dist: Distributed
    config: Ppo
    prompts: Prompts
    scorers: WeightedSum
    loss: PolicyLoss
    estimator: Estimator
    evaluator: Evaluator
    ptx: LanguageModeling | None
    """The text of PPO-ptx; None without it."""
    tokenizer: PreTrainedTokenizerBase
    ends: StopTokens
    """The tokens that end a response."""
    tracker: Tracker
    snapshots: Snapshots
    faults: Path
    """The folder for batches from which NaN or infinity came."""

    @property
    def num_updates(self) -> int:
        """Updates of the whole training."""
        return self.config.total_episodes // self.config.rollout_batch_size


@dataclass
class PpoState:
    """All that one update leaves to the next; a snapshot holds it."""

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
    guards: GuardChecks | None
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
    trips: list[dict[str, Any]] = field(default_factory=list)
    """The guards' trips with the episode of the curves."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts to be read, rows of rollouts.parquet."""

    @property
    def num_rollouts(self) -> int:
        """All rollouts so far, those of the critic's warm-up too."""
        return self.update + len(self.warmup_losses)

    @property
    def num_bytes(self) -> int:
        """The most that a snapshot takes: weights, moments and the best policy."""
        policy = num_bytes(self.actor_critic.policy)
        training = num_bytes(self.actor_critic) + moment_bytes(self.actor_critic)
        return training + policy + (policy if self.reference.moves else 0)

    def state_dict(self, dist: Distributed) -> dict[str, Any]:
        """A snapshot's content: `shared` is equal on all ranks; the generators are each rank's own."""
        shared = {
            "reference": sharding.weights_of(self.reference.model) if self.reference.moves else {},
            "sampler": self.sampler.name,
            "prompts": self.prompt_order.waiting,
            "ptx": self.ptx.waiting if self.ptx else [],
            "order_rng": self.order_rng.get_state(),
            "score_scaler": self.score_scaler.state_dict(),
            "guards": self.guards.state_dict() if self.guards else {},
            "budgets": [self.budget.state_dict(), self.evaluation_budget.state_dict()],
            "evaluation": vars(self.evaluation),
            "plain": {name: getattr(self, name) for name in PLAIN},
        }
        training = dist.training_state(self.wrapped, self.optimizer)
        own = {"token_rng": self.token_rng.get_state(), "rng": dist.rng_state()}
        return {"training": training, "shared": shared, **own}

    def load_state_dict(self, dist: Distributed, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        shared = state["shared"]
        dist.load_training_state(self.wrapped, self.optimizer, state["training"])
        if self.reference.moves:
            sharding.load_weights(self.reference.model, shared["reference"])
        self.sampler.name = shared["sampler"]
        self.prompt_order.waiting = shared["prompts"]
        if self.ptx:
            self.ptx.waiting = shared["ptx"]
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


PLAIN = (
    "kl_coef",
    "penalty_beta",
    "update",
    "warmup_losses",
    "was_evaluated",
    "metrics",
    "trips",
    "rollouts",
)
"""Fields of plain numbers, texts, lists and dicts."""


def initial_state(
    setup: Setup,
    actor_critic: ActorCritic,
    reference: Reference,
    server: VllmServer | None = None,
    *,
    seed: int,
) -> PpoState:
    """The state before training; where vLLM samples, the first rank gives its `server`."""
    dist, config = setup.dist, setup.config
    optimizer: torch.optim.Optimizer = adamw(actor_critic.policy, config)
    num_policy_groups = len(optimizer.param_groups)
    if config.critic is not None:
        # one AdamW for both; the critic's groups may have a learning rate and an eps of their own
        separate = config.critic if isinstance(config.critic, SeparateCritic) else SeparateCritic()
        scale = (separate.learning_rate or config.learning_rate) / config.learning_rate
        own = {"weight_decay": 0.0, "scale": scale}
        own |= {} if separate.adam_eps is None else {"eps": separate.adam_eps}
        for group in adamw(actor_critic.critic, config).param_groups:
            optimizer.add_param_group({"params": group["params"], **own})
    wrapped, optimizer = dist.prepare(actor_critic, optimizer, config.max_grad_norm)
    order_rng, token_rng = torch.Generator().manual_seed(seed), torch.Generator(dist.device).manual_seed(seed)
    policy, num_samples, sampler = actor_critic.policy, config.samples_per_prompt, config.sampler
    how: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.response_length}
    source: Sampler
    if sampler.kind == "vllm":
        source = ServedSampler(dist, sampler, policy, token_rng, server, num_samples=num_samples)
    else:
        how |= {"pad": setup.tokenizer.pad_token_id, "ends": setup.ends, "batch_size": sampler.batch_size}
        source = LocalSampler(dist, policy, token_rng, num_samples=num_samples, **how)
    guards = None
    if config.guards is not None:
        ratio_error = FLOAT32_RATIO_ERROR
        if not dist.is_float32:
            ratio_error = SHARDED_BF16_RATIO_ERROR if dist.rounds_weights else BF16_RATIO_ERROR
        guards = GuardChecks(config.guards, config.rollout_batch_size, ratio_error=ratio_error)
    return PpoState(
        actor_critic=actor_critic,
        wrapped=wrapped,
        optimizer=optimizer,
        num_policy_groups=num_policy_groups,
        reference=reference,
        sampler=source,
        order_rng=order_rng,
        token_rng=token_rng,
        prompt_order=ShuffledRows(len(setup.prompts), order_rng),
        ptx=ShuffledRows(len(setup.ptx.queries), order_rng) if setup.ptx else None,
        score_scaler=ScoreScaler(config.score_scaling),
        guards=guards,
        kl_coef=config.kl_coef,
        penalty_beta=config.kl_penalty.beta if config.kl_penalty else 0.0,
        budget=TokenBudget(config.micro_batch_tokens),
        evaluation_budget=TokenBudget(config.micro_batch_tokens),
    )


# ------------------------------------------------------------------------------------ trips and faults


def handle_trips(setup: Setup, state: PpoState, trips: Sequence[GuardTrip]) -> None:
    """Record an update's trips, and warn or raise kl_coef, once for all of them.

    Raises:
        GuardTripped: if training is to stop.
    """
    guards, episode = setup.config.guards, state.update * setup.config.rollout_batch_size
    for trip in trips:
        setup.tracker.event(f"guard.{trip.name}", str(trip), step=episode)
        state.trips.append({"episode": episode, "guard": trip.name, "message": str(trip)})
    action = "stop" if guards is None else guards.action
    if action == "warn":
        for trip in trips:
            console.say(f"guard {trip}")
        trips = [trip for trip in trips if trip.name == NON_FINITE]
    if not trips:
        return
    trip = min(trips, key=lambda trip: trip.kl_helps)  # the first that a higher kl_coef does not help, if any
    if guards is None or action != "raise_kl" or not trip.kl_helps:
        raise GuardTripped(f"PPO was stopped at update {state.update} by the guard {trip}")
    state.kl_coef *= guards.kl_coef_factor
    console.say(f"guard {trip}. kl_coef is now {state.kl_coef:g}")


@contextmanager
def stop_at_non_finite(setup: Setup, state: PpoState) -> Iterator[None]:
    """Within the block NaN or infinity trips a guard on all ranks; what it came from is written to `faults`.

    Raises:
        GuardTripped: then, whatever `guards.action` is.
    """
    try:
        yield
    except NonFiniteError as error:
        setup.faults.mkdir(parents=True, exist_ok=True)
        when = f"{state.num_rollouts}-{time.time_ns()}"  # several runs share the folder
        file = setup.faults / f"ppo-after-update-{state.update}-rank-{setup.dist.rank}-{when}.pt"
        torch.save(error.batch, file)
        trip = GuardTrip(
            NON_FINITE,
            f"{error} (after update {state.update}; see {file})",
            "steps are too big, or a scorer gives extreme numbers",
            kl_helps=False,
        )
        handle_trips(setup, state, [trip])

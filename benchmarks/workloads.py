"""What a benchmark trains: PPO of a named shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks import shapes
from benchmarks.shapes import Shape
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import SeparateCritic
from rlhf_tasks.config.scorers import RewardModelScorer
from rlhf_tasks.data.columns import NONE
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.heads import ActorCritic, NoCritic, TokenScores, ValueHead
from rlhf_tasks.models.load import place, recompute_activations
from rlhf_tasks.models.logprobs import head_width
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.ppo.evaluate import Evaluator
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import Prompts, Reference
from rlhf_tasks.ppo.state import Setup, initial_state
from rlhf_tasks.ppo.train import train
from rlhf_tasks.scoring.build import WeightedSum
from rlhf_tasks.scoring.build import build as build_scorers
from rlhf_tasks.stages.ppo import estimator_of, policy_loss_of
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed


class NoEvaluator(Evaluator):
    """Evaluates nothing, and keeps no weights."""

    def __init__(self) -> None:
        pass

    def evaluate(self, *_: object, **__: object) -> Metrics:
        return {}

    def show(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return []

    def texts(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> list[str]:
        return [""] * len(responses)

    def under_eos_rule(self, scores: Tensor, responses: Sequence[Ids]) -> Tensor:
        return scores

    def heldout_scores(self, *_: object) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What PPO trains, without evaluations, snapshots and tracking."""

    dist: Distributed
    settings: Ppo
    actor_critic: ActorCritic
    reference: Reference
    scorers: WeightedSum
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Ids]

    def updates(self) -> Iterator[Metrics]:
        """Train; the metrics of each update."""
        settings, texts = self.settings, [str(self.tokenizer.decode(ids)) for ids in self.prompts]
        setup = Setup(
            dist=self.dist,
            config=settings,
            prompts=Prompts(texts, self.prompts, NONE),
            scorers=self.scorers,
            loss=policy_loss_of(settings.loss, Path()),
            estimator=estimator_of(settings.advantages, Path()),
            evaluator=NoEvaluator(),
            ptx=None,
            tokenizer=self.tokenizer,
            ends=ends_of(self.actor_critic.policy, self.tokenizer, [settings.stop_token]),
            tracker=NullTracker("ppo"),
            snapshots=Snapshots(),
            faults=Path("faults"),
        )
        return train(setup, initial_state(setup, self.actor_critic, self.reference, seed=1))


def of_shape(dist: Distributed, settings: Ppo, shape: Shape, num_updates: int) -> Workload:
    """PPO of random models: four epochs of one optimizer step, otherwise by `settings`."""
    advantages = settings.advantages
    if settings.critic is not None:
        advantages = advantages.model_copy(update={"critic": SeparateCritic(warmup=None)})
    changes = {
        "total_episodes": shape.batch * num_updates,
        "rollout_batch_size": shape.batch,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "micro_batch_tokens": shape.micro_tokens,
        "learning_rate": 3e-6,
        "temperature": 0.7,
        "response_length": shape.response,
        "advantages": advantages,
        "ptx": None,
        "lora": None,
        "scorers": (RewardModelScorer(kind="reward_model", weight=1.0),),
        "guards": None,
    }
    prompts = shapes.random_rows(shape.batch * num_updates, shape.query_min, shape.query, shape.vocab)
    return of_models(dist, settings.model_copy(update=changes), shapes.models(shape, dist.device), prompts)


def of_models(dist: Distributed, settings: Ppo, made: shapes.Models, prompts: Sequence[Ids]) -> Workload:
    """PPO of these models, as `settings` have it."""
    tokenizer = shapes.tokenizer(made.policy.config.vocab_size)
    for model in made:
        place(model, dist.device)
    dist.freeze(made.reward)
    policy, reward = made.policy, TokenScores(made.reward)
    critic: TokenScores | ValueHead | NoCritic = NoCritic()
    if settings.critic is not None:
        is_shared = settings.critic.kind == "shared"
        critic = ValueHead(head_width(policy)).to(dist.device) if is_shared else TokenScores(made.value)
    if settings.gradient_checkpointing:
        for model in [policy, critic.model] if isinstance(critic, TokenScores) else [policy]:
            recompute_activations(model)
    if settings.lora is not None:
        policy = add_lora(policy, settings.lora, seed=1)
        reference = Reference(policy)
    else:
        dist.freeze(made.reference)
        reference = Reference(made.reference, moves=settings.reference_sync is not None)
    scorer = build_scorers(
        settings.scorers,
        tokenizer,
        reward_model=reward,
        max_tokens=settings.micro_batch_tokens,
        root=Path(),
        placement=dist,
    )
    return Workload(
        dist=dist,
        settings=settings,
        actor_critic=ActorCritic(policy, critic),
        reference=reference,
        scorers=scorer,
        tokenizer=tokenizer,
        prompts=prompts,
    )

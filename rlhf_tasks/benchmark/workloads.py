"""What a benchmark trains: PPO of a named shape, or of the project's own params.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.benchmark import shapes
from rlhf_tasks.benchmark.shapes import Shape, positions
from rlhf_tasks.config import Config, Ppo, PpoView
from rlhf_tasks.config.ppo import Advantages, Critic, SeparateCritic
from rlhf_tasks.config.scorers import RewardModelScorer
from rlhf_tasks.data import columns
from rlhf_tasks.data import tokenizer as tokenizers
from rlhf_tasks.data.batches import load_tokenizer, read_table
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tokenizer import Ids, encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.load import (
    TokenScores,
    fetch_tokenizer,
    from_scratch,
    load_causal,
    place,
    save_checkpoint,
)
from rlhf_tasks.ppo.evaluate import NoEvaluator
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import ActorCritic, FrozenCopy, NoCritic, Reference
from rlhf_tasks.ppo.sampler import response_ends
from rlhf_tasks.ppo.state import begin
from rlhf_tasks.ppo.train import train
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import WeightedSum
from rlhf_tasks.scoring.build import build as build_scorers
from rlhf_tasks.stages.ppo import estimator_of, load_models, policy_loss_of, ptx_text
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Nowhere
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import LanguageModeling

NUM_PROMPTS = 2048
"""Random prompts where there are no real ones."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What PPO trains, without evaluations, snapshots and tracking; and in words what its models are."""

    dist: Distributed
    settings: Ppo
    actor_critic: ActorCritic
    reference: Reference
    scorers: WeightedSum
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Ids]
    description: str
    seed: int = 1
    columns: Columns = field(default_factory=lambda: NONE)
    ptx: LanguageModeling | None = None
    root: Path = Path()

    @property
    def num_updates(self) -> int:
        return self.settings.total_episodes // self.settings.rollout_batch_size

    def updates(self) -> Iterator[Metrics]:
        """Train; the metrics of each update."""
        dist, settings = self.dist, self.settings
        state = begin(
            dist,
            settings,
            self.actor_critic,
            self.reference,
            self.tokenizer,
            num_prompts=len(self.prompts),
            num_demonstrations=len(self.ptx.queries) if self.ptx else 0,
            seed=self.seed,
        )
        return train(
            dist,
            settings,
            state,
            prompts=self.prompts,
            columns=self.columns,
            scorers=self.scorers,
            loss=policy_loss_of(settings, self.root),
            estimator=estimator_of(settings, self.root),
            evaluator=NoEvaluator(),
            ptx=self.ptx,
            tokenizer=self.tokenizer,
            ends=response_ends(settings, self.actor_critic.policy, self.tokenizer),
            tracker=NullTracker("ppo"),
            snapshots=Nowhere(),
            faults=Paths(self.root).home / "faults",
        )


def of_shape(dist: Distributed, settings: Ppo, shape: Shape, num_updates: int) -> Workload:
    """PPO of random models: four epochs of one optimizer step, otherwise by `settings`.

    Raises:
        UserError: if `samples_per_prompt` does not divide the shape's batch.
    """
    if shape.batch % settings.samples_per_prompt:
        raise UserError(
            f"ppo.advantages.samples_per_prompt={settings.samples_per_prompt} does not divide the "
            f"{shape.batch} episodes of this shape; set it to a number that does"
        )
    changes = {
        "total_episodes": shape.batch * num_updates,
        "rollout_batch_size": shape.batch,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "learning_rate": 3e-6,
        "temperature": 0.7,
        "response_length": shape.response,
        "advantages": _without_warmup(settings, SeparateCritic()),
        "ptx": None,
        "lora": None,
        "scorers": (RewardModelScorer(kind="reward_model", weight=1.0),),
        "combine_reward_models": "sum",
        "guards": None,
    }
    settings = settings.model_copy(update=changes)
    tokenizer, made = shapes.tokenizer(shape.vocab), shapes.models(shape)
    for model in made:
        place(model, dist.device)
    for frozen in (made.reference, made.reward):
        dist.freeze(frozen)
    reward = TokenScores(made.reward)
    critic = TokenScores(made.value) if settings.critic else NoCritic()
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
        actor_critic=ActorCritic(made.policy, critic),
        reference=FrozenCopy(made.reference, moves=settings.reference_sync is not None),
        scorers=scorer,
        tokenizer=tokenizer,
        prompts=shapes.random_rows(shape.batch * num_updates, shape.query_min, shape.query, shape.vocab),
        description="random models of a named shape",
    )


def _without_warmup(settings: Ppo, critic: Critic | None) -> Advantages:
    """The estimator of `settings`, with this critic if it has one, and without the critic's warm-up."""
    if settings.critic is None or critic is None:
        return settings.advantages
    changed = critic.model_copy(update={"warmup": None}) if critic.kind == "separate" else critic
    return settings.advantages.model_copy(update={"critic": changed})


def of_params(dist: Distributed, config: Config, root: Path, scratch: Path, num_updates: int) -> Workload:
    """PPO as params.yaml has it, for `num_updates` updates without the critic's warm-up.

    Checkpoints and prompts are the project's own where it has them. The others are random, and are written
    to the folder `scratch`.

    Raises:
        UserError: if neither the project nor params.yaml tells what models to train.
    """
    view = PpoView.of(config)
    if view.ppo.sampler.kind != "policy":
        raise UserError(
            "`rlhf bench` measures the sampler of the stage itself; set ppo.sampler.kind to policy for it"
        )
    episodes = view.ppo.rollout_batch_size * num_updates
    settings = view.ppo.model_copy(
        update={
            "total_episodes": episodes,
            "advantages": _without_warmup(view.ppo, view.ppo.critic),
            "guards": None,
        }
    )
    random = _fill(config, Paths(root), Paths(scratch))
    paths = Paths(scratch)
    tokenizer = load_tokenizer(paths.sft)
    actor_critic, reference, reward = load_models(dist, view, paths)
    prompts, kept = _prompts(Paths(root), tokenizer, config)
    scorer = build_scorers(
        settings.scorers,
        tokenizer,
        reward_model=reward,
        max_tokens=settings.micro_batch_tokens,
        root=root,
        combine=settings.combine_reward_models,
        placement=dist,
        columns=kept,
    )
    if not Paths(root).table("prompts", "train").exists():
        random.append("prompts of the greatest length")
    return Workload(
        dist=dist,
        settings=settings,
        actor_critic=actor_critic,
        reference=reference,
        scorers=scorer,
        tokenizer=tokenizer,
        prompts=prompts,
        description=f"random {', '.join(random)}" if random else "models of this project",
        seed=view.seed,
        columns=kept,
        ptx=ptx_text(settings, Paths(root), tokenizer, actor_critic.policy),
        root=root,
    )


def _fill(config: Config, own: Paths, paths: Paths) -> list[str]:
    """Link the project's checkpoints into the scratch folder, and save random ones for those it lacks."""
    wanted = {"models/sft": own.sft, "models/base": own.base}
    if config.reward.train:
        wanted["models/reward"] = own.reward
    missing = []
    for name, source in wanted.items():
        (paths.root / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / "config.json").exists():
            (paths.root / name).symlink_to(source.resolve())
        else:
            missing.append(name)
    if "models/sft" in missing:
        _save(*_initial(config, own), paths.sft)
    if "models/base" in missing:
        paths.base.symlink_to(paths.sft.resolve())
    if "models/reward" in missing:
        generator = torch.Generator().manual_seed(config.seed)
        _save(TokenScores.from_policy(paths.sft, generator).model, load_tokenizer(paths.sft), paths.reward)
    return [
        name
        for name in missing
        if name != "models/base" or getattr(config.ppo.critic, "init", None) == "base"
    ]


def _initial(config: Config, own: Paths) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of the shape that SFT would have, and its tokenizer."""
    if config.sft.source is not None:
        where = fetch_tokenizer(config.sft.source, config.sft.revision)
        return load_causal(config.sft.source, config.sft.revision), load_tokenizer(where)
    if config.model.scratch is None:
        return load_causal(config.model.base, config.model.revision), tokenizers.ready(config.model)
    shape = config.model.scratch
    tokenizer = (
        load_tokenizer(own.tokenizer) if own.tokenizer.exists() else shapes.tokenizer(shape.vocab_size)
    )
    return from_scratch(shape, tokenizer, positions(config)), tokenizer


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_checkpoint(model, tokenizer, folder, identity={}, card="random weights, for a benchmark\n")


def _prompts(own: Paths, tokenizer: PreTrainedTokenizerBase, config: Config) -> tuple[list[Ids], Columns]:
    """The project's prompts with their columns, or random ones."""
    if own.table("prompts", "train").exists():
        rows = read_table(own, "prompts", "train")
        return encode(tokenizer, [row["prompt"] for row in rows]), columns.of_rows(rows)
    if config.data.columns.keep:
        raise UserError("data/prompts does not exist, and scorers get its columns: run `rlhf prepare` first")
    longest = config.data.max_prompt_tokens
    return shapes.random_rows(NUM_PROMPTS, longest, longest, len(tokenizer)), NONE


def check_device(shape: Shape) -> None:
    """Check that this machine has what a shape needs.

    Raises:
        UserError: if it needs a GPU.
    """
    if shape.precision == "bf16" and not torch.cuda.is_available():
        raise UserError(
            "shape D needs a GPU, and torch finds none; give A, B or C, or run it on another machine"
        )

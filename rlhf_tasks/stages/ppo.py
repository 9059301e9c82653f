"""Stage ppo: models/policy, with the weights that scored best on validation prompts."""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo, PpoView
from rlhf_tasks.config.scorers import RewardModelScorer, scorer_names
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import encode, load_tokenizer, read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import contracts, models, scorers
from rlhf_tasks.modeling.checkpointing import recompute_activations
from rlhf_tasks.modeling.head import head_width
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.ppo import preconditions
from rlhf_tasks.ppo.collector import stop_token
from rlhf_tasks.ppo.engines import build
from rlhf_tasks.ppo.evaluator import Evaluator
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel, Reference
from rlhf_tasks.ppo.rollout import ActorCritic, NoCritic, ValueHead
from rlhf_tasks.ppo.selection_judge import SelectionJudge
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.ppo.training_loop import TrainingLoop
from rlhf_tasks.project import hashing
from rlhf_tasks.project.atomic import whole, write_json
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling, demonstrations, plain

PTX_TOKENS = 256
"""The length at which pretraining text is cut into rows."""


class Models(NamedTuple):
    """The models of PPO as they are before training."""

    actor_critic: ActorCritic
    reference: Reference
    reward: TokenScores | None


def run(config: PpoView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/policy and evaluation/ppo/{samples.parquet,answers.parquet,guards.json}.

    Metrics: the last update's, and `selected_…` of the weights that are kept.
    """
    preconditions.check(config, paths)
    settings = config.ppo
    rt = Runtime(config.launch, config.seed)
    rows, validation = (read_table(paths, "prompts", split) for split in ("train", "validation"))
    kept = columns.of_rows(rows)
    judge = None if settings.select_by is None else SelectionJudge(rt, settings.select_by, paths, kept)
    tokenizer = load_tokenizer(paths.sft)
    actor_critic, reference, reward = load_models(rt, config, paths)
    policy = actor_critic.policy
    scorer = scorers.build(
        settings.scorers, tokenizer, reward_model=reward, max_tokens=settings.micro_batch_tokens,
        root=paths.root, combine=settings.combine_reward_models, placement=rt, columns=kept,
    )  # fmt: skip
    prompts, selection = (encode(tokenizer, [row["prompt"] for row in part]) for part in (rows, validation))
    heldout = _heldout(rt, config, paths)
    rewards = {"models/reward": reward, "models/reward_heldout": heldout}
    preconditions.check_models(
        rt, settings, actor_critic, rewards, prompts, selection, tokenizer.pad_token_id
    )
    for model in filter(None, rewards.values()):
        rt.put(model)
    with build.opened(
        settings, paths.home, tokenizer, stop=stop_token(settings, tokenizer),
        longest_query=max(map(len, [*prompts, *selection])), is_float32=rt.is_float32, is_main=rt.is_main,
    ) as engine:  # fmt: skip
        trainer = Trainer(
            rt, settings, actor_critic, reference, scorer, tokenizer, prompts, seed=config.seed, columns=kept,
            demonstrations=ptx_text(settings, paths, tokenizer, policy), engine=engine,
        )  # fmt: skip
        evaluator = Evaluator(
            rt, settings, policy, reference, tokenizer, validation, scorers=scorer,
            heldout=heldout and RewardScorer(heldout, tokenizer, settings.micro_batch_tokens, rt),
            judge=judge, seed=config.seed, respond=trainer.respond,
        )  # fmt: skip
        loop = TrainingLoop(rt, config, paths, trainer, evaluator, tracker)
        metrics = loop.run()
    evaluator.restore()
    with sharding.to_save(policy) as plain:
        if rt.is_main:
            _save_policy(config, paths, models.merged(plain), tokenizer, evaluator, trainer.source.sampler)
            _save_evaluations(paths, loop)
    rt.barrier()
    return metrics | evaluator.selected


# ---------------------------------------------------------------------------------------------- models


def load_models(rt: Runtime, config: PpoView, paths: Paths) -> Models:
    """Policy and critic to train (if there is one), the reference, and models/reward where there is one."""
    policy, reference = _policy(rt, config, paths)
    reward = models.load_reward(paths.reward) if config.has_reward_model else None
    if reward is not None:
        reward = rt.place(reward).requires_grad_(False)
    critic = rt.place(_critic(rt, config, paths, policy, reward))
    return Models(ActorCritic(policy, critic), reference, reward)


def _policy(rt: Runtime, config: PpoView, paths: Paths) -> tuple[PreTrainedModel, Reference]:
    settings = config.ppo
    policy = rt.place(models.load_causal(paths.sft))
    if settings.gradient_checkpointing:
        recompute_activations(policy)
    if settings.lora is not None:
        policy = models.with_lora(policy, settings.lora, seed=config.seed)
        return policy, AdapterOff(policy)
    reference = models.load_causal(paths.sft)
    rt.freeze(reference)
    return policy, OwnModel(reference, moves=settings.reference_sync is not None)


def _critic(
    rt: Runtime, config: PpoView, paths: Paths, policy: PreTrainedModel, reward: TokenScores | None
) -> TokenScores | ValueHead | NoCritic:
    """The critic by its `init`; a new head starts at zero, on the trunk's own weights."""
    settings = config.ppo.critic
    if settings is None:
        return NoCritic()
    if settings.kind == "shared":
        return ValueHead(head_width(policy))
    if settings.init == "reward":
        assert reward is not None
        # before it is sharded, a copy would be in the memory of every process; a file is mapped once for all
        critic = models.load_reward(paths.reward) if rt.shards else copy.deepcopy(reward)
        critic.requires_grad_(True)
    else:
        source = paths.sft if settings.init == "sft" else paths.base
        critic = TokenScores.from_policy(source, torch.Generator().manual_seed(config.seed))
        nn.init.zeros_(models.head_of(critic.model).weight)
    if config.ppo.gradient_checkpointing:
        recompute_activations(critic.model)
    if settings.lora is not None:
        critic.model = models.with_lora(critic.model, settings.lora, seed=config.seed)
    return critic


def _heldout(rt: Runtime, config: PpoView, paths: Paths) -> TokenScores | None:
    if not config.has_reward_model:
        return None
    return rt.place(models.load_reward(paths.reward_heldout)).requires_grad_(False)


def ptx_text(
    settings: Ppo, paths: Paths, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> LanguageModelling | None:
    """The text of PPO-ptx, in rows as long as the model allows; None without PPO-ptx.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    if settings.ptx is None:
        return None
    if settings.ptx.text is None:
        return demonstrations(paths, tokenizer, "train")
    try:
        text = (paths.root / settings.ptx.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ppo.ptx.text: {settings.ptx.text!r} cannot be read ({error})") from None
    most = min(PTX_TOKENS, getattr(policy.config, "max_position_embeddings", PTX_TOKENS))
    documents = encode(tokenizer, [part.strip() for part in re.split(r"\n\s*\n", text)])
    pieces = [ids[start : start + most] for ids in documents for start in range(0, len(ids), most)]
    rows = [piece for piece in pieces if len(piece) > 1]
    if not rows:
        raise UserError(f"ppo.ptx.text: {settings.ptx.text!r} holds no text")
    return plain(rows, tokenizer.pad_token_id)


# --------------------------------------------------------------------------------------------- results


def _save_policy(
    config: PpoView,
    paths: Paths,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    evaluator: Evaluator,
    sampler: str | None,
) -> None:
    """`sampler` is the program that sampled the rollouts, with its version; None: the stage itself."""
    settings = config.ppo
    parents = {"sft": contracts.fingerprint(paths.sft)}
    inputs = {"models/sft": parents["sft"], "data/prompts": hashing.file_hash(paths.rows("prompts"))}
    if settings.ptx is not None and settings.ptx.text is not None:
        inputs[settings.ptx.text] = hashing.file_hash(paths.root / settings.ptx.text)
    if config.has_reward_model:
        inputs["models/reward"] = contracts.fingerprint(paths.reward)
    if preconditions.is_rewarded(settings):  # a policy must not be judged by the reward it was trained on
        parents["reward"] = inputs["models/reward"]
    for name, scorer in zip(scorer_names(settings.scorers), settings.scorers, strict=True):
        if isinstance(scorer, RewardModelScorer) and scorer.path is not None:
            parents[f"reward/{name}"] = inputs[scorer.path] = contracts.fingerprint(paths.root / scorer.path)
    chosen = "the last update's weights"
    if evaluator.selection_metric is not None:
        by = f"the judge {settings.select_by.judge.name}" if settings.select_by else "models/reward_heldout"
        episode = int(evaluator.selected["selected_episode"])
        chosen = f"kept at episode {episode}, the best by {by} on validation prompts"
    identity: dict[str, Any] = {"kind": "policy", "parents": parents}
    if sampler is not None:
        identity["sampler"] = sampler
        chosen += f"; its rollouts were sampled by {sampler}"
    with whole(paths.policy) as folder:
        models.save(
            policy, tokenizer, folder, stop=stop_token(settings, tokenizer), identity=identity,
            card=contracts.model_card(
                "PPO policy", task="ppo", parameters=config.declared, inputs=inputs,
                how=f"PPO from the SFT policy; {chosen}.",
            ),
        )  # fmt: skip


def _save_evaluations(paths: Paths, loop: TrainingLoop) -> None:
    """Write what stage judge and the report read of the training."""
    with whole(paths.ppo_samples) as folder:
        pq.write_table(pa.Table.from_pylist(loop.evaluator.samples), folder / "samples.parquet")
        pq.write_table(pa.Table.from_pylist(loop.evaluator.answers), folder / paths.ppo_responses.name)
        write_json(folder / "guards.json", {"trips": loop.trips if loop.guards else None})

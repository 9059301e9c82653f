"""Stage ppo: models/policy, with the weights that scored best on validation prompts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo, PpoView, Split
from rlhf_tasks.config.judge import OPTIMISED, RewardModelJudge
from rlhf_tasks.config.scorers import RewardModelScorer, reward_folders, scorer_names
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import Ids, encode, load_tokenizer, read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import checks, contracts, models, positions, scorers
from rlhf_tasks.modeling.checkpointing import recompute_activations
from rlhf_tasks.modeling.head import head_width
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.modeling.verifier import Verifier
from rlhf_tasks.ppo.collector import stop_token
from rlhf_tasks.ppo.evaluator import Evaluator
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel, Reference
from rlhf_tasks.ppo.rollout import ActorCritic, NoCritic, ValueHead
from rlhf_tasks.ppo.selection_judge import SelectionJudge
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.ppo.training_loop import TrainingLoop
from rlhf_tasks.project import dvc_files, hashing
from rlhf_tasks.project.atomic import whole, write_json
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling, demonstrations, plain

SPLITS_USED: tuple[Split, ...] = ("train", "validation")
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
    check(config, paths)
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
        root=paths.root, combine=settings.combine_reward_models, device=rt.device, columns=kept,
    )  # fmt: skip
    prompts, selection = (encode(tokenizer, [row["prompt"] for row in part]) for part in (rows, validation))
    _check_models(settings, actor_critic, reward, prompts, selection, tokenizer.pad_token_id)
    trainer = Trainer(
        rt, settings, actor_critic, reference, scorer, tokenizer, prompts, seed=config.seed, columns=kept,
        demonstrations=ptx_text(settings, paths, tokenizer, policy),
    )  # fmt: skip
    evaluator = Evaluator(
        rt, settings, policy, reference, tokenizer, validation, scorers=scorer,
        heldout=_heldout(rt, config, paths, tokenizer), judge=judge, seed=config.seed,
    )  # fmt: skip
    loop = TrainingLoop(rt, config, paths, trainer, evaluator, tracker)
    metrics = loop.run()
    evaluator.restore()
    if rt.is_main:
        _save_policy(config, paths, models.merged(policy), tokenizer, evaluator)
        _save_evaluations(paths, loop)
    rt.barrier()
    return metrics | evaluator.selected


# ---------------------------------------------------------------------------- before anything is trained


def check(config: PpoView, paths: Paths) -> None:
    """Check the contracts between the checkpoints, the selection judge and the stop token; warn of risks.

    Raises:
        UserError: naming what does not fit.
    """
    for reward in (paths.reward, paths.reward_heldout) if config.has_reward_model else ():
        contracts.check_same_tokenizer(paths.sft, reward)
        contracts.check_parent(reward, "sft", paths.sft)
    settings = config.ppo
    _check_reward_models(config, paths)
    _check_verifiers(settings, paths)
    _check_selection_judge(settings, paths)
    tokenizer = load_tokenizer(paths.sft)
    stop = stop_token(settings, tokenizer)
    if stop >= len(tokenizer):
        raise UserError(
            f"ppo.stop_token={stop} is not a token: the tokenizer has {len(tokenizer)}, numbered from 0"
        )
    if settings.truncation.startswith("bootstrap"):
        _warn_of_bootstrapping(settings)


def _check_reward_models(config: PpoView, paths: Paths) -> None:
    """Check that DVC tracks the folders of `ppo.scorers`, and that none has the weights of another model.

    Raises:
        UserError: naming the folder.
    """
    folders = [folder for folder in reward_folders(config.ppo.scorers) if folder != OPTIMISED]
    if not folders:
        return
    deps = dvc_files.graph(paths.root)["ppo"].inputs
    known = {contracts.fingerprint(paths.root / folder): folder for folder in _pipeline_models(config, paths)}
    for folder in folders:
        if not any(Path(folder).is_relative_to(dep) for dep in deps):
            raise UserError(
                f"ppo.scorers: {folder} is not among the deps of stage ppo in dvc.yaml, so DVC would not "
                f"notice when it changes; add the line `- {folder}`"
            )
        if not contracts.is_made(paths.root / folder):
            raise UserError(f"ppo.scorers: {folder} holds no model; give the folder of a reward model")
        digest = contracts.fingerprint(paths.root / folder)
        if digest in known:
            raise UserError(
                f"ppo.scorers: {folder} has the weights of {known[digest]}; name each reward model once, and "
                "none that selects or judges"
            )
        known[digest] = folder


def _pipeline_models(config: PpoView, paths: Paths) -> list[str]:
    """The reward models of the pipeline that a folder of `ppo.scorers` must differ from."""
    if not config.has_reward_model:
        return []
    optimised = [OPTIMISED] if _is_rewarded(config.ppo) else []
    return [*optimised, paths.relative(paths.reward_heldout)]


def _check_verifiers(settings: Ppo, paths: Paths) -> None:
    verifiers = [Verifier(one.checks, one.format) for one in settings.scorers if one.kind == "verifier"]
    for split in SPLITS_USED if verifiers else ():
        rows = read_table(paths, "prompts", split)
        for verifier in verifiers:
            verifier.check(rows, columns.of_rows(rows), f"ppo.scorers: a verifier (data/prompts, {split})")


def _check_selection_judge(settings: Ppo, paths: Paths) -> None:
    judge = None if settings.select_by is None else settings.select_by.judge
    if not isinstance(judge, RewardModelJudge):
        return
    chooses = contracts.fingerprint(paths.root / judge.path)
    for folder in reward_folders(settings.scorers):
        if contracts.fingerprint(paths.root / folder) == chooses:
            raise UserError(
                f"ppo.select_by: {judge.path} has the weights of {folder}, which PPO optimises and which "
                "therefore must not choose; name another judge, or null for models/reward_heldout"
            )


def _warn_of_bootstrapping(settings: Ppo) -> None:
    if settings.critic_warmup is None:
        shared = settings.value_model == "shared"
        console.say(
            f"ppo.truncation={settings.truncation} rewards unfinished responses with the critic's value, and "
            f"this critic {'starts at zero' if shared else 'is not warmed up'}: "
            f"{'set ppo.value_model to separate, and ' if shared else ''}set ppo.critic_warmup"
        )
    if settings.gamma == 1:
        console.say(
            f"ppo.truncation={settings.truncation} with ppo.gamma=1 does not determine the value of a "
            "response that never ends, and the critic may value it highest: set ppo.gamma below 1, say 0.99"
        )


def _check_models(
    settings: Ppo,
    actor_critic: ActorCritic,
    reward: TokenScores | None,
    prompts: list[Ids],
    selection: list[Ids],
    pad: int,
) -> None:
    """Check that policy, reward model and critic compute the same numbers in every way that PPO uses.

    Raises:
        UserError: naming what differs, by how much, and the likely cause.
    """
    policy, critic = actor_critic.policy, actor_critic.value
    longest = max(map(len, [*prompts, *selection])) + settings.response_length
    positions.check_positions(policy.config, longest, "models/sft")
    queries = checks.prompts_of_mixed_lengths(prompts)
    saves = sum(p.numel() for p in policy.parameters()) <= checks.SMALL
    results = checks.check_policy(policy, queries, pad=pad, temperature=settings.temperature, saves=saves)
    checks.require(results, "models/sft")
    rows = checks.rows_of(queries)
    for name, model in (("models/reward", reward), ("the critic", critic)):
        if isinstance(model, TokenScores):
            checks.require(checks.check_scores(model, rows, pad=pad), name)


def _is_rewarded(settings: Ppo) -> bool:
    """Whether models/reward is what PPO optimises, or part of it."""
    return OPTIMISED in reward_folders(settings.scorers)


# ---------------------------------------------------------------------------------------------- models


def load_models(rt: Runtime, config: PpoView, paths: Paths) -> Models:
    """Policy and critic to train (if there is one), the reference, and models/reward where there is one."""
    policy, reference = _policy(rt, config, paths)
    reward = models.load_reward(paths.reward) if config.has_reward_model else None
    if reward is not None:
        reward = reward.to(rt.device).requires_grad_(False)
    critic = _critic(config, paths, policy, reward).to(rt.device)
    return Models(ActorCritic(policy, critic), reference, reward)


def _policy(rt: Runtime, config: PpoView, paths: Paths) -> tuple[PreTrainedModel, Reference]:
    settings = config.ppo
    policy = models.place(models.load_causal(paths.sft), rt.device)
    if settings.gradient_checkpointing:
        recompute_activations(policy)
    if settings.lora is not None:
        policy = models.with_lora(policy, settings.lora, seed=config.seed)
        return policy, AdapterOff(policy)
    reference = models.place(models.load_causal(paths.sft), rt.device)
    rt.freeze(reference)
    return policy, OwnModel(reference, moves=settings.reference_sync is not None)


def _critic(
    config: PpoView, paths: Paths, policy: PreTrainedModel, reward: TokenScores | None
) -> TokenScores | ValueHead | NoCritic:
    """The critic by `critic_init`; a new head starts at zero, on the trunk's own weights."""
    settings = config.ppo
    if settings.value_model is None:
        return NoCritic()
    if settings.value_model == "shared":
        return ValueHead(head_width(policy))
    if settings.critic_init == "reward":
        assert reward is not None
        critic = copy.deepcopy(reward).requires_grad_(True)
    else:
        source = paths.sft if settings.critic_init == "sft" else paths.base
        critic = TokenScores.from_policy(source, torch.Generator().manual_seed(config.seed))
        nn.init.zeros_(models.head_of(critic.model).weight)
    if settings.gradient_checkpointing:
        recompute_activations(critic.model)
    if settings.lora is not None and settings.lora.value:
        critic.model = models.with_lora(critic.model, settings.lora, seed=config.seed)
    return critic


def _heldout(
    rt: Runtime, config: PpoView, paths: Paths, tokenizer: PreTrainedTokenizerBase
) -> RewardScorer | None:
    if not config.has_reward_model:
        return None
    model = models.load_reward(paths.reward_heldout).to(rt.device).requires_grad_(False)
    return RewardScorer(model, tokenizer, config.ppo.micro_batch_tokens)


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
) -> None:
    settings = config.ppo
    parents = {"sft": contracts.fingerprint(paths.sft)}
    inputs = {"models/sft": parents["sft"], "data/prompts": hashing.file_hash(paths.rows("prompts"))}
    if settings.ptx is not None and settings.ptx.text is not None:
        inputs[settings.ptx.text] = hashing.file_hash(paths.root / settings.ptx.text)
    if config.has_reward_model:
        inputs["models/reward"] = contracts.fingerprint(paths.reward)
    if _is_rewarded(settings):  # a policy must not be judged by the reward that it was trained on
        parents["reward"] = inputs["models/reward"]
    for name, scorer in zip(scorer_names(settings.scorers), settings.scorers, strict=True):
        if isinstance(scorer, RewardModelScorer) and scorer.path is not None:
            parents[f"reward/{name}"] = inputs[scorer.path] = contracts.fingerprint(paths.root / scorer.path)
    chosen = "the last update's weights"
    if evaluator.selection_metric is not None:
        by = f"the judge {settings.select_by.judge.name}" if settings.select_by else "models/reward_heldout"
        episode = int(evaluator.selected["selected_episode"])
        chosen = f"kept at episode {episode}, the best by {by} on validation prompts"
    with whole(paths.policy) as folder:
        models.save(
            policy, tokenizer, folder, stop=stop_token(settings, tokenizer),
            identity={"kind": "policy", "parents": parents},
            card=contracts.model_card(
                "PPO policy", task="ppo", parameters=config.declared, inputs=inputs,
                how=f"PPO from the SFT policy; {chosen}.",
            ),
        )  # fmt: skip


def _save_evaluations(paths: Paths, loop: TrainingLoop) -> None:
    """Write what stage judge and the report read of the training."""
    with whole(paths.ppo_samples) as folder:
        pq.write_table(pa.Table.from_pylist(loop.evaluator.samples), folder / "samples.parquet")
        pq.write_table(pa.Table.from_pylist(loop.evaluator.answers), folder / "answers.parquet")
        write_json(folder / "guards.json", {"trips": loop.trips if loop.guards else None})

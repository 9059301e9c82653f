"""Stage ppo: models/policy, with the weights that scored best on validation prompts."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import PpoView
from rlhf_tasks.config.judge import RewardModelJudge
from rlhf_tasks.config.ppo import Advantages, Ptx, SeparateCritic
from rlhf_tasks.config.scorers import OPTIMIZED, RewardModelScorer, chat_models, reward_folders, scorer_names
from rlhf_tasks.data import columns, positions
from rlhf_tasks.data.batches import read_table, token_ids
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.tokenizer import encode, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import ActorCritic, NoCritic, TokenScores, ValueHead
from rlhf_tasks.models.load import load_causal, load_reward, recompute_activations
from rlhf_tasks.models.logprobs import head_width
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.ppo import audit, preconditions
from rlhf_tasks.ppo.advantages import ESTIMATORS, Estimator, call_user_estimator
from rlhf_tasks.ppo.critic import new_critic
from rlhf_tasks.ppo.evaluate import Evaluator, selection_judge
from rlhf_tasks.ppo.losses import PolicyLoss, call_user_loss, ppo_clip
from rlhf_tasks.ppo.rollout import Prompts, Reference
from rlhf_tasks.ppo.state import PpoState, Setup, initial_state
from rlhf_tasks.ppo.train import train
from rlhf_tasks.ppo.vllm import Sampling, VllmServer
from rlhf_tasks.project import hashing
from rlhf_tasks.project.atomic import whole, write_json
from rlhf_tasks.project.imports import load_function
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import build as build_scorers
from rlhf_tasks.scoring.reward_model import RewardModel
from rlhf_tasks.tracking import Tracker, context
from rlhf_tasks.training import checkpoint, sharding
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import save
from rlhf_tasks.training.tasks import LanguageModeling, demonstrations, plain_text

PTX_TOKENS = 256
"""The length at which pretraining text is cut into rows."""


def run(config: PpoView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/policy and evaluation/ppo/{samples,answers,rollouts}.parquet, guards.json and audit.json.

    Reads data/prompts; models/sft, or models/dpo where there is one; models/reward and reward_heldout where
    there are reward models; with `ptx: {text: null}` data/sft; with `critic.init: base` or `value` that
    model; and what its parameters (`PpoView`) name: scorers and their models, the text of `ptx`, a judge that
    selects, functions.

    Metrics: the last update's, and `selected_…` of the weights that are kept. With `train: false` the policy
    of stage dpo is passed on.
    """
    if not config.ppo.train:
        return _pass_on(config, paths)
    # 1. The user's functions, the data, and the judge that selects: what does not fit is found before the
    # models are loaded.
    preconditions.check(config, paths)
    settings = config.ppo
    dist = Distributed(config.launch, config.seed)
    # after the seed: a module may draw random numbers when it is imported
    loss, estimator = policy_loss_of(settings.loss, paths.root), estimator_of(settings.advantages, paths.root)
    tokenizer = load_tokenizer(paths.sft)
    rows, validation = (read_table(paths, "prompts", split) for split in ("train", "validation"))
    prompts, selection_prompts = (
        Prompts(part.texts("prompt"), token_ids(tokenizer, part)[0], columns.of_rows(part))
        for part in (rows, validation)
    )
    win_rate = None
    if settings.select_by is not None:
        win_rate = selection_judge(dist, settings.select_by, paths, prompts.columns)
    every_query = Ragged(itertools.chain(prompts.queries, selection_prompts.queries))

    # 2. The models. They are checked while they are whole; those that are sharded are split afterwards.
    actor_critic, reference, reward = load_models(dist, config, paths)
    policy = actor_critic.policy
    ends = ends_of(policy, tokenizer, [settings.stop_token])
    scorers = build_scorers(
        settings.scorers,
        tokenizer,
        reward_model=reward,
        max_tokens=settings.micro_batch_tokens,
        root=paths.root,
        placement=dist,
        columns=prompts.columns,
    )
    heldout = load_reward(paths.reward_heldout).requires_grad_(False) if config.has_reward_model else None
    rewards = {"models/reward": reward, "models/reward_heldout": heldout}
    preconditions.check_models(dist, settings, actor_critic, rewards, every_query, tokenizer)
    for model in filter(None, rewards.values()):
        dist.put(model)
    sft: Reference | None = None  # where PPO starts from another model: the reference of `selected_kl`
    if paths.start != paths.sft:
        frozen = load_causal(paths.sft)
        dist.freeze(frozen)
        sft = Reference(frozen)

    # 3. What the scorers pay for, before anything is trained on them.
    references = [row["reference"] for row in validation[: settings.num_selection_prompts]]
    evaluator = Evaluator(
        dist=dist,
        config=settings,
        policy=policy,
        reference=reference,
        tokenizer=tokenizer,
        ends=ends,
        prompts=selection_prompts.take(range(len(references))),
        references=references,
        scorers=scorers,
        heldout=heldout and RewardModel(heldout, tokenizer, settings.micro_batch_tokens, dist),
        win_rate=win_rate,
        seed=config.seed,
        sft=sft,
    )
    earnings = audit.Earnings()
    audited = validation[: min(settings.audit_prompts, settings.num_selection_prompts)]
    if audited and audited[0]["reference"] is not None:  # else there is nothing to compare with
        queries, answers = token_ids(tokenizer, audited, "reference")
        trivial = audit.trivial_responses(
            queries, answers, end=ends[0], response_length=settings.response_length, seed=config.seed
        )
        earnings = audit.audit(trivial, evaluator.score)
        tracker.table("reward_audit", [{"response": name, **found} for name, found in earnings.items()])

    # 4. The training.
    server: VllmServer | None = None
    serving: AbstractContextManager[Any] = nullcontext()
    if settings.sampler.kind == "vllm" and dist.is_main:  # the first rank alone has the server
        sampling = Sampling(
            temperature=settings.temperature,
            ends=ends,
            max_tokens=settings.response_length,
            longest_query=max(map(len, every_query)),
            is_float32=dist.is_float32,
        )
        server = VllmServer(settings.sampler, paths.home / "vllm", tokenizer, sampling)
        serving = closing(server)
    with serving, checkpoint.open_snapshots(dist, paths, config, "ppo") as snapshots:
        setup = Setup(
            dist=dist,
            config=settings,
            prompts=prompts,
            scorers=scorers,
            loss=loss,
            estimator=estimator,
            evaluator=evaluator,
            ptx=ptx_text(settings.ptx, paths, tokenizer, policy),
            tokenizer=tokenizer,
            ends=ends,
            tracker=tracker,
            snapshots=snapshots,
            faults=paths.home / "faults",
        )
        state = initial_state(setup, actor_critic, reference, server, seed=config.seed)
        for _ in train(setup, state):
            pass

    # 5. The weights that are kept, and what stage judge and the report read of the training.
    evaluation = state.evaluation
    sharding.load_weights(policy, evaluation.weights)
    evaluation.weights = {}
    identity, card = _describe(config, paths, setup, state)
    save(dist, policy, tokenizer, paths.policy, identity, card, others=ends)
    if dist.is_main:
        responses = pa.Table.from_pylist(evaluation.responses)
        trips = state.trips if state.guards else None
        _write_training(paths, evaluation.samples, responses, state.rollouts, trips, earnings)
    dist.barrier()
    return state.metrics | {"guards/trips": float(len(state.trips))} | evaluation.metrics


def _pass_on(config: PpoView, paths: Paths) -> dict[str, float]:
    """Write models/policy with the policy of stage dpo, and evaluation/ppo without a row."""
    if not contracts.has_model(paths.dpo):
        raise UserError("ppo.train is false, and models/dpo holds no policy to pass on; run `rlhf dpo` first")
    identity = contracts.read_identity(paths.dpo)
    kl, error = identity["kl"]
    if context.is_main_rank():
        with whole(paths.policy) as folder:
            shutil.copytree(paths.dpo, folder, dirs_exist_ok=True)
            write_json(folder / contracts.IDENTITY, identity | ({"trial": True} if config.is_trial else {}))
        names = ("episode", "prompt", "reference", "response")
        none = pa.schema([(name, pa.string()) for name in names]).empty_table()
        _write_training(paths, [], none, [], None, {})
    return {"selected_kl": kl, "selected_kl_standard_error": error}


def _write_training(
    paths: Paths,
    samples: list[dict[str, Any]],
    responses: pa.Table,
    rollouts: list[dict[str, Any]],
    trips: list[dict[str, Any]] | None,
    earnings: audit.Earnings,
) -> None:
    """Write evaluation/ppo."""
    with whole(paths.ppo_samples) as folder:
        pq.write_table(pa.Table.from_pylist(samples), folder / "samples.parquet")
        pq.write_table(responses, folder / paths.ppo_responses.name)
        pq.write_table(pa.Table.from_pylist(rollouts), folder / "rollouts.parquet")
        write_json(folder / "guards.json", {"trips": trips})
        write_json(folder / "audit.json", earnings)


def policy_loss_of(name: str, root: Path) -> PolicyLoss:
    """The built-in loss, or the function that `ppo.loss` names.

    Raises:
        UserError: if it cannot be imported.
    """
    if name == "ppo_clip":
        return ppo_clip
    return partial(call_user_loss, load_function(name, "ppo.loss", root), f"ppo.loss: {name}")


def estimator_of(settings: Advantages, root: Path) -> Estimator:
    """The built-in estimator of advantages, or the function that `ppo.advantages` names.

    Raises:
        UserError: if it cannot be imported.
    """
    if settings.kind != "function":
        return ESTIMATORS[settings.kind]
    function = load_function(settings.function, "ppo.advantages.function", root)
    return partial(call_user_estimator, function, f"ppo.advantages: {settings.function}")


# ---------------------------------------------------------------------------------------------- models


def load_models(
    dist: Distributed, config: PpoView, paths: Paths
) -> tuple[ActorCritic, Reference, TokenScores | None]:
    """Policy and critic to train (if there is one), the reference, and models/reward where there is one."""
    settings = config.ppo
    policy = load_causal(paths.start)
    if settings.gradient_checkpointing:
        recompute_activations(policy)
    if settings.lora is not None:
        policy = add_lora(policy, settings.lora, seed=config.seed)
        reference = Reference(policy)
    else:
        frozen = load_causal(paths.start)
        moves = settings.reference_sync is not None
        is_rounded = dist.is_deepspeed and not dist.is_float32
        if settings.reference_sync is not None and settings.reference_sync.alpha < 1 and is_rounded:
            raise UserError(
                "ppo.reference_sync mixes the weights of reference and policy, which DeepSpeed keeps in "
                "bf16: small changes would be lost; set alpha: 1.0 there, launch.parallelism: fsdp2, or "
                "launch.precision: fp32"
            )
        dist.freeze(frozen, moves=moves)
        reference = Reference(frozen, moves=moves)
    reward = load_reward(paths.reward).requires_grad_(False) if config.has_reward_model else None
    critic = _critic(dist, config, paths, policy, reward)
    return ActorCritic(policy, critic), reference, reward


def _critic(
    dist: Distributed, config: PpoView, paths: Paths, policy: PreTrainedModel, reward: TokenScores | None
) -> TokenScores | ValueHead | NoCritic:
    """The critic by its `init`."""
    settings = config.ppo.critic
    if settings is None:
        return NoCritic()
    if settings.kind == "shared":
        return ValueHead(head_width(policy))
    if settings.init == "reward" and not dist.shards:
        assert reward is not None
        critic = copy.deepcopy(reward).requires_grad_(True)
    else:  # before it is sharded, a copy would be in each process's memory; a file is mapped once for all
        critic = new_critic(paths, settings.init, config.seed)
    if config.ppo.gradient_checkpointing:
        recompute_activations(critic.model)
    if settings.lora is not None:
        critic.model = add_lora(critic.model, settings.lora, seed=config.seed)
    return critic


def ptx_text(
    settings: Ptx | None, paths: Paths, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> LanguageModeling | None:
    """The text of PPO-ptx, in rows as long as the model allows; None without PPO-ptx.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    if settings is None:
        return None
    if settings.text is None:
        rows = demonstrations(paths, tokenizer, "train")
        if not rows.sizes:
            raise UserError("ppo.ptx.text: null means the demonstrations, and the data has none; name a file")
        return rows
    try:
        text = (paths.root / settings.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ppo.ptx.text: {settings.text!r} cannot be read ({error})") from None
    most = min(PTX_TOKENS, positions.max_positions(policy.config) or PTX_TOKENS)
    documents = encode(tokenizer, [part.strip() for part in re.split(r"\n\s*\n", text)])
    pieces = [ids[start : start + most] for ids in documents for start in range(0, len(ids), most)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise UserError(f"ppo.ptx.text: {settings.text!r} holds no text")
    return plain_text(pieces, tokenizer.pad_token_id)


# --------------------------------------------------------------------------------------------- results


def _describe(config: PpoView, paths: Paths, setup: Setup, state: PpoState) -> tuple[dict[str, Any], str]:
    """The content of rlhf.json, with the identities of what made the policy, and the card, which says how."""
    settings = config.ppo
    parents = {"sft": contracts.fingerprint(paths.sft)}
    inputs = {"models/sft": parents["sft"], "data/prompts": hashing.file_hash(paths.rows("prompts"))}
    if paths.start == paths.dpo:
        parents["dpo"] = inputs["models/dpo"] = contracts.fingerprint(paths.dpo)
    if settings.ptx is not None:
        text = settings.ptx.text
        inputs[text or "data/sft"] = hashing.file_hash(paths.root / text if text else paths.rows("sft"))
    if isinstance(settings.critic, SeparateCritic) and settings.critic.init == "base":
        inputs["models/base"] = contracts.fingerprint(paths.base)
    if settings.critic_init == "value":
        inputs["models/value"] = contracts.fingerprint(paths.value)
    if config.has_reward_model:
        inputs["models/reward"] = contracts.fingerprint(paths.reward)
    if OPTIMIZED in reward_folders(
        settings.scorers
    ):  # a policy must not be judged by the reward it was trained on
        parents["reward"] = inputs["models/reward"]
    for name, scorer in zip(scorer_names(settings.scorers), settings.scorers, strict=True):
        if isinstance(scorer, RewardModelScorer) and scorer.path is not None:
            parents[f"reward/{name}"] = inputs[scorer.path] = contracts.fingerprint(paths.root / scorer.path)
    chosen = "the last update's weights"
    if setup.evaluator.selection_metric is not None:
        by = f"the judge {settings.select_by.judge.name}" if settings.select_by else "models/reward_heldout"
        episode = int(state.evaluation.metrics["selected_episode"])
        chosen = f"kept at episode {episode}, the best by {by} on validation prompts"
    kl = [state.evaluation.metrics[f"selected_kl{part}"] for part in ("", "_standard_error")]
    identity: dict[str, Any] = {"kind": "policy", "parents": parents, "kl": kl}
    identity["method"] = f"ppo, advantages {settings.advantages.kind}"
    # The gate promotes no policy of a dummy reward, and none that was trained as a trial.
    if all(getattr(scorer, "weight", 0) == 0 for scorer in settings.scorers):
        identity["reward"] = "none"
    if "dpo" in parents and (labeler := contracts.read_identity(paths.dpo).get("labeled_by")):
        identity["labeled_by"] = labeler
    if models := chat_models(settings.scorers):
        identity["optimized_chat_models"] = models
    if config.is_trial:
        identity["trial"] = True
    if settings.select_by is not None and isinstance(settings.select_by.judge, RewardModelJudge):
        identity["chosen_by"] = contracts.fingerprint(paths.root / settings.select_by.judge.path)
    elif settings.select_by is not None:  # a judge without weights of its own is known by its settings
        identity["chosen_by"] = settings.select_by.judge.definition
    elif config.has_reward_model:
        identity["chosen_by"] = contracts.fingerprint(paths.reward_heldout)
    if not state.sampler.is_policy:  # but a program beside this one
        identity["sampler"] = state.sampler.name
        chosen += f"; its rollouts were sampled by {state.sampler.name}"
    card = contracts.model_card(
        "PPO policy",
        task="ppo",
        parameters=config.declared,
        inputs=inputs,
        how=f"PPO from the {'DPO' if 'dpo' in parents else 'SFT'} policy; {chosen}.",
    )
    return identity, card

"""Stage ppo: models/policy, kept where its answers to validation prompts were liked best."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo, PpoView
from rlhf_tasks.config.judge import RewardModelJudge
from rlhf_tasks.data.batches import encode, load_tokenizer, read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import contracts, models, scorers
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.modeling.scorers import RewardScorer
from rlhf_tasks.ppo.loop import Loop
from rlhf_tasks.ppo.referee import Referee
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel, Reference
from rlhf_tasks.ppo.rollout import ActorCritic, ValueHead
from rlhf_tasks.ppo.trainer import Trainer, stop_token
from rlhf_tasks.ppo.watch import Watch
from rlhf_tasks.project import hashing
from rlhf_tasks.project.atomic import whole, write_json
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling, demonstrations, plain

BASE, SFT = Path("models/base"), Path("models/sft")
REWARD, HELDOUT = Path("models/reward"), Path("models/reward_heldout")
PTX_TOKENS = 256  # a row of pretraining text
OUT, LOOKED_AT = Path("models/policy"), Path("evaluation/ppo")


def run(config: PpoView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/policy and evaluation/ppo/{samples.parquet,answers.parquet,guards.json}.

    Metrics: the last update's, and which was kept.
    """
    settings: Ppo = config.ppo
    _check(config)
    rt = Runtime(config.launch, config.seed)
    referee = None if settings.select_by is None else Referee(rt, settings.select_by)
    tokenizer = load_tokenizer(SFT)
    policy, reference = _policy(rt, settings, config.seed)
    reward = models.load_reward(REWARD) if config.has_reward_model else None
    scorer = scorers.build(
        settings.scorers, tokenizer, reward_model=_frozen(rt, reward), max_tokens=settings.micro_batch_tokens
    )
    trainer = Trainer(
        rt, settings, ActorCritic(policy, _critic(config, policy, reward).to(rt.device)), reference, scorer,
        tokenizer, encode(tokenizer, [row["prompt"] for row in read_table(paths, "prompts", "train")]),
        seed=config.seed, demonstrations=_ptx_text(settings, tokenizer, policy),
    )  # fmt: skip
    heldout = _heldout(rt, config, tokenizer)
    watch = Watch(rt, settings, policy, tokenizer, scorer, heldout, referee, config.seed)
    loop = Loop(rt, config, trainer, watch, tracker)
    metrics = loop.run()
    watch.restore()
    if rt.is_main:
        _save(config, models.merged(policy), tokenizer, watch)
        _keep(watch, loop)
    rt.barrier()
    return metrics | watch.result


def _check(config: PpoView) -> None:
    """The contracts between the checkpoints and with the referee, before anything is trained; a warning."""
    for reward in (REWARD, HELDOUT) if config.has_reward_model else ():
        contracts.check_same_tokenizer(SFT, reward)
        contracts.check_parent(reward, "sft", SFT)
    settings: Ppo = config.ppo
    _check_referee(settings)
    tokenizer = load_tokenizer(SFT)
    stop = stop_token(settings, tokenizer)
    if stop >= len(tokenizer):
        raise UserError(
            f"ppo.stop_token={stop} is no token: the tokenizer has {len(tokenizer)}, numbered from 0"
        )
    if settings.truncation.startswith("bootstrap") and settings.critic_warmup is None:
        shared = settings.value_model == "shared"
        console.say(
            f"ppo.truncation={settings.truncation} rewards unfinished answers by the critic's word, and this "
            f"critic {'starts from nothing' if shared else 'was not warmed up'}: "
            f"{'take ppo.value_model: separate, and ' if shared else ''}set ppo.critic_warmup"
        )
    if settings.truncation.startswith("bootstrap") and settings.gamma == 1:
        console.say(
            f"ppo.truncation={settings.truncation} with ppo.gamma=1 leaves the worth of an answer that never "
            "ends open, and the critic may think it the best of all: set ppo.gamma below 1, say 0.99"
        )


def _check_referee(settings: Ppo) -> None:
    judge = None if settings.select_by is None else settings.select_by.judge
    if not isinstance(judge, RewardModelJudge) or not _is_rewarded(settings):
        return
    if contracts.fingerprint(Path(judge.path)) == contracts.fingerprint(REWARD):
        raise UserError(
            f"ppo.select_by: {judge.path} has the weights of models/reward, which PPO optimises; what is "
            "optimised does not choose. Give another judge, or null for models/reward_heldout"
        )


def _is_rewarded(settings: Ppo) -> bool:
    """Whether models/reward is what PPO optimises, or part of it."""
    return any(scorer.kind == "reward_model" for scorer in settings.scorers)


def _policy(rt: Runtime, settings: Ppo, seed: int) -> tuple[PreTrainedModel, Reference]:
    policy = models.place(models.load_causal(SFT), rt.device)
    if settings.gradient_checkpointing:
        _checkpoint_activations(policy)
    if settings.lora is not None:
        policy = models.with_lora(policy, settings.lora, seed=seed)
        return policy, AdapterOff(policy)
    reference = models.place(models.load_causal(SFT), rt.device)
    rt.freeze(reference)
    return policy, OwnModel(reference, moves=settings.reference_sync is not None)


def _ptx_text(
    settings: Ppo, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> LanguageModelling | None:
    """What PPO-ptx goes on to learn; None without it."""
    if settings.ptx is None:
        return None
    if settings.ptx.text is None:
        return demonstrations(Paths(), tokenizer, "train")
    try:
        text = Path(settings.ptx.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ppo.ptx.text: {settings.ptx.text!r} cannot be read ({error})") from None
    most = min(PTX_TOKENS, getattr(policy.config, "max_position_embeddings", PTX_TOKENS))
    documents = encode(tokenizer, [part.strip() for part in re.split(r"\n\s*\n", text)])
    pieces = [ids[start : start + most] for ids in documents for start in range(0, len(ids), most)]
    rows = [piece for piece in pieces if len(piece) > 1]
    if not rows:
        raise UserError(f"ppo.ptx.text: {settings.ptx.text!r} holds no text")
    return plain(rows, tokenizer.pad_token_id)


def _critic(config: PpoView, policy: PreTrainedModel, reward: TokenScores | None) -> TokenScores | ValueHead:
    """What `critic_init` says; a new head starts at zero, a trunk with the weights it comes with."""
    settings: Ppo = config.ppo
    if settings.value_model == "shared":
        return ValueHead(policy.config.hidden_size)
    if settings.critic_init == "reward":
        assert reward is not None
        critic = copy.deepcopy(reward).requires_grad_(True)
    else:
        source = SFT if settings.critic_init == "sft" else BASE
        critic = TokenScores.from_policy(source, torch.Generator().manual_seed(config.seed))
        nn.init.zeros_(models.head_of(critic.model).weight)
    if settings.gradient_checkpointing:
        _checkpoint_activations(critic.model)
    if settings.lora is not None and settings.lora.value:
        critic.model = models.with_lora(critic.model, settings.lora, seed=config.seed)
    return critic


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """`gradient_checkpointing`; transformers names it anew from 5.23 on."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _heldout(rt: Runtime, config: PpoView, tokenizer: PreTrainedTokenizerBase) -> RewardScorer | None:
    if not config.has_reward_model:
        return None
    model = models.load_reward(HELDOUT).to(rt.device).requires_grad_(False)
    return RewardScorer(model, tokenizer, config.ppo.micro_batch_tokens)


def _frozen(rt: Runtime, reward: TokenScores | None) -> TokenScores | None:
    return None if reward is None else reward.to(rt.device).requires_grad_(False)


def _save(config: PpoView, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, watch: Watch) -> None:
    parents = {"sft": contracts.fingerprint(SFT)}
    inputs = {"models/sft": parents["sft"], "data/prompts": hashing.file_hash(Path("data/prompts"))}
    if config.ppo.ptx is not None and config.ppo.ptx.text is not None:
        inputs[config.ppo.ptx.text] = hashing.file_hash(Path(config.ppo.ptx.text))
    if config.has_reward_model:
        inputs["models/reward"] = contracts.fingerprint(REWARD)
    if _is_rewarded(config.ppo):  # what the policy must not be judged by
        parents["reward"] = inputs["models/reward"]
    chosen = "the last update's weights"
    if watch.chooses is not None:
        selection = config.ppo.select_by
        by = f"the judge {selection.judge.name}" if selection else "models/reward_heldout"
        chosen = f"kept at episode {watch.episode}, the best by {by} on validation prompts"
    with whole(OUT) as folder:
        models.save(
            policy, tokenizer, folder, stop=stop_token(config.ppo, tokenizer),
            identity={"kind": "policy", "parents": parents},
            card=contracts.model_card(
                "PPO policy", task="ppo", parameters=config.declared,
                inputs=inputs,
                how=f"PPO from the SFT policy; {chosen}.",
            ),
        )  # fmt: skip


def _keep(watch: Watch, loop: Loop) -> None:
    """What was seen on the way: for the judge and the report."""
    with whole(LOOKED_AT) as folder:
        pq.write_table(pa.Table.from_pylist(watch.samples), folder / "samples.parquet")
        pq.write_table(pa.Table.from_pylist(watch.answers), folder / "answers.parquet")
        write_json(folder / "guards.json", {"trips": loop.trips if loop.watchdog else None})

"""What must hold before PPO trains: checkpoints, scorers and judges fit, and models compute right."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo, PpoView, Split
from rlhf_tasks.config.judge import Judge, RewardModelJudge
from rlhf_tasks.config.scorers import OPTIMIZED, Scorer, reward_folders
from rlhf_tasks.data import columns, positions
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import Ids, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import checks, contracts
from rlhf_tasks.models.heads import ActorCritic, TokenScores
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.verifier import Verifier
from rlhf_tasks.training.distributed import Distributed


def check(config: PpoView, paths: Paths) -> None:
    """Check the contracts between the checkpoints, the selection judge and the stop token; warn of risks.

    Raises:
        UserError: naming what does not fit.
    """
    for reward in (paths.reward, paths.reward_heldout) if config.has_reward_model else ():
        contracts.check_same_tokenizer(paths.sft, reward)
        contracts.check_parent(reward, "sft", paths.sft)
    if paths.start == paths.dpo:
        contracts.check_parent(paths.dpo, "sft", paths.sft)
    settings = config.ppo
    if settings.critic_init == "value":
        contracts.check_same_tokenizer(paths.sft, paths.value)
        contracts.check_parent(paths.value, "sft", paths.sft)
        contracts.check_parent(paths.value, "dpo", paths.start)
    _check_reward_models(config, paths)
    check_verifiers(settings.scorers, paths)
    if settings.select_by is not None:
        _check_selection_judge(settings.select_by.judge, settings.scorers, paths)
    check_stop_token(settings.stop_token, paths)
    if settings.truncation.kind.startswith("bootstrap"):
        _warn_of_bootstrapping(settings)


def _check_reward_models(config: PpoView, paths: Paths) -> None:
    """Check that the folders of `ppo.scorers` hold models, and that none has the weights of another model.

    Raises:
        UserError: naming the folder.
    """
    optimized = reward_folders(config.ppo.scorers)
    folders = [folder for folder in optimized if folder != OPTIMIZED]
    if not folders:
        return
    others = []  # the reward models of the pipeline that they must differ from
    if config.has_reward_model:
        others += [OPTIMIZED] if OPTIMIZED in optimized else []
        others.append(paths.relative(paths.reward_heldout))
    known = {contracts.fingerprint(paths.root / folder): folder for folder in others}
    for folder in folders:
        if not contracts.has_model(paths.root / folder):
            raise UserError(f"ppo.scorers: {folder} holds no model; give the folder of a reward model")
        digest = contracts.fingerprint(paths.root / folder)
        if digest in known:
            raise UserError(
                f"ppo.scorers: {folder} has the weights of {known[digest]}; name each reward model once, and "
                "none that selects or judges"
            )
        known[digest] = folder


def check_stop_token(stop: int | str, paths: Paths) -> None:
    """Check that `ppo.stop_token` is a token of the SFT model."""
    ids = load_tokenizer(paths.sft).get_vocab().values()
    if stop != "eos" and stop not in ids:
        raise UserError(
            f"ppo.stop_token={stop} is not a token: the tokenizer has {len(ids)}, ids 0 to {max(ids)}"
        )


def check_verifiers(scorers: Sequence[Scorer], paths: Paths) -> None:
    verifiers = [Verifier(one.checks, one.format) for one in scorers if one.kind == "verifier"]
    splits: tuple[Split, ...] = ("train", "validation") if verifiers else ()
    for split in splits:
        rows = read_table(paths, "prompts", split)
        for verifier in verifiers:
            verifier.check(rows, columns.of_rows(rows), f"ppo.scorers: a verifier (data/prompts, {split})")


def _check_selection_judge(judge: Judge, scorers: Sequence[Scorer], paths: Paths) -> None:
    if read_table(paths, "prompts", "validation")[0]["reference"] is None:
        raise UserError(
            "ppo.select_by compares with references, and data/prompts has prompts alone; set it to null, "
            "which keeps the last weights"
        )
    if not isinstance(judge, RewardModelJudge):
        return
    chooses = contracts.fingerprint(paths.root / judge.path)
    for folder in reward_folders(scorers):
        if contracts.fingerprint(paths.root / folder) == chooses:
            raise UserError(
                f"ppo.select_by: {judge.path} has the weights of {folder}, which PPO optimizes and which "
                "therefore must not choose; name another judge, or null for models/reward_heldout"
            )


def _warn_of_bootstrapping(settings: Ppo) -> None:
    rule = f"ppo.truncation.kind={settings.truncation.kind}"
    if getattr(settings.critic, "warmup", None) is None:
        console.say(
            f"{rule} rewards unfinished responses with the value of a critic that has not learned yet: set "
            "ppo.advantages.critic.warmup, which a critic of kind separate has"
        )
    if settings.gamma == 1:
        console.say(
            f"{rule} with ppo.advantages.gamma=1 does not determine the value of a response that never ends, "
            "and the critic may value it highest: set ppo.advantages.gamma below 1, say 0.99"
        )


def check_models(
    dist: Distributed,
    settings: Ppo,
    actor_critic: ActorCritic,
    rewards: Mapping[str, TokenScores | None],
    prompts: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Check that policy, reward models and critic compute the same numbers in every way that PPO uses.

    `rewards` are the reward models that read the policy's token ids, by folder. A small policy is written and
    read back too, by the first process: transformers writes nothing on the others. Models that are to be
    sharded are still whole, and checked one after another.

    Raises:
        UserError: naming what differs, by how much, and the likely cause.
    """
    policy, critic = actor_critic.policy, actor_critic.critic
    longest, pad = max(map(len, prompts)) + settings.response_length, tokenizer.pad_token_id
    positions.check(policy.config, longest, "models/sft")
    queries = checks.pick_prompts(prompts)
    saves = dist.is_main and sum(p.numel() for p in policy.parameters()) <= checks.SMALL
    if (checked := dist.to_check(policy)) is not None:
        results = checks.check_policy(
            checked,
            queries,
            pad=pad,
            temperature=settings.temperature,
            num_new=settings.response_length,
            saves=saves,
        )
        checks.require(results, "models/sft")
    del checked  # which may be a copy on the GPU
    gc.collect()  # one that recomputes its activations is in a cycle
    rows = checks.add_responses(queries, settings.response_length)
    adds_eos = settings.stop_token not in ("eos", *tokenizer.added_tokens_decoder)  # see `close_responses`
    for name, model in {**rewards, "the critic": critic}.items():
        if isinstance(model, TokenScores):
            positions.check(model.model.config, longest + int(adds_eos and model is not critic), name)
            if (scores := dist.to_check(model)) is not None:
                checks.require(checks.check_scores(scores, rows, pad=pad), name)
            del scores
            gc.collect()

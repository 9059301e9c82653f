"""Stage value: the critic that PPO starts from, where `ppo.advantages.critic.init` is `value`.

It is trained on Monte Carlo returns of the model that PPO starts from, models/sft or models/dpo. It is PPO's
reference too: at the start the KL is 0, so that a return is the score alone. So runs of PPO with another KL
penalty share the critic.
VC-PPO, arXiv 2503.01491, section 4.1.

n prompts · k responses to each.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Split, ValueView
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table, token_ids
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal, load_reward, recompute_activations
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.sampling import BATCH_SIZE
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.ppo import preconditions
from rlhf_tasks.ppo.critic import new_critic
from rlhf_tasks.ppo.measure import score_ends, score_on_all_ranks
from rlhf_tasks.ppo.metrics import prompt_share
from rlhf_tasks.ppo.rewards import ScoreScaler
from rlhf_tasks.ppo.rollout import Prompts
from rlhf_tasks.ppo.sampler import LocalSampler
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import build as build_scorers
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import evaluate, save, save_nothing, train
from rlhf_tasks.training.tasks import EXPLAINED, ValueTargets
from rlhf_tasks.training.throughput import pass_flops

HELD_OUT_SHARE = 4  # train prompts to one validation prompt
WHY_NONE = (
    "`ppo.advantages.critic.init` of params.yaml is not `value`: PPO's critic, if there is one, starts "
    "elsewhere."
)


def run(config: ValueView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/value, the weights of the lowest loss on responses to validation prompts.

    Reads data/prompts, models/sft, the model of `value.init`, and what the scorers of `ppo.scorers` name.
    Metrics on those responses: the explained variance, also at the first, middle and last token, and the
    share of the outcomes' variance that lies between prompts. Where no critic is made there are none, and the
    folder holds only a README.
    """
    dist, settings = Distributed(config.launch, config.seed), config.value
    if config.critic_init != "value" or not config.train_ppo:
        save_nothing(dist, paths.value, "No critic", WHY_NONE)
        return {}

    # 1. Responses of the model that PPO starts from, and their outcomes.
    preconditions.check_stop_token(config.stop_token, paths)
    preconditions.check_verifiers(config.scorers, paths)
    if config.has_reward_model:
        contracts.check_same_tokenizer(paths.sft, paths.reward)
        contracts.check_parent(paths.reward, "sft", paths.sft)
    tokenizer = load_tokenizer(paths.sft)
    targets = _collect_targets(dist, config, paths, tokenizer)

    # 2. The critic, trained until it explains no more of the held-out returns.
    critic = new_critic(paths, settings.init, config.seed)
    if settings.init != "reward":  # a head that starts at zero: it begins at the mean outcome
        critic.set_mean(-float(targets["train"].outcomes.mean()))
    if config.gradient_checkpointing:
        recompute_activations(critic.model)
    if settings.lora is not None:
        critic.model = add_lora(critic.model, settings.lora, seed=config.seed)
    with checkpoint.open_snapshots(dist, paths, config, "value") as snapshots:
        state = train(
            dist,
            critic,
            targets["train"],
            settings,
            seed=config.seed,
            name="value",
            tracker=tracker,
            snapshots=snapshots,
            validation=targets["validation"],
            num_evaluations=settings.num_epochs * settings.evals_per_epoch,
            patience=settings.patience,
        )

    # 3. Its metrics, and the checkpoint.
    metrics = evaluate(dist, critic, targets["validation"], TokenBudget(settings.micro_batch_tokens))
    share, low, high = prompt_share(targets["validation"].outcomes, settings.samples_per_prompt)
    metrics |= {"prompt_share": share, "prompt_share/low": low, "prompt_share/high": high}
    if metrics[EXPLAINED] <= 0:
        console.say(
            f"the critic explains nothing of the held-out returns ({metrics[EXPLAINED]:.3f}), and would add "
            "noise: raise value.num_prompts or value.num_epochs, or change value.learning_rate"
        )
    metrics |= {"steps_trained": state.step, "step_kept": state.best_step}
    num_tokens = sum(sum(task.sizes) for task in targets.values())  # sampled by a model like the critic
    metrics["compute/forward_tflop"] = 1e-12 * pass_flops(critic) * num_tokens
    parents = {"sft": contracts.fingerprint(paths.sft)}
    inputs = {"models/sft": parents["sft"], "data/prompts": hashing.file_hash(paths.rows("prompts"))}
    if paths.start == paths.dpo:
        parents["dpo"] = inputs["models/dpo"] = contracts.fingerprint(paths.dpo)
    if config.has_reward_model:
        inputs["models/reward"] = contracts.fingerprint(paths.reward)
    card = contracts.model_card(
        "Critic",
        task="value-model",
        parameters=config.declared,
        inputs=inputs,
        how="The value of every state of a response: the outcome that the "
        f"{'DPO' if 'dpo' in parents else 'SFT'} policy reaches from there, trained on Monte Carlo returns "
        "to the minimum on validation prompts; PPO's critic starts from it.",
    )
    save(dist, critic.model, tokenizer, paths.value, contracts.identity("value", parents), card)
    return metrics


def _collect_targets(
    dist: Distributed, config: ValueView, paths: Paths, tokenizer: PreTrainedTokenizerBase
) -> dict[Split, ValueTargets]:
    """Responses of PPO's start and their outcomes, for both splits from one generator of random numbers.

    Raises:
        UserError: if there are fewer prompts than processes, or all responses have one score.
    """
    settings, policy = config.value, load_causal(paths.start)
    ends = ends_of(policy, tokenizer, [config.stop_token])
    dist.freeze(policy)
    reward = load_reward(paths.reward).requires_grad_(False) if config.has_reward_model else None
    if reward is not None:
        dist.put(reward)
    splits: tuple[Split, Split] = ("train", "validation")
    prompts = {split: _choose_prompts(dist, paths, config, split) for split in splits}
    scorers = build_scorers(
        config.scorers,
        tokenizer,
        reward_model=reward,
        max_tokens=settings.micro_batch_tokens,
        root=paths.root,
        placement=dist,
        columns=prompts["train"].columns,
    )
    sampler = LocalSampler(
        dist,
        policy,
        torch.Generator(dist.device).manual_seed(config.seed),
        num_samples=settings.samples_per_prompt,
        batch_size=BATCH_SIZE,
        temperature=config.temperature,
        max_new_tokens=config.response_length,
        pad=tokenizer.pad_token_id,
        ends=ends,
    )
    scaler, targets = ScoreScaler(config.score_scaling), dict[Split, ValueTargets]()
    for split, one_each in prompts.items():
        with console.part(f"responses to {split} prompts"):
            responses = sampler.sample(one_each.queries, 0).responses
        rows = one_each.repeat(settings.samples_per_prompt)
        scores = scorers.total(score_on_all_ranks(dist, scorers.parts, rows, responses, tokenizer, ends))
        outcomes = score_ends(scaler(scores), responses, ends, config.truncation)
        if bool(outcomes.min() == outcomes.max()):
            raise UserError(
                f"all {len(responses)} responses to {split} prompts have one score, {float(outcomes[0]):g}: "
                "a critic has nothing to learn; use other scorers, or another ppo.advantages.critic.init"
            )
        targets[split] = ValueTargets(
            rows.queries, responses, outcomes, config.gamma, tokenizer.pad_token_id, split == "validation"
        )
    return targets


def _choose_prompts(dist: Distributed, paths: Paths, config: ValueView, split: Split) -> Prompts:
    """Random prompts, a multiple of the processes; of validation a quarter as many as of training."""
    rows, count = read_table(paths, "prompts", split), config.value.num_prompts
    count = min(len(rows), count if split == "train" else -(-count // HELD_OUT_SHARE))
    if not (count := count - count % dist.world_size):
        raise UserError(
            f"stage value has fewer {split} prompts than processes; raise value.num_prompts, give more data, "
            "or lower launch.num_processes"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))
    rows, tokenizer = rows.take(order[:count].sort().values.numpy()), load_tokenizer(paths.sft)
    return Prompts(rows.texts("prompt"), token_ids(tokenizer, rows)[0], columns.of_rows(rows))

"""The section `ppo`. The names of the parameters are those of the papers.

Alternatives are sections of several kinds (`advantages: {kind: gae, lam: 0.95}`): each kind has only the keys
that mean something for it. An optional feature is a section that is null when it is off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlhf_tasks.config import types as t
from rlhf_tasks.config.judge import Selection, optimized_by
from rlhf_tasks.config.scorers import RewardModelScorer, Scorer, conflicts
from rlhf_tasks.config.types import Section

BENDING = ("top_k", "top_p", "min_p", "min_length", "min_new_tokens", "repetition_penalty", "num_beams")
LOWEST_TEMPERATURE = 0.01  # vLLM samples at this temperature where a lower one is given
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean, per step


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on every linear layer that can learn by one, but the head.

    They are merged into the weights when the model is saved.
    """

    r: t.Width = 16
    """Rank of the adapters."""
    alpha: t.PositiveFloat = 32.0
    """Scale of the adapters: they are multiplied by alpha / r."""


# ------------------------------------------------------------------------------------------- critic


class CriticWarmup(Section):
    """The critic trains alone at first, on rollouts of the frozen policy, until its loss levels off."""

    max_updates: t.PositiveInt = 20
    """Largest number of warm-up updates."""
    settled: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The warm-up ends when two updates in a row lower the value loss by less than this share."""


class ValueLoss(Section):
    """The loss of a critic."""

    vf_coef: t.NonNegativeFloat = 0.1
    """Weight of the value loss."""
    cliprange_value: t.PositiveFloat | None = 0.2
    """Clip range of a value around its value in the rollout; null: no clipping."""


class SeparateCritic(ValueLoss):
    """A model of its own."""

    kind: Literal["separate"] = "separate"
    init: Literal["reward", "sft", "base", "value"] = "reward"
    """Initial weights: the reward model, the SFT model, the base model, or the critic that stage value has
    trained on returns of the SFT model (section `value`)."""
    learning_rate: t.PositiveFloat | None = None
    """Peak learning rate of the critic; null: the same as the policy's."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Shape of the critic's learning rate, without a warm-up; null: the policy's, with its warm-up."""
    adam_eps: t.PositiveFloat | None = None
    """AdamW's eps for the critic; null: 1e-5, as for the policy. Above the RMS of a gradient it slows the
    weights down: of a new head the trunk's is 1e-7 to 1e-6."""
    max_grad_norm: t.PositiveFloat | None = None
    """Largest L2 norm of the critic's gradient alone; null: `ppo.max_grad_norm` for policy and critic
    together, in further `steps` for the critic."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 1
    """Optimizer steps of the critic on each minibatch, of which the policy takes the first with it. With
    several processes each of them costs a pass of the policy too."""
    warmup: CriticWarmup | None = None
    """Training of the critic alone before the first update; null: none."""
    lora: Lora | None = None
    """Low-rank adapters for the critic; null: full training."""

    def problems(self) -> Iterator[str]:
        if self.warmup is not None and self.vf_coef == 0:
            yield "warmup: with vf_coef=0 the critic learns nothing; raise vf_coef, or set warmup to null"
        if self.steps > 1 and self.vf_coef == 0:
            yield "steps: with vf_coef=0 the critic learns nothing; raise vf_coef, or set steps to 1"
        if self.warmup is not None and self.init == "value":
            yield "warmup: init=value is a critic that was trained alone; set warmup to null"


class SharedCritic(ValueLoss):
    """A value head on the policy's own trunk."""

    kind: Literal["shared"] = "shared"


Critic = Annotated[SeparateCritic | SharedCritic, Field(discriminator="kind")]

# --------------------------------------------------------------------------------------- advantages


class Gae(Section):
    """Generalized advantage estimation (arXiv 1506.02438) with a critic."""

    kind: Literal["gae"] = "gae"
    gamma: t.Fraction = 1.0
    """Discount γ of rewards; below 1 if `truncation` bootstraps: with 1 an endless response has any value."""
    lam: t.Fraction = 0.95
    """λ of generalized advantage estimation; a lower value gives less variance and more bias."""
    lam_value: t.Fraction | None = None
    """λ of the returns that the critic learns; 1: Monte Carlo returns, which its own errors do not enter
    (arXiv 2503.01491); null: lam."""
    lam_length: t.PositiveFloat | None = None
    """α of a λ of the advantages that grows with the response's length l: 1 − 1/(α·l), at least 0
    (arXiv 2504.05118, where α is 0.05), while lam is that of the critic's returns; null: lam for both."""
    fallback: Literal["batch", "group"] | None = None
    """Baseline of a rollout in which the critic explains no variance of the Monte Carlo returns: their mean
    over the `batch`, or over the other responses to the prompt (`group`), as without a critic; null: the
    critic's values whatever they explain."""
    whiten_rewards: bool = False
    """Whether token rewards are scaled to variance 1, their mean unchanged."""
    samples_per_prompt: t.PositiveInt = 1
    """Responses to each prompt of a rollout."""
    critic: Critic = SeparateCritic()
    """Model of the values."""

    def problems(self) -> Iterator[str]:
        if self.fallback == "group" and self.samples_per_prompt == 1:
            yield "fallback=group compares responses to one prompt; raise samples_per_prompt, or set batch"


class Group(Section):
    """A response's return against those of the other responses to its prompt, without a critic."""

    kind: Literal["rloo", "group"]
    """`rloo`: minus the mean of the others (arXiv 2402.14740); `group`: minus the mean of all, in standard
    deviations, as GRPO does (arXiv 2402.03300)."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=2**20)] = 4
    """Responses to each prompt of a rollout."""


class OwnEstimator(Section):
    """A Python function that estimates advantages and returns."""

    kind: Literal["function"] = "function"
    function: t.ImportPath
    """`module:function`, with the signature of the built-in estimators."""
    samples_per_prompt: t.PositiveInt = 1
    """Responses to each prompt of a rollout."""
    gamma: t.Fraction = 1.0
    """Discount γ of future rewards."""
    whiten_rewards: bool = False
    """Whether token rewards are scaled to variance 1, their mean unchanged."""
    critic: Critic | None = None
    """Model of the values; null: the function needs none."""


Advantages = Annotated[Gae | Group | OwnEstimator, Field(discriminator="kind")]

# ------------------------------------------------------------------------------- responses and scores


class EosTrickReplace(Section):
    """A response without the stop token gets a fixed score."""

    kind: Literal["eos_trick_replace"] = "eos_trick_replace"
    missing_eos_score: t.FiniteFloat = -1.0
    """Score in place of the response's own."""


class EosTrickSubtract(Section):
    """A response without the stop token gets a penalty beside its score."""

    kind: Literal["eos_trick_subtract"] = "eos_trick_subtract"
    missing_eos_score: Annotated[float, Field(le=0, allow_inf_nan=False)] = -1.0
    """Penalty that is added to the score; a positive one would reward unfinished responses."""


class NoEosTrick(Section):
    """A response without the stop token has no fixed score."""

    missing_eos_score: ClassVar[float] = 0.0  # which only the two EOS tricks use
    kind: Literal["none", "bootstrap", "bootstrap_add"]
    """`none`: it keeps its score; `bootstrap`: γ·V of the last state replaces the score; `bootstrap_add`: γ·V
    is added to it."""


Truncation = Annotated[EosTrickReplace | EosTrickSubtract | NoEosTrick, Field(discriminator="kind")]


def _loopback_url(value: str) -> str:
    if not re.fullmatch(r"http://(127\.0\.0\.1|localhost|\[::1\]):\d{1,5}/?", value):
        raise ValueError(
            f"{value!r} is not the address of a server on this machine, such as http://127.0.0.1:8000; "
            "whoever reaches the server can replace its weights, so that PPO uses loopback only"
        )
    _ = urlsplit(value).port  # which raises for one that cannot be
    return value.rstrip("/")


class PolicySampler(Section):
    """The stage samples the responses itself, exactly."""

    kind: Literal["policy"] = "policy"
    batch_size: t.PositiveInt | None = None
    """Responses that a process samples at the same time; null: its whole share of the rollout."""


class VllmSampler(Section):
    """A vLLM server, version 0.32 or newer in development mode, that samples rollouts and evaluations. With
    several processes the first one starts it and talks to it."""

    kind: Literal["vllm"] = "vllm"
    url: Annotated[str, AfterValidator(_loopback_url)] | None = None
    """Address of a running server on this machine; null: the stage starts the server and ends it."""
    command: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Words that start the server, such as `[/opt/vllm/bin/vllm, serve]`; the stage adds the folder of the
    weights and its options; null: there is a `url`."""
    weights_folder: str | None = None
    """Folder, on a disk that the server reads too, for each version of the weights; null: .rlhf/vllm."""
    sleep: bool = False
    """Whether the server frees its GPU while the policy trains, by vLLM's sleep mode: one GPU for both."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    """Cap of the importance weights π_old/π_sampler on each token's policy loss; null: no weights."""
    max_logprob_diff: t.PositiveFloat = 0.1
    """Mean |log π_old − log π_sampler| of the same weights, in nats per token, above which the stage ends."""
    start_seconds: t.PositiveFloat = 600.0
    """Longest wait for the start of the server, in seconds."""
    timeout_seconds: t.PositiveFloat = 600.0
    """Longest wait for one rollout or evaluation, or for the server to load weights, in seconds."""

    def problems(self) -> Iterator[str]:
        if (self.url is None) == (self.command is None):
            yield "give either `url`, of a server that runs, or `command`, which starts one"


Sampler = Annotated[PolicySampler | VllmSampler, Field(discriminator="kind")]


class ScoreScaling(Section):
    """Scores are divided by their running standard deviation, then clipped: PPO-max, eq. 18."""

    subtract_mean: bool = True
    """Whether the running mean is subtracted first."""
    clip: t.PositiveFloat | None = 0.8
    """Largest absolute value of a scaled score, in standard deviations; null: no clipping."""


# ------------------------------------------------------------------------------------------------ KL


class InReward(Section):
    """The KL penalty is part of each token's reward."""

    kind: Literal["in_reward"] = "in_reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of a token's KL: `k1` = log π/π_ref, `k2` = ½·k1², `k3` = π_ref/π − 1 + k1."""


class InLoss(Section):
    """The KL penalty is a term of the loss; `k1` is not offered, because its expected gradient is zero."""

    kind: Literal["in_loss"] = "in_loss"
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of a token's KL: `k2` = ½·(log π/π_ref)², `k3` = π_ref/π − 1 + log π/π_ref."""


Kl = Annotated[InReward | InLoss, Field(discriminator="kind")]


class AdaptiveKl(Section):
    """kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±clip) · episodes / horizon).

    Ziegler et al. 2019, 2.2.
    """

    target: t.PositiveFloat = 6.0
    """KL that the controller aims at, in nats per response."""
    horizon: t.PositiveInt = 10_000
    """Episodes over which the correction is spread."""
    clip: t.PositiveFloat = 0.2
    """Largest relative error KL / target − 1 that counts."""


class KlPenalty(Section):
    """PPO-penalty in addition to the clip: + beta · KL(π_old ‖ π) in the loss.

    beta doubles above 1.5 · target and halves below target / 1.5: Schulman et al. 2017, eq. 8.
    """

    beta: t.PositiveFloat = 1.0
    """Weight of the penalty in the first update."""
    target: t.PositiveFloat = 0.01
    """KL that beta aims at, in nats per token."""


class ReferenceSync(Section):
    """The reference model follows the policy: ref ← (1 − alpha) · ref + alpha · policy."""

    every: t.PositiveInt = 512
    """Number of updates between two steps of the reference."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the policy's weights in the new reference."""


# ------------------------------------------------------------------------------------ loss and guards


class Constant(Section):
    """The sum over the tokens of a minibatch, divided by its number of responses and by a constant."""

    constant: t.PositiveInt
    """Number of tokens by which the sum over a response is divided, such as response_length."""


class Ptx(Section):
    """InstructGPT's PPO-ptx: + coef · language-model loss on other text, as many rows as a minibatch has."""

    coef: t.PositiveFloat = 0.1
    """Weight of the language-model loss."""
    text: str | None = None
    """File of pretraining text with an empty line between documents; null: the demonstrations."""


class Guards(Section):
    """Checks of the metrics after each update."""

    action: Literal["warn", "stop", "raise_kl"] = "stop"
    """What a trip does: print a warning, stop the stage, or multiply kl_coef and continue (`raise_kl`). NaN
    and infinity stop the stage whatever it is."""
    kl_min: t.FiniteFloat = 0.0
    """Smallest objective/kl_k1, in nats per response; two standard errors below it are allowed."""
    kl_max: t.PositiveFloat = 10.0
    """Largest objective/kl_k1, in nats per response."""
    gap_max: t.PositiveFloat | None = None
    """Largest eval/standardized_gap between the optimized and the held-out reward, in standard deviations, at
    each evaluation (`num_selections`); null: no check."""
    ratio_min: t.PositiveFloat = 0.1
    """Smallest mean probability ratio, val/ratio."""
    ratio_max: t.PositiveFloat = 2.0
    """Largest mean probability ratio, val/ratio."""
    perplexity_min: t.PositiveFloat = 1.02
    """Smallest objective/perplexity while length or repetition rises."""
    eos_share_min: t.Fraction = 0.5
    """Smallest share of responses that end, relative to the best so far; two standard errors are allowed."""
    patience: t.PositiveInt = 3
    """Updates in a row outside a limit after which the guard trips; NaN, infinity and gap_max trip at
    once."""
    kl_coef_factor: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which kl_coef grows at each trip with `raise_kl`."""

    def problems(self) -> Iterator[str]:
        if self.kl_min >= self.kl_max or self.ratio_min >= self.ratio_max:
            yield "kl_min and ratio_min must be below kl_max and ratio_max"


def _word_or_constant(value: Any) -> Any:
    if value in ("token_mean", "response_mean") or isinstance(value, Mapping | Constant):
        return value
    raise ValueError("must be token_mean, response_mean or {constant: 32}")


def _eos_or_id(value: Any) -> Any:
    if value == "eos" or (type(value) is int and value >= 0):
        return value
    raise ValueError("must be `eos`, or the id of a token: a whole number from 0")


class Ppo(Section):
    """PPO training of the policy. An episode is one prompt with one sampled response."""

    train: bool = True
    """Whether PPO trains; false: models/policy is the policy of stage dpo."""
    total_episodes: t.PositiveInt = 8192
    """Episodes of the whole training; only whole updates are taken."""
    rollout_batch_size: t.BatchSize = 256
    """Episodes per update, over all processes."""
    num_mini_batches: t.BatchSize = 4
    """Optimizer steps per epoch."""
    num_ppo_epochs: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Passes over the rollout in each update."""
    micro_batch_tokens: t.MicroBatchTokens = t.AUTO
    """Maximum padded tokens per micro-batch and rank; `auto`: by the model (a hub id counts as one of eight
    billion parameters) and the memory of the device, at most 4,096 on a CPU."""

    scorers: Annotated[tuple[Scorer, ...], t.at_least_one("{kind: dummy}")] = Field(
        default=(RewardModelScorer(kind="reward_model"),), strict=False
    )
    """List of scorers by kind; their scores are added up by weight."""
    score_scaling: ScoreScaling | None = None
    """Division of the scores by their running standard deviation; null: raw scores."""

    learning_rate: t.PositiveFloat = 4e-4
    """Peak learning rate of AdamW for the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` fall to zero."""
    warmup_fraction: t.Fraction = 0.0
    """Share of the updates in which the learning rate rises linearly from zero."""
    adam_betas: tuple[Decay, Decay] = Field(default=(0.9, 0.98), strict=False)
    """Decays of AdamW's two moments; its eps is 1e-5."""
    max_grad_norm: t.PositiveFloat | None = 1.0
    """Largest L2 norm of the gradient of policy and critic together; a larger one is scaled down, so that a
    large value loss shortens the policy's step too; null: no clipping."""
    lora: Lora | None = None
    """Low-rank adapters for the policy, for about ten times the learning rate; null: full training."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass, to save memory."""

    response_length: t.Tokens = 32
    """Longest response, in tokens, stop token included."""
    temperature: t.PositiveFloat = 1.0
    """Sampling temperature; all log-probabilities use it too."""
    stop_token: Annotated[Literal["eos"] | int, BeforeValidator(_eos_or_id)] = "eos"
    """Token that ends a response besides EOS, the ids of the generation config and the end of a turn in the
    chat template: its id, or `eos` for none."""
    sampler: Sampler = PolicySampler()
    """Where responses come from: the policy in this stage, or a server."""
    truncation: Truncation = EosTrickReplace()
    """Score of a response without the stop token."""

    kl_coef: t.NonNegativeFloat = 0.03
    """Weight of the KL penalty, in score units per nat; 0: no penalty."""
    kl: Kl = InReward()
    """Place of the KL penalty, and its estimator."""
    adaptive_kl: AdaptiveKl | None = None
    """Controller that adapts kl_coef to a KL target; null: kl_coef is constant."""
    kl_penalty: KlPenalty | None = None
    """Penalty on the KL from the policy of the rollout; null: no penalty."""
    target_kl: t.PositiveFloat | None = None
    """`policy/approxkl_avg` of an epoch, in nats per token, above which no epoch follows; null: no limit."""
    reference_sync: ReferenceSync | None = None
    """Movement of the reference toward the policy; null: the reference is fixed."""
    ratio_from: Literal["rollout", "reference"] = "rollout"
    """Denominator of the probability ratio: the policy of the rollout, or the reference."""

    advantages: Advantages = Gae()
    """Estimator of the advantages, with its critic if it needs one."""
    whiten_advantages: bool = True
    """Whether advantages are shifted and scaled to mean 0 and variance 1."""
    advantage_clip: t.PositiveFloat | None = None
    """Largest absolute advantage, after whitening; null: no clipping."""

    loss: Annotated[str, t.import_path("ppo_clip")] = "ppo_clip"
    """Loss of each token: `ppo_clip`, or a function of yours as `module:function` with the same signature."""
    loss_reduction: Annotated[
        Literal["token_mean", "response_mean"] | Constant,
        BeforeValidator(_word_or_constant),
    ] = "token_mean"
    """How the tokens' losses become one number: the mean over all tokens of the minibatch (`token_mean`), or
    over responses, of each one's mean (`response_mean`) or of its sum divided by `{constant: 32}`."""
    skip_equal_groups: bool = False
    """Whether no loss reads the responses to a prompt that all have the same score, so that means are over
    the others alone (DAPO's dynamic sampling, arXiv 2503.14476, without further samples)."""
    skip_truncated: bool = False
    """Whether no loss reads a response without the stop token (DAPO's overlong filtering), so that means are
    over the others alone; its score still counts in the mean of its group."""
    cliprange: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip range ε of the probability ratio: 1 − ε to 1 + ε."""
    cliprange_high: t.PositiveFloat | None = None
    """Clip range above 1; null: the same as cliprange."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of a token with advantage A < 0: dual_clip · |A| (arXiv 1912.09729); null: none."""
    entropy_coef: t.NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: no bonus."""
    ptx: Ptx | None = None
    """Language-model loss on other text beside PPO's (PPO-ptx); null: no such loss."""

    guards: Guards | None = Guards()
    """Checks that warn, stop or raise the KL coefficient; null: no checks."""

    num_sample_generations: t.Count = 10
    """Times that responses to validation prompts are shown and stored, evenly from start to end, with
    rollouts of the same updates; 1: at the end."""
    num_selections: t.PositiveInt = 4
    """Number of evaluations of the policy on the selection prompts, besides the one before training; the best
    weights are kept."""
    audit_prompts: t.Count = 32
    """Number of validation prompts at which trivial responses are scored before training, to see what they
    would earn; 0: none."""
    num_selection_prompts: t.PositiveInt = 256
    """Number of selection prompts, taken from the validation split."""
    select_by: Selection | None = None
    """Judge whose win rate over the references selects the weights; null: models/reward_heldout selects them
    by its mean score, and without a reward model the last weights are kept."""

    @property
    def critic(self) -> SeparateCritic | SharedCritic | None:
        """The section of the critic; None for an estimator without one."""
        return getattr(self.advantages, "critic", None)

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt of a rollout."""
        return self.advantages.samples_per_prompt

    @property
    def critic_init(self) -> str | None:
        """What a critic of its own starts from; None without one."""
        return getattr(self.critic, "init", None)

    @property
    def falls_back(self) -> bool:
        """Whether another baseline takes the place of a critic that explains nothing."""
        return getattr(self.advantages, "fallback", None) is not None

    @property
    def gamma(self) -> float:
        """Discount of future rewards; 1 for an estimator that compares whole responses."""
        return 1.0 if isinstance(self.advantages, Group) else self.advantages.gamma

    @property
    def whiten_rewards(self) -> bool:
        """Whether token rewards are scaled to variance 1."""
        return not isinstance(self.advantages, Group) and self.advantages.whiten_rewards

    @model_validator(mode="before")
    @classmethod
    def _samples_purely(cls, values: Any) -> Any:
        given = [key for key in BENDING if isinstance(values, Mapping) and key in values]
        if given:
            raise ValueError(
                f"{', '.join(given)}: not supported, because responses would come from another distribution "
                "than the log-probabilities, which makes the KL estimate negative; remove it, only "
                "`temperature` changes sampling"
            )
        return values

    def problems(self) -> Iterator[str]:
        yield from self._size_problems()
        yield from self._kl_problems()
        yield from self._sampler_problems()
        yield from self._skip_problems()
        yield from conflicts(self.scorers, self.response_length)
        if self.truncation.kind.startswith("bootstrap") and self.critic is None:
            yield (
                f"truncation.kind={self.truncation.kind} needs the value of a critic, and advantages.kind="
                f"{self.advantages.kind} has none; set it to eos_trick_replace, eos_trick_subtract or none"
            )
        if self.falls_back and (self.gamma < 1 or self.truncation.kind.startswith("bootstrap")):
            yield (
                "advantages.fallback compares the scores of whole responses; set advantages.gamma to 1, and "
                "truncation.kind to eos_trick_replace, eos_trick_subtract or none, or fallback to null"
            )
        if self.critic_init == "value" and (
            self.whiten_rewards or self.truncation.kind.startswith("bootstrap")
        ):
            yield (
                "advantages.critic.init=value: the returns are known before PPO only without whiten_rewards, "
                "and where the truncation rule gives every response a score; set whiten_rewards to false and "
                "truncation.kind to eos_trick_replace, eos_trick_subtract or none"
            )
        if self.select_by is not None and (name := optimized_by(self.scorers, self.select_by.judge)):
            yield f"select_by: {name} is also a scorer, and PPO does not select by what it optimizes"

    def _skip_problems(self) -> Iterator[str]:
        """Responses that are left out, and what would need them."""
        if self.skip_equal_groups and self.samples_per_prompt == 1:
            yield (
                "skip_equal_groups compares the responses to one prompt, and advantages.samples_per_prompt "
                "is 1; raise it, or set skip_equal_groups to false"
            )
        elif self.skip_equal_groups and self.critic is not None:
            yield (
                "skip_equal_groups: with a critic the responses of such a group have advantages too; set "
                "advantages.kind to rloo or group, or skip_equal_groups to false"
            )
        if self.skip_truncated and self.truncation.kind.startswith("bootstrap"):
            yield (
                f"skip_truncated leaves out what truncation.kind={self.truncation.kind} is for; set that to "
                "eos_trick_replace, eos_trick_subtract or none, or skip_truncated to false"
            )

    def _size_problems(self) -> Iterator[str]:
        """Sizes that do not divide each other, and values that need more optimizer steps."""
        size, samples = self.rollout_batch_size, self.samples_per_prompt
        if size % self.num_mini_batches:
            yield f"rollout_batch_size={size} is not divisible by num_mini_batches={self.num_mini_batches}"
        if size % samples:
            yield f"rollout_batch_size={size} is not divisible by advantages.samples_per_prompt={samples}"
        if self.total_episodes < size:
            yield f"total_episodes={self.total_episodes} is less than one rollout of {size}; raise it"
        if self.target_kl is not None and self.num_ppo_epochs == 1:
            yield "target_kl ends the epochs, and num_ppo_epochs=1 has no further one; set target_kl to null"
        if self.kl_penalty is not None and self.num_ppo_epochs * self.num_mini_batches == 1:
            yield "kl_penalty: its gradient is zero at the only optimizer step; use more minibatches"

    def _kl_problems(self) -> Iterator[str]:
        """Values of the penalty and of the reference."""
        adaptive, sync, is_zero = self.adaptive_kl, self.reference_sync, self.kl_coef == 0
        if self.kl.kind == "in_loss" and is_zero and adaptive is None:
            yield "kl.kind=in_loss with kl_coef=0 is no penalty at all; raise kl_coef, or set it to in_reward"
        if adaptive is not None and is_zero:
            yield "adaptive_kl multiplies kl_coef, and kl_coef=0 would stay 0; set it to a small value"
        if self.guards is not None and self.guards.action == "raise_kl" and is_zero:
            yield "guards.action=raise_kl multiplies kl_coef, and kl_coef=0 would stay 0; raise it"
        if adaptive is not None and self.rollout_batch_size * adaptive.clip >= adaptive.horizon:
            yield "adaptive_kl.horizon must exceed rollout_batch_size · clip: kl_coef would turn negative"
        if sync is not None and sync.every > self.total_episodes // self.rollout_batch_size:
            yield "reference_sync.every exceeds the number of updates, so it would never happen; lower it"
        if sync is not None and self.lora is not None:
            yield "lora: the reference is the policy without its adapter; set reference_sync to null"

    def _sampler_problems(self) -> Iterator[str]:
        """What a server cannot follow, or what would have no effect beside it."""
        if self.sampler.kind == "policy":
            return
        if self.temperature < LOWEST_TEMPERATURE:
            yield f"sampler: vLLM samples at a temperature of at least {LOWEST_TEMPERATURE}; raise it"
        if self.ratio_from == "reference":
            yield "sampler: its importance weights are for ratios to the rollout; set ratio_from to rollout"

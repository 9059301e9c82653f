"""The section `ppo`. The names of the parameters are those of the papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_tasks.config.critic import critic_conflicts
from rlhf_tasks.config.engine import Engine, engine_conflicts
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.config.ppo_options import (
    AdaptiveKl,
    CriticWarmup,
    Guards,
    KlPenalty,
    PolicyLora,
    Ptx,
    ReferenceSync,
    ScoreScaling,
)
from rlhf_tasks.config.scorers import Combination, Scorer, conflicts, reward_folders
from rlhf_tasks.config.types import (
    BatchSize,
    Between,
    Count,
    Decay,
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NumTokens,
    PositiveFloat,
    PositiveInt,
    Section,
)

BENDING = ("top_k", "top_p", "min_p", "min_length", "min_new_tokens", "repetition_penalty", "num_beams")


def _eos_or_id(value: Any) -> Any:
    if value == "eos" or (type(value) is int and value >= 0):
        return value
    raise ValueError("must be `eos`, or the id of a token: a whole number from 0")


StopToken = Annotated[Literal["eos"] | int, BeforeValidator(_eos_or_id)]


class Ppo(Section):
    """PPO training of the policy. An episode is one prompt with one sampled response."""

    total_episodes: PositiveInt
    """Episodes of the whole training; only whole updates are taken."""
    rollout_batch_size: BatchSize
    """Episodes per update, over all processes."""
    num_mini_batches: BatchSize
    """Optimiser steps per epoch."""
    num_ppo_epochs: Annotated[int, Between(1, 10_000)]
    """Passes over the rollout in each update."""
    micro_batch_tokens: PositiveInt
    """Most padded tokens per forward pass and process."""

    scorers: tuple[Scorer, ...] = Field(strict=False)
    """List of scorers by kind; their scores are added up by weight."""
    combine_reward_models: Combination
    """What the weighted scores of several reward models become: their `sum`, their minimum (`min`), or their
    mean minus a multiple of their standard deviation (`{mean_minus_deviations: 1.0}`). Other scorers are
    added to it."""

    learning_rate: PositiveFloat
    """Highest learning rate of AdamW for the policy."""
    value_learning_rate: PositiveFloat | None
    """Highest learning rate for the critic; null: the same as the policy's."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after the warm-up; `linear` and `cosine` fall to zero."""
    warmup_fraction: Fraction
    """Share of the updates in which the learning rate rises linearly from zero."""
    adam_betas: tuple[Decay, Decay] = Field(strict=False)
    """Decays of AdamW's two moments; its eps is 1e-5."""
    max_grad_norm: PositiveFloat | None
    """Largest L2 norm of a gradient; a larger one is scaled down; null: no clipping."""

    value_model: Literal["separate", "shared"] | None
    """The critic: a separate model, or a value head on the policy's own trunk; null: no critic."""
    critic_init: Literal["reward", "sft", "base"] | None
    """Initial weights of the critic: the reward model, the SFT model or the base model; null: no critic."""
    critic_warmup: CriticWarmup | None
    """Training of the critic alone before the first update; null: none."""
    lora: PolicyLora | None
    """Low-rank adapters; the reference is the policy without them, and the learning rate should be about ten
    times higher; null: full training."""
    gradient_checkpointing: bool
    """Whether activations are computed again in the backward pass, to save memory."""

    response_length: NumTokens
    """Longest response, in tokens, stop token included."""
    temperature: PositiveFloat
    """Sampling temperature; all log-probabilities use it too."""
    sampling_batch_size: PositiveInt | None
    """Responses that a process samples at the same time; null: its whole share of the rollout."""
    engine: Engine | None
    """Server that samples the responses; null: the stage samples them itself, exactly."""
    stop_token: StopToken
    """Token that ends a response: `eos`, or the id of a token."""
    truncation: Literal["eos_trick_replace", "eos_trick_subtract", "bootstrap", "bootstrap_add", "none"]
    """Score of a response without the stop token: missing_eos_score in place of the score
    (`eos_trick_replace`) or added to it (`eos_trick_subtract`), γ·V of the last state (`bootstrap`), score +
    γ·V (`bootstrap_add`), or the score itself (`none`)."""
    missing_eos_score: FiniteFloat
    """Score for a missing stop token, for the two EOS tricks of `truncation`."""

    kl_coef: NonNegativeFloat
    """Weight of the KL penalty, in score units per nat; 0: no penalty."""
    kl_estimator: Literal["k1", "k2", "k3"]
    """Estimator of a token's KL: `k1` = log π/π_ref, `k2` = ½·k1², `k3` = π_ref/π − 1 + k1."""
    kl_in: Literal["reward", "loss"]
    """Place of the KL penalty: each token's reward, or the loss (`k2` or `k3` only, because the expected
    gradient of `k1` is zero)."""
    adaptive_kl: AdaptiveKl | None
    """Controller that adapts kl_coef to a KL target; null: kl_coef is constant."""
    kl_penalty: KlPenalty | None
    """Penalty on the KL from the policy of the rollout; null: no penalty."""
    target_kl: PositiveFloat | None
    """Largest policy/approxkl_avg of an epoch, in nats per token; above it the update takes no further epoch;
    null: no limit."""
    reference_sync: ReferenceSync | None
    """Movement of the reference towards the policy; null: the reference is fixed."""
    ratio_from: Literal["rollout", "reference"]
    """Denominator of the probability ratio: the policy of the rollout, or the reference (PPO-max's importance
    sampling)."""

    cliprange: Annotated[float, Field(gt=0, lt=1)]
    """Clip range ε of the probability ratio: 1 − ε to 1 + ε."""
    cliprange_high: PositiveFloat | None
    """Clip range above 1; null: the same as cliprange."""
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Bound on the loss of a token with a negative advantage: dual_clip · |A| (arXiv 1912.09729); null: no
    bound."""
    cliprange_value: PositiveFloat | None
    """Clip range of a value around its value in the rollout; null: no clipping."""
    advantage_clip: PositiveFloat | None
    """Largest absolute advantage, after whitening; null: no clipping."""

    vf_coef: NonNegativeFloat | None
    """Weight of the value loss; null: no critic."""
    entropy_coef: NonNegativeFloat
    """Weight of the entropy bonus; 0: no bonus."""
    ptx: Ptx | None
    """Language-model loss on other text beside PPO's (PPO-ptx); null: no such loss."""
    advantages: Literal["gae", "rloo", "group"] | Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """Estimator of the advantages: generalised advantage estimation with a critic (`gae`), the distance of a
    response's return from the mean of the other responses to its prompt (`rloo`), or its distance from the
    mean of all responses to its prompt, in standard deviations (`group`, as in GRPO); or `module:function` of
    your own."""
    samples_per_prompt: PositiveInt
    """Responses to each prompt of a rollout; at least 2 for `rloo` and `group`."""
    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`, or `module:function` of your own."""
    loss_reduction: str | int = "token_mean"
    """How the losses of tokens become one number."""
    gamma: Fraction
    """Discount γ of future rewards, 1 without a critic; set it below 1 if `truncation` bootstraps, because
    with 1 an endless response can keep any value."""
    lam: Fraction | None
    """λ of generalised advantage estimation; a lower value gives less variance and more bias; null: no
    critic."""
    whiten_rewards: bool
    """Whether token rewards are scaled to variance 1, their mean unchanged."""
    whiten_advantages: bool
    """Whether advantages are shifted and scaled to mean 0 and variance 1."""
    score_scaling: ScoreScaling | None
    """Division of the scores by their running standard deviation; null: raw scores."""

    guards: Guards | None
    """Checks that warn, stop or roll back; null: no checks."""

    num_sample_generations: Count
    """Number of times that a few responses to validation prompts are shown and stored: before training, at
    its end and evenly in between; 1: only at the end."""
    num_selections: PositiveInt
    """Number of evaluations of the policy on the selection prompts; the best weights are kept."""
    num_selection_prompts: PositiveInt
    """Number of selection prompts, taken from the validation split."""
    select_by: Selection | None
    """Judge whose win rate over the references selects the weights; null: the mean score of
    models/reward_heldout selects them, or the last weights are kept if there is no reward model."""

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

    @model_validator(mode="after")
    def _whole_batches(self) -> Ppo:
        if self.rollout_batch_size % self.num_mini_batches:
            raise ValueError(
                f"rollout_batch_size={self.rollout_batch_size} is not divisible by "
                f"num_mini_batches={self.num_mini_batches}"
            )
        if self.rollout_batch_size % self.samples_per_prompt:
            raise ValueError(
                f"rollout_batch_size={self.rollout_batch_size} is not divisible by "
                f"samples_per_prompt={self.samples_per_prompt}: all samples of a prompt belong to one rollout"
            )
        if self.total_episodes < self.rollout_batch_size:
            raise ValueError(
                f"total_episodes={self.total_episodes} is less than one rollout of "
                f"{self.rollout_batch_size}: nothing would be trained"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Ppo:
        """Refuse values that have no effect, or a wrong one, with the other values."""
        problems = [
            *self._kl_conflicts(), *self._step_conflicts(), *self._score_conflicts(),
            *critic_conflicts(self), *engine_conflicts(self),
        ]  # fmt: skip
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _kl_conflicts(self) -> Iterator[str]:
        """Values of the penalty and of the reference."""
        adaptive, sync = self.adaptive_kl, self.reference_sync
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "kl_in=loss with kl_estimator=k1: the gradient of k1 is zero in expectation, so the penalty "
                "would have no effect; use k2 or k3"
            )
        if self.kl_in == "loss" and self.kl_coef == 0 and adaptive is None:
            yield "kl_in=loss with kl_coef=0 is no penalty at all; raise kl_coef, or set kl_in to reward"
        if adaptive is not None and self.kl_coef == 0:
            yield "adaptive_kl multiplies kl_coef, and kl_coef=0 would stay 0; set it to a small value"
        if adaptive is not None and self.rollout_batch_size * adaptive.clip >= adaptive.horizon:
            yield "adaptive_kl.horizon must exceed rollout_batch_size · clip: kl_coef would turn negative"
        if self.kl_coef == 0 and self.guards is not None and self.guards.action == "roll_back":
            yield (
                "guards.action=roll_back multiplies kl_coef at each roll back, and kl_coef=0 would stay 0; "
                "set it to a small value"
            )
        if sync is not None and sync.every > self.total_episodes // self.rollout_batch_size:
            yield (
                "reference_sync.every exceeds the number of updates, so it would never happen; lower it, or "
                "set reference_sync to null"
            )
        if self.lora is not None and self.reference_sync is not None:
            yield (
                "lora: the reference is the policy without its adapter and cannot move; set reference_sync "
                "to null"
            )

    def _step_conflicts(self) -> Iterator[str]:
        """Values that need more optimiser steps in an update."""
        if self.target_kl is not None and self.num_ppo_epochs == 1:
            yield (
                "target_kl ends the epochs, and num_ppo_epochs=1 has no further one; raise it, or set "
                "target_kl to null"
            )
        if self.kl_penalty is not None and self.num_ppo_epochs * self.num_mini_batches == 1:
            yield (
                "kl_penalty: at the only optimiser step the policy has not moved yet, and the penalty's "
                "gradient is zero; use more minibatches or epochs"
            )

    def _score_conflicts(self) -> Iterator[str]:
        """Values of the scorers, of unfinished responses, and of the judge that selects."""
        yield from conflicts(self.scorers, self.combine_reward_models, self.response_length)
        if self.truncation == "eos_trick_subtract" and self.missing_eos_score > 0:
            yield (
                "eos_trick_subtract adds missing_eos_score: a positive value would reward unfinished "
                "responses; set it to a negative one"
            )
        if self.select_by is None:
            return
        judge = self.select_by.judge
        functions = {scorer.function for scorer in self.scorers if scorer.kind == "function"}
        if judge.kind == "function" and judge.function in functions:
            yield (
                "select_by: its function is also a scorer, and PPO does not select by what it optimises; "
                "name another judge"
            )
        if judge.kind == "reward_model" and Path(judge.path).as_posix() in reward_folders(self.scorers):
            yield (
                f"select_by: {judge.path} is also a scorer, and PPO does not select by what it optimises; "
                "name another judge"
            )

"""The section `ppo`. The names of the parameters are those of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_tasks.config.judge import Selection
from rlhf_tasks.config.training import Lora
from rlhf_tasks.config.types import (
    Count,
    Decay,
    Fraction,
    NonNegativeFloat,
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
Weight = Annotated[float, Field(allow_inf_nan=False)]


# --------------------------------------------------------------------------------------------- scorers


class RewardModelScorer(Section):
    """The reward model models/reward, trained by stage reward or fetched by `reward.from`."""

    kind: Literal["reward_model"] = Field(description="kind of this scorer")
    weight: Weight = Field(description="factor of this score in the sum")


class FunctionScorer(Section):
    """A Python function that scores responses. Add its file to the deps of stage ppo in dvc.yaml."""

    kind: Literal["function"] = Field(description="kind of this scorer")
    weight: Weight = Field(description="factor of this score in the sum")
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        description="`module:function`, called with a list of prompts and a list of responses; it returns "
        "one float per response"
    )


class HttpScorer(Section):
    """A server that scores responses. Requests are retried after status 429 or 5xx and after timeouts."""

    kind: Literal["http"] = Field(description="kind of this scorer")
    weight: Weight = Field(description="factor of this score in the sum")
    url: Annotated[str, Field(pattern=r"^https?://")] = Field(
        description='address that receives {"prompts": […], "responses": […]} and returns {"scores": […]}'
    )
    timeout_seconds: PositiveFloat = Field(description="longest wait for a reply, in seconds")
    batch_size: PositiveInt = Field(description="responses per request")


class DummyScorer(Section):
    """Zero for every response: it tests the pipeline without a reward."""

    kind: Literal["dummy"] = Field(description="kind of this scorer")


Scorer = Annotated[RewardModelScorer | FunctionScorer | HttpScorer | DummyScorer, Field(discriminator="kind")]


# ------------------------------------------------------------------------------------ optional features


class AdaptiveKl(Section):
    """kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±clip) · episodes / horizon).

    Ziegler et al. 2019, 2.2.
    """

    target: PositiveFloat = Field(description="KL that the controller aims at, in nats per response")
    horizon: PositiveInt = Field(description="episodes over which the correction is spread")
    clip: PositiveFloat = Field(description="largest relative error KL / target − 1 that counts")


class KlPenalty(Section):
    """PPO-penalty in addition to the clip: + beta · KL(π_old ‖ π) in the loss.

    beta doubles above 1.5 · target and halves below target / 1.5: Schulman et al. 2017, eq. 8.
    """

    beta: PositiveFloat = Field(description="weight of the penalty in the first update")
    target: PositiveFloat = Field(description="KL that beta aims at, in nats per token")


class ReferenceSync(Section):
    """The reference policy follows the policy: ref ← (1 − alpha) · ref + alpha · policy."""

    every: PositiveInt = Field(description="number of updates between two steps of the reference")
    alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        description="share of the policy's weights in the new reference"
    )


class ScoreScaling(Section):
    """Scores are divided by their running standard deviation, then clipped: PPO-max, eq. 18."""

    subtract_mean: bool = Field(description="whether the running mean is subtracted first")
    clip: PositiveFloat | None = Field(
        description="largest absolute value of a scaled score, in standard deviations; null: no clipping"
    )


class CriticWarmup(Section):
    """The critic trains alone at first, on rollouts of the frozen policy, until its loss levels off."""

    max_updates: PositiveInt = Field(description="largest number of warm-up updates")
    settled: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="the warm-up ends when two updates in a row lower the value loss by less than this share"
    )


class Ptx(Section):
    """InstructGPT's PPO-ptx: + coef · language-model loss on other text, as many rows as a minibatch has."""

    coef: PositiveFloat = Field(description="weight of the language-model loss")
    text: str | None = Field(
        description="file of pretraining text with an empty line between documents; null: the demonstrations"
    )


class PolicyLora(Lora):
    """Adapters for the policy and, if wanted, for the value model."""

    value: bool = Field(
        description="whether the value model has adapters too; if false, all of its weights are trained"
    )


class Guards(Section):
    """Checks of the metrics after each update."""

    action: Literal["warn", "stop", "roll_back"] = Field(
        description="what a trip does: print a warning, stop the stage, or return to the last good "
        "checkpoint and multiply kl_coef; NaN and infinity stop the stage even with `warn`"
    )
    kl_min: Weight = Field(
        description="smallest objective/kl_k1, in nats per response; two standard errors below it are allowed"
    )
    kl_max: PositiveFloat = Field(description="largest objective/kl_k1, in nats per response")
    ratio_min: PositiveFloat = Field(description="smallest mean probability ratio, val/ratio")
    ratio_max: PositiveFloat = Field(description="largest mean probability ratio, val/ratio")
    perplexity_min: PositiveFloat = Field(
        description="smallest objective/perplexity while length or repetition rises"
    )
    eos_share_min: Fraction = Field(
        description="smallest share of responses that end, relative to the best share so far; two standard "
        "errors below it are allowed"
    )
    patience: PositiveInt = Field(
        description="updates in a row outside a limit after which the guard trips; NaN and infinity trip at "
        "once"
    )
    checkpoint_every: PositiveInt = Field(description="updates between two checkpoints for a roll back")
    kl_coef_factor: Annotated[float, Field(gt=1)] = Field(
        description="factor by which kl_coef grows at each roll back"
    )
    max_roll_backs: PositiveInt = Field(description="number of roll backs after which a trip stops the stage")

    @model_validator(mode="after")
    def _ranges(self) -> Guards:
        if self.kl_min >= self.kl_max or self.ratio_min >= self.ratio_max:
            raise ValueError("kl_min and ratio_min must be below kl_max and ratio_max")
        return self


# ------------------------------------------------------------------------------------------- PPO


class Ppo(Section):
    """PPO training of the policy. An episode is one prompt with one sampled response."""

    total_episodes: PositiveInt = Field(
        description="episodes of the whole training; only whole updates are taken"
    )
    rollout_batch_size: PositiveInt = Field(description="episodes per update, over all processes")
    num_mini_batches: PositiveInt = Field(description="optimiser steps per epoch")
    num_ppo_epochs: PositiveInt = Field(description="passes over the rollout in each update")
    micro_batch_tokens: PositiveInt = Field(description="padded tokens per forward pass and process")

    scorers: tuple[Scorer, ...] = Field(
        strict=False, description="list of scorers by kind; their scores are added up by weight"
    )

    learning_rate: PositiveFloat = Field(description="highest learning rate of AdamW for the policy")
    value_learning_rate: PositiveFloat | None = Field(
        description="highest learning rate for the critic; null: the same as the policy's"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="shape of the learning rate after the warm-up; `linear` and `cosine` fall to zero"
    )
    warmup_fraction: Fraction = Field(
        description="share of the updates in which the learning rate rises linearly from zero"
    )
    adam_betas: tuple[Decay, Decay] = Field(
        strict=False, description="decays of AdamW's two moments; its eps is 1e-5"
    )
    max_grad_norm: PositiveFloat | None = Field(
        description="largest L2 norm of a gradient; a larger one is scaled down; null: no clipping"
    )

    value_model: Literal["separate", "shared"] = Field(
        description="the critic: a separate model, or a value head on the policy's own trunk"
    )
    critic_init: Literal["reward", "sft", "base"] = Field(
        description="initial weights of the critic: the reward model, the SFT policy or the base model"
    )
    critic_warmup: CriticWarmup | None = Field(
        description="training of the critic alone before the first update; null: none"
    )
    lora: PolicyLora | None = Field(
        description="low-rank adapters; the reference is the policy without them; they need about ten times "
        "the learning rate; null: full training"
    )
    gradient_checkpointing: bool = Field(
        description="whether activations are computed again in the backward pass, to save memory"
    )

    response_length: PositiveInt = Field(description="longest response, in tokens, stop token included")
    temperature: PositiveFloat = Field(description="sampling temperature; all log-probabilities use it too")
    sampling_batch_size: PositiveInt | None = Field(
        description="responses that a process samples at the same time; null: its whole share of the rollout"
    )
    stop_token: StopToken = Field(description="token that ends a response: `eos`, or the id of a token")
    truncation: Literal["eos_trick_replace", "eos_trick_subtract", "bootstrap", "bootstrap_add", "none"] = (
        Field(
            description="score of a response without the stop token: missing_eos_score in place of the score "
            "(`eos_trick_replace`) or added to it (`eos_trick_subtract`), γ·V of the last state "
            "(`bootstrap`), score + γ·V (`bootstrap_add`), or the score itself (`none`)"
        )
    )
    missing_eos_score: Weight = Field(
        description="score for a missing stop token, for the two EOS tricks of `truncation`"
    )

    kl_coef: NonNegativeFloat = Field(
        description="weight of the KL penalty, in score units per nat; 0: no penalty"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        description="estimator of a token's KL: `k1` = log π/π_ref, `k2` = ½·k1², `k3` = π_ref/π − 1 + k1"
    )
    kl_in: Literal["reward", "loss"] = Field(
        description="place of the KL penalty: each token's reward, or the loss (`k2` or `k3` only, because "
        "the expected gradient of `k1` is zero)"
    )
    adaptive_kl: AdaptiveKl | None = Field(
        description="controller that adapts kl_coef to a KL target; null: kl_coef is constant"
    )
    kl_penalty: KlPenalty | None = Field(
        description="penalty on the KL from the policy of the rollout; null: no penalty"
    )
    target_kl: PositiveFloat | None = Field(
        description="largest policy/approxkl_avg of an epoch, in nats per token; above it the update takes "
        "no further epoch; null: no limit"
    )
    reference_sync: ReferenceSync | None = Field(
        description="movement of the reference towards the policy; null: the reference is fixed"
    )
    ratio_from: Literal["rollout", "reference"] = Field(
        description="denominator of the probability ratio: the policy of the rollout, or the reference "
        "(PPO-max's importance sampling)"
    )

    cliprange: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="clip range ε of the probability ratio: 1 − ε to 1 + ε"
    )
    cliprange_high: PositiveFloat | None = Field(
        description="clip range above 1; null: the same as cliprange"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        description="bound on the loss of a token with a negative advantage: dual_clip · |A| (arXiv "
        "1912.09729); null: no bound"
    )
    cliprange_value: PositiveFloat | None = Field(
        description="clip range of a value around its value in the rollout; null: no clipping"
    )
    advantage_clip: PositiveFloat | None = Field(
        description="largest absolute advantage, after whitening; null: no clipping"
    )

    vf_coef: NonNegativeFloat = Field(description="weight of the value loss")
    entropy_coef: NonNegativeFloat = Field(description="weight of the entropy bonus; 0: no bonus")
    ptx: Ptx | None = Field(
        description="language-model loss on other text beside PPO's (PPO-ptx); null: no such loss"
    )
    gamma: Fraction = Field(
        description="discount γ of future rewards; below 1 if `truncation` bootstraps, because with 1 any "
        "value of an endless response is consistent"
    )
    lam: Fraction = Field(description="λ of generalised advantage estimation: bias against variance")
    whiten_rewards: bool = Field(
        description="whether token rewards are scaled to variance 1, their mean unchanged"
    )
    whiten_advantages: bool = Field(
        description="whether advantages are shifted and scaled to mean 0 and variance 1"
    )
    score_scaling: ScoreScaling | None = Field(
        description="division of the scores by their running standard deviation; null: raw scores"
    )

    guards: Guards | None = Field(description="checks that warn, stop or roll back; null: no checks")

    num_sample_generations: Count = Field(
        description="times that a few responses to validation prompts are shown and stored: before training, "
        "at its end and evenly in between; 1: only at the end"
    )
    num_selections: PositiveInt = Field(
        description="times that the policy is evaluated on the selection prompts; the best weights are kept"
    )
    num_selection_prompts: PositiveInt = Field(description="number of validation prompts for this evaluation")
    select_by: Selection | None = Field(
        description="judge whose win rate over the references selects the weights; null: the mean score of "
        "models/reward_heldout, or the last weights without reward models"
    )

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
        if self.total_episodes < self.rollout_batch_size:
            raise ValueError(
                f"total_episodes={self.total_episodes} is less than one rollout of "
                f"{self.rollout_batch_size}: nothing would be trained"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Ppo:
        """Refuse values that have no effect, or a wrong one, with the other values."""
        problems = [message for wrong, message in self._conflicts() if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _idle(self) -> list[tuple[bool, str]]:
        """Values that could have no effect, or the opposite one: (is wrong, message)."""
        adaptive, sync = self.adaptive_kl, self.reference_sync
        return [
            (
                adaptive is not None and self.kl_coef == 0,
                "adaptive_kl multiplies kl_coef, and kl_coef=0 would stay 0; set it to a small value",
            ),
            (
                adaptive is not None and self.rollout_batch_size * adaptive.clip >= adaptive.horizon,
                "adaptive_kl.horizon must exceed rollout_batch_size · clip: kl_coef would turn negative",
            ),
            (
                sync is not None and sync.every > self.total_episodes // self.rollout_batch_size,
                "reference_sync.every exceeds the number of updates, so it would never happen; lower it, or "
                "set reference_sync to null",
            ),
            (
                self.target_kl is not None and self.num_ppo_epochs == 1,
                "target_kl ends the epochs, and num_ppo_epochs=1 has no further one; raise it, or set "
                "target_kl to null",
            ),
            (
                self.kl_penalty is not None and self.num_ppo_epochs * self.num_mini_batches == 1,
                "kl_penalty: at the only optimiser step the policy has not moved yet, and the penalty's "
                "gradient is zero; use more minibatches or epochs",
            ),
            (
                self.critic_warmup is not None and self.vf_coef == 0,
                "critic_warmup: with vf_coef=0 the critic learns nothing; raise vf_coef, or set "
                "critic_warmup to null",
            ),
            (
                self.kl_in == "loss" and self.kl_coef == 0 and adaptive is None,
                "kl_in=loss with kl_coef=0 is no penalty at all; raise kl_coef, or set kl_in to reward",
            ),
            (
                self.truncation == "eos_trick_subtract" and self.missing_eos_score > 0,
                "eos_trick_subtract adds missing_eos_score: a positive value would reward unfinished "
                "responses; set it to a negative one",
            ),
        ]

    def _conflicts(self) -> list[tuple[bool, str]]:
        shared, kinds = self.value_model == "shared", [scorer.kind for scorer in self.scorers]
        return [
            (
                self.kl_in == "loss" and self.kl_estimator == "k1",
                "kl_in=loss with kl_estimator=k1: the gradient of k1 is zero in expectation, so the penalty "
                "would have no effect; use k2 or k3",
            ),
            *self._idle(),
            (
                self.select_by is not None
                and self.select_by.judge.kind == "function"
                and self.select_by.judge.function
                in {s.function for s in self.scorers if s.kind == "function"},
                "select_by: its function is also a scorer, and PPO does not select by what it optimises; "
                "name another judge",
            ),
            (not kinds, "scorers is empty; add at least one, such as {kind: dummy}"),
            (
                shared and self.critic_init != "sft",
                f"value_model=shared uses the policy's trunk: critic_init={self.critic_init!r} would be "
                "ignored; set it to sft",
            ),
            (
                shared and self.value_learning_rate is not None,
                "value_model=shared trains one trunk, so it can have no value_learning_rate of its own; set "
                "it to null",
            ),
            (
                shared and self.critic_warmup is not None,
                "value_model=shared: a warm-up of the critic would move the policy's trunk; set "
                "critic_warmup to null, or value_model to separate",
            ),
            (
                shared and self.lora is not None and self.lora.value,
                "value_model=shared has no trunk of its own for lora.value; set it to false",
            ),
            (
                self.lora is not None and self.reference_sync is not None,
                "lora: the reference is the policy without its adapter and cannot move; set reference_sync "
                "to null",
            ),
            (
                self.kl_coef == 0 and self.guards is not None and self.guards.action == "roll_back",
                "guards.action=roll_back multiplies kl_coef at each roll back, and kl_coef=0 would stay 0; "
                "set it to a small value",
            ),
            (
                len(set(kinds)) < len(kinds) and kinds.count("reward_model") + kinds.count("dummy") > 1,
                "scorers: reward_model and dummy are allowed once each",
            ),
        ]

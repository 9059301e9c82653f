"""PPO. The names are the papers'; README gives each one's formula."""

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
    raise ValueError("must be `eos`, or the id of a token, a whole number from 0")


StopToken = Annotated[Literal["eos"] | int, BeforeValidator(_eos_or_id)]
Weight = Annotated[float, Field(allow_inf_nan=False)]


# ------------------------------------------------------------------------------------ what is rewarded


class RewardModelScorer(Section):
    """models/reward, trained or given (`reward.from`)."""

    kind: Literal["reward_model"]
    weight: Weight


class FunctionScorer(Section):
    kind: Literal["function"]
    weight: Weight
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        description="`module:function`, called with lists of prompts and of responses; gives a float for each"
    )


class HttpScorer(Section):
    kind: Literal["http"]
    weight: Weight
    url: Annotated[str, Field(pattern=r"^https?://")] = Field(
        description='is sent {"prompts": […], "responses": […]}, answers {"scores": […]}'
    )
    timeout_seconds: PositiveFloat
    batch_size: PositiveInt


class DummyScorer(Section):
    """Zero for every answer: the whole machinery without anything to learn."""

    kind: Literal["dummy"]


Scorer = Annotated[RewardModelScorer | FunctionScorer | HttpScorer | DummyScorer, Field(discriminator="kind")]


# ------------------------------------------------------------------------------------ optional features


class AdaptiveKl(Section):
    """kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±clip) · episodes / horizon).

    Ziegler et al. 2019, 2.2.
    """

    target: PositiveFloat = Field(description="nats an answer")
    horizon: PositiveInt = Field(description="episodes")
    clip: PositiveFloat


class KlPenalty(Section):
    """PPO-penalty beside the clip: + beta · KL(π_old ‖ π).

    beta doubles above 1.5 · target and halves below target / 1.5: Schulman et al. 2017, eq. 8.
    """

    beta: PositiveFloat = Field(description="at the start")
    target: PositiveFloat = Field(description="nats a token")


class ReferenceSync(Section):
    """ref ← (1 − alpha) · ref + alpha · policy."""

    every: PositiveInt = Field(description="updates")
    alpha: Annotated[float, Field(gt=0, le=1)]


class ScoreScaling(Section):
    """Scores over their running standard deviation (and mean), then clipped: PPO-max, eq. 18."""

    subtract_mean: bool
    clip: PositiveFloat | None = Field(description="in standard deviations")


class CriticWarmup(Section):
    """The critic alone learns first, on rollouts of the frozen policy, until its loss settles."""

    max_updates: PositiveInt
    settled: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="ends when two updates in a row do not lower the value loss by this share of it"
    )


class Ptx(Section):
    """+ coef · LM loss on other text, as many rows as the minibatch: InstructGPT's PPO-ptx."""

    coef: PositiveFloat
    text: str | None = Field(
        description="a file of pretraining text, empty lines between documents; null: the demonstrations"
    )


class PolicyLora(Lora):
    value: bool = Field(description="adapters for the value model too; else all of it is trained")


class Guards(Section):
    """A watchdog over each update's metrics."""

    action: Literal["warn", "stop", "roll_back"]
    kl_min: Weight = Field(description="objective/kl by k1, two standard errors allowed")
    kl_max: PositiveFloat
    ratio_min: PositiveFloat = Field(description="val/ratio")
    ratio_max: PositiveFloat
    perplexity_min: PositiveFloat = Field(
        description="of the policy on its own answers, while length or repetition rises"
    )
    eos_share_min: Fraction = Field(
        description="answers that end, of as many as ever did, two standard errors allowed"
    )
    patience: PositiveInt = Field(description="updates in a row before it trips; NaN and inf trip at once")
    checkpoint_every: PositiveInt = Field(description="updates between the checkpoints to roll back to")
    kl_coef_factor: Annotated[float, Field(gt=1)] = Field(description="× kl_coef at each roll back")
    max_roll_backs: PositiveInt = Field(description="then it stops")

    @model_validator(mode="after")
    def _ranges(self) -> Guards:
        if self.kl_min >= self.kl_max or self.ratio_min >= self.ratio_max:
            raise ValueError("kl_min and ratio_min must be below kl_max and ratio_max")
        return self


# ------------------------------------------------------------------------------------------- PPO


class Ppo(Section):
    total_episodes: PositiveInt
    rollout_batch_size: PositiveInt = Field(description="episodes per update, over all processes")
    num_mini_batches: PositiveInt = Field(description="optimiser steps per epoch")
    num_ppo_epochs: PositiveInt
    micro_batch_tokens: PositiveInt = Field(description="padded tokens per forward pass and process")

    scorers: tuple[Scorer, ...] = Field(strict=False, description="summed by weight")

    learning_rate: PositiveFloat
    value_learning_rate: PositiveFloat | None = Field(description="null: as the policy's")
    schedule: Literal["constant", "linear", "cosine"]
    warmup_fraction: Fraction
    adam_betas: tuple[Decay, Decay] = Field(strict=False, description="of AdamW; its eps is 1e-5")
    max_grad_norm: PositiveFloat | None = Field(description="gradients are scaled down to it; null: never")

    value_model: Literal["separate", "shared"] = Field(
        description="shared: a value head on the policy's trunk"
    )
    critic_init: Literal["reward", "sft", "base"] = Field(description="what the value model starts as")
    critic_warmup: CriticWarmup | None
    lora: PolicyLora | None
    gradient_checkpointing: bool

    response_length: PositiveInt
    temperature: PositiveFloat
    sampling_batch_size: PositiveInt | None = Field(
        description="answers sampled at a time by each process, as its memory allows; null: its whole rollout"
    )
    stop_token: StopToken = Field(description="`eos`, or the id of a token that ends answers")
    truncation: Literal["eos_trick_replace", "eos_trick_subtract", "bootstrap", "bootstrap_add", "none"]
    missing_eos_score: Weight = Field(
        description="of an answer without its stop token: eos_trick_replace puts it in place of the score, "
        "eos_trick_subtract adds it (give it negative)"
    )

    kl_coef: NonNegativeFloat
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["reward", "loss"]
    adaptive_kl: AdaptiveKl | None
    kl_penalty: KlPenalty | None
    target_kl: PositiveFloat | None = Field(
        description="no further epoch once policy/approxkl_avg of one exceeds it"
    )
    reference_sync: ReferenceSync | None
    ratio_from: Literal["rollout", "reference"] = Field(
        description="denominator of the ratio; reference: PPO-max's importance sampling"
    )

    cliprange: Annotated[float, Field(gt=0, lt=1)]
    cliprange_high: PositiveFloat | None = Field(description="above 1; null: as below it, `cliprange`")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        description="loss of a negative advantage is at most dual_clip · |A|, arXiv 1912.09729"
    )
    cliprange_value: PositiveFloat | None
    advantage_clip: PositiveFloat | None

    vf_coef: NonNegativeFloat
    entropy_coef: NonNegativeFloat
    ptx: Ptx | None
    gamma: Fraction
    lam: Fraction
    whiten_rewards: bool
    whiten_advantages: bool
    score_scaling: ScoreScaling | None

    guards: Guards | None

    num_sample_generations: Count = Field(
        description="times a few answers to validation prompts are shown and kept: before training, at its "
        "end, and evenly between; 1: at the end"
    )
    num_selections: PositiveInt = Field(
        description="times the policy is tried on validation prompts; the weights that do best are kept"
    )
    num_selection_prompts: PositiveInt
    select_by: Selection | None = Field(
        description="a judge, by its win rate over the references; null: models/reward_heldout's mean score"
    )

    @model_validator(mode="before")
    @classmethod
    def _samples_purely(cls, values: Any) -> Any:
        given = [key for key in BENDING if isinstance(values, Mapping) and key in values]
        if given:
            raise ValueError(
                f"{', '.join(given)}: answers would be drawn from another distribution than the log-probs "
                "speak of, which drives the KL estimate negative; only `temperature` shapes sampling, and "
                "every log-prob uses it"
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
        """What would have no effect, or a false one, beside the other values."""
        problems = [message for wrong, message in self._conflicts() if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _idle(self) -> list[tuple[bool, str]]:
        """What could never do anything, or would do the opposite."""
        adaptive, sync = self.adaptive_kl, self.reference_sync
        return [
            (
                adaptive is not None and self.kl_coef == 0,
                "adaptive_kl multiplies kl_coef, and kl_coef=0 would stay 0; start from a small value",
            ),
            (
                adaptive is not None and self.rollout_batch_size * adaptive.clip >= adaptive.horizon,
                "adaptive_kl.horizon must exceed rollout_batch_size · clip: kl_coef would turn negative",
            ),
            (
                sync is not None and sync.every > self.total_episodes // self.rollout_batch_size,
                "reference_sync.every exceeds the number of updates: it would never happen",
            ),
            (
                self.target_kl is not None and self.num_ppo_epochs == 1,
                "target_kl ends the epochs, and num_ppo_epochs=1 has no further one",
            ),
            (
                self.kl_penalty is not None and self.num_ppo_epochs * self.num_mini_batches == 1,
                "kl_penalty: at the only optimiser step the policy has not moved yet, and the penalty's "
                "gradient is zero; use more minibatches or epochs",
            ),
            (
                self.critic_warmup is not None and self.vf_coef == 0,
                "critic_warmup: with vf_coef=0 the critic learns nothing; give vf_coef, or set it to null",
            ),
            (
                self.kl_in == "loss" and self.kl_coef == 0 and adaptive is None,
                "kl_in=loss with kl_coef=0 is no penalty at all; give kl_coef, or set kl_in to reward",
            ),
            (
                self.truncation == "eos_trick_subtract" and self.missing_eos_score > 0,
                "eos_trick_subtract adds missing_eos_score: a positive one would reward unfinished answers",
            ),
        ]

    def _conflicts(self) -> list[tuple[bool, str]]:
        shared, kinds = self.value_model == "shared", [scorer.kind for scorer in self.scorers]
        return [
            (
                self.kl_in == "loss" and self.kl_estimator == "k1",
                "kl_in=loss with kl_estimator=k1: the gradient of k1 is zero in expectation, so that nothing "
                "would hold the policy; use k2 or k3",
            ),
            *self._idle(),
            (
                self.select_by is not None
                and self.select_by.judge.kind == "function"
                and self.select_by.judge.function
                in {s.function for s in self.scorers if s.kind == "function"},
                "select_by: its function is one of scorers, and what is optimised does not choose; give "
                "another judge",
            ),
            (not kinds, "scorers is empty: name at least one, if only {kind: dummy}"),
            (
                shared and self.critic_init != "sft",
                f"value_model=shared starts on the policy's trunk: critic_init={self.critic_init!r} would be "
                "ignored; set it to sft",
            ),
            (
                shared and self.value_learning_rate is not None,
                "value_model=shared trains one trunk: it can have no value_learning_rate of its own; set it "
                "to null",
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
                "lora: the reference is the policy without its adapter and cannot follow it; set "
                "reference_sync to null",
            ),
            (
                self.kl_coef == 0 and self.guards is not None and self.guards.action == "roll_back",
                "guards.action=roll_back multiplies kl_coef at each roll back, and kl_coef=0 would stay 0; "
                "give it a small value",
            ),
            (
                len(set(kinds)) < len(kinds) and kinds.count("reward_model") + kinds.count("dummy") > 1,
                "scorers: reward_model and dummy can stand there once",
            ),
        ]

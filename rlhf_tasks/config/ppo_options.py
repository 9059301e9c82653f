"""The optional features of PPO: each is a section of `ppo` that is null when it is off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_tasks.config.training import Lora
from rlhf_tasks.config.types import FiniteFloat, Fraction, PositiveFloat, PositiveInt, Section


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
    """The reference model follows the policy: ref ← (1 − alpha) · ref + alpha · policy."""

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
    kl_min: FiniteFloat = Field(
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

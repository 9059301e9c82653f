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

    target: PositiveFloat
    """KL that the controller aims at, in nats per response."""
    horizon: PositiveInt
    """Episodes over which the correction is spread."""
    clip: PositiveFloat
    """Largest relative error KL / target − 1 that counts."""


class KlPenalty(Section):
    """PPO-penalty in addition to the clip: + beta · KL(π_old ‖ π) in the loss.

    beta doubles above 1.5 · target and halves below target / 1.5: Schulman et al. 2017, eq. 8.
    """

    beta: PositiveFloat
    """Weight of the penalty in the first update."""
    target: PositiveFloat
    """KL that beta aims at, in nats per token."""


class ReferenceSync(Section):
    """The reference model follows the policy: ref ← (1 − alpha) · ref + alpha · policy."""

    every: PositiveInt
    """Number of updates between two steps of the reference."""
    alpha: Annotated[float, Field(gt=0, le=1)]
    """Share of the policy's weights in the new reference."""


class ScoreScaling(Section):
    """Scores are divided by their running standard deviation, then clipped: PPO-max, eq. 18."""

    subtract_mean: bool
    """Whether the running mean is subtracted first."""
    clip: PositiveFloat | None
    """Largest absolute value of a scaled score, in standard deviations; null: no clipping."""


class CriticWarmup(Section):
    """The critic trains alone at first, on rollouts of the frozen policy, until its loss levels off."""

    max_updates: PositiveInt
    """Largest number of warm-up updates."""
    settled: Annotated[float, Field(gt=0, lt=1)]
    """The warm-up ends when two updates in a row lower the value loss by less than this share."""


class Ptx(Section):
    """InstructGPT's PPO-ptx: + coef · language-model loss on other text, as many rows as a minibatch has."""

    coef: PositiveFloat
    """Weight of the language-model loss."""
    text: str | None
    """File of pretraining text with an empty line between documents; null: the demonstrations."""


class PolicyLora(Lora):
    """Adapters for the policy and, if wanted, for the value model."""

    value: bool
    """Whether the value model has adapters too; if false, all of its weights are trained."""


class Guards(Section):
    """Checks of the metrics after each update."""

    action: Literal["warn", "stop", "roll_back"]
    """What a trip does: print a warning, stop the stage, or return to the last good checkpoint and multiply
    kl_coef; NaN and infinity stop the stage even with `warn`."""
    kl_min: FiniteFloat
    """Smallest objective/kl_k1, in nats per response; two standard errors below it are allowed."""
    kl_max: PositiveFloat
    """Largest objective/kl_k1, in nats per response."""
    ratio_min: PositiveFloat
    """Smallest mean probability ratio, val/ratio."""
    ratio_max: PositiveFloat
    """Largest mean probability ratio, val/ratio."""
    perplexity_min: PositiveFloat
    """Smallest objective/perplexity while length or repetition rises."""
    eos_share_min: Fraction
    """Smallest share of responses that end, relative to the best share so far; two standard errors below it
    are allowed."""
    patience: PositiveInt
    """Updates in a row outside a limit after which the guard trips; NaN and infinity trip at once."""
    checkpoint_every: PositiveInt
    """Updates between two checkpoints for a roll back."""
    kl_coef_factor: Annotated[float, Field(gt=1)]
    """Factor by which kl_coef grows at each roll back."""
    max_roll_backs: PositiveInt
    """Number of roll backs after which a trip stops the stage."""

    @model_validator(mode="after")
    def _ranges(self) -> Guards:
        if self.kl_min >= self.kl_max or self.ratio_min >= self.ratio_max:
            raise ValueError("kl_min and ratio_min must be below kl_max and ratio_max")
        return self

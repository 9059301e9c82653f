"""The supervised stages: base, SFT, preferences, reward model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_tasks.config.types import (
    Count,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    check_source,
)


class Optimisation(Section):
    """What every supervised loop has. AdamW, betas .9/.98, eps 1e-5 (arXiv 2403.17031, appendix)."""

    learning_rate: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_fraction: Fraction
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat | None = Field(description="gradients are scaled down to it; null: never")
    batch_size: PositiveInt = Field(description="rows per optimiser step, over all processes")
    micro_batch_tokens: PositiveInt = Field(description="padded tokens per forward pass and process")
    num_epochs: PositiveFloat


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on every linear layer but the head; merged when saved."""

    r: PositiveInt
    alpha: PositiveFloat


class Prepare(Section):
    synthetic_prompt_rows: PositiveInt
    synthetic_sft_rows: PositiveInt = Field(description="how many of the prompts have a demonstration")
    synthetic_preference_rows: PositiveInt
    docstrings_max_pairs: PositiveInt = Field(description="upper bound on mined pairs")

    @model_validator(mode="after")
    def _demonstrated(self) -> Prepare:
        if self.synthetic_sft_rows > self.synthetic_prompt_rows:
            raise ValueError(
                f"synthetic_sft_rows={self.synthetic_sft_rows} must not exceed "
                f"synthetic_prompt_rows={self.synthetic_prompt_rows}: a demonstration is of a prompt"
            )
        return self


class Base(Optimisation):
    pass


class Sft(Optimisation):
    source: str | None = Field(
        alias="from", description="a ready SFT model: folder or hub id; null trains one"
    )
    revision: Revision | None
    evals_per_epoch: PositiveInt
    patience: PositiveInt = Field(description="evaluations without a new validation minimum before it stops")

    @model_validator(mode="after")
    def _origin(self) -> Sft:
        check_source(self.source, self.revision, "sft.from")
        return self


class Preferences(Section):
    num_prompts: Count = Field(
        description="prompts answered by the SFT policy for comparison; 0: given pairs only"
    )
    pairs_per_prompt: PositiveInt
    temperature: PositiveFloat
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        description="share of the gold judge's labels that are flipped (synthetic task)"
    )


class Reward(Optimisation):
    train: bool = Field(description="false: no reward model is made, since nothing asks for one")
    source: str | None = Field(
        alias="from", description="a ready reward model: folder or hub id; null trains one"
    )
    revision: Revision | None
    margin: NonNegativeFloat = Field(description="chosen must lead by this much: −log σ(Δ − margin)")
    centring_coef: NonNegativeFloat = Field(description="× mean (r_chosen + r_rejected)², arXiv 2312.09244")
    lm_coef: NonNegativeFloat = Field(description="× LM loss on the chosen answer, PPO-max's β")
    lora: Lora | None

    @model_validator(mode="after")
    def _origin(self) -> Reward:
        check_source(self.source, self.revision, "reward.from")
        return self

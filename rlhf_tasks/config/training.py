"""The sections of the supervised stages: prepare, base, sft, preferences, reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_tasks.config.types import (
    BatchSize,
    Count,
    Fraction,
    NonNegativeFloat,
    NumEpochs,
    NumRows,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    Width,
    check_source,
)


class Optimisation(Section):
    """The parameters of a supervised training loop.

    The optimiser is AdamW with betas 0.9 and 0.98 and eps 1e-5 (arXiv 2403.17031, appendix).
    """

    learning_rate: PositiveFloat
    """Highest learning rate, reached after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after the warm-up; `linear` and `cosine` fall to zero."""
    warmup_fraction: Fraction
    """Share of the optimiser steps in which the learning rate rises linearly from zero."""
    weight_decay: NonNegativeFloat
    """Weight decay of AdamW."""
    max_grad_norm: PositiveFloat | None
    """Largest L2 norm of a gradient; a larger one is scaled down; null: no clipping."""
    batch_size: BatchSize
    """Rows per optimiser step, over all processes."""
    micro_batch_tokens: PositiveInt
    """Most padded tokens per forward pass and process."""
    num_epochs: NumEpochs
    """Passes over the train rows; may be a fraction."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on every linear layer but the head.

    They are merged into the weights when the model is saved.
    """

    r: Width
    """Rank of the adapters."""
    alpha: PositiveFloat
    """Scale of the adapters: they are multiplied by alpha / r."""


class Prepare(Section):
    """The sizes of the data that stage prepare generates or mines."""

    synthetic_prompt_rows: NumRows
    """Number of train prompts of a generated source, `synthetic` or `arithmetic`."""
    synthetic_sft_rows: NumRows
    """Number of those prompts that have a demonstration."""
    synthetic_preference_rows: NumRows
    """Number of train preference pairs of `data.source: synthetic`."""
    docstrings_max_pairs: NumRows
    """Largest number of pairs that `data.source: docstrings` mines."""

    @model_validator(mode="after")
    def _demonstrated(self) -> Prepare:
        if self.synthetic_sft_rows > self.synthetic_prompt_rows:
            raise ValueError(
                f"synthetic_sft_rows={self.synthetic_sft_rows} must not exceed "
                f"synthetic_prompt_rows={self.synthetic_prompt_rows}: every demonstration answers a prompt"
            )
        return self


class Base(Optimisation):
    """Training of the base model from random weights, for `model.base: scratch`."""


class Sft(Optimisation):
    """Supervised fine-tuning on demonstrations, to the minimum of the validation loss."""

    source: str | None = Field(alias="from")
    """Folder or hub id of a ready SFT model; null: the stage trains one."""
    revision: Revision | None
    """Commit hash of a hub id in `from`; null otherwise."""
    evals_per_epoch: PositiveInt
    """Number of evaluations on the validation split per epoch."""
    patience: PositiveInt
    """Number of evaluations in a row without a lower validation loss after which training ends."""

    @model_validator(mode="after")
    def _origin(self) -> Sft:
        check_source(self.source, self.revision, "sft.from")
        return self


class Preferences(Section):
    """Preference pairs made from samples of the SFT model, beside the pairs of the data.

    The chosen response is the reference, the rejected one is a sample. In the synthetic task both are
    samples, and the gold judge chooses.
    """

    num_prompts: Count
    """Number of train prompts to which the SFT model samples responses; 0: only the pairs of the data."""
    pairs_per_prompt: PositiveInt
    """Number of pairs made for each of those prompts."""
    temperature: PositiveFloat
    """Sampling temperature of the SFT model."""
    label_noise: Annotated[float, Field(ge=0, lt=0.5)]
    """Share of the gold judge's train labels that are flipped, for `data.source: synthetic`."""


class Reward(Optimisation):
    """Two reward models: one that PPO optimises, one held out for selection and judging."""

    train: bool
    """Whether reward models are made; false if no scorer, critic or judge uses one."""
    source: str | None = Field(alias="from")
    """Folder or hub id of a ready reward model; null: the stage trains one."""
    revision: Revision | None
    """Commit hash of a hub id in `from`; null otherwise."""
    margin: NonNegativeFloat
    """Margin by which r_chosen should exceed r_rejected: the loss is −log σ(r_chosen − r_rejected −
    margin)."""
    centring_coef: NonNegativeFloat
    """Weight of (r_chosen + r_rejected)² in the loss (arXiv 2312.09244); 0: no such term."""
    lm_coef: NonNegativeFloat
    """Weight of the language-model loss on the chosen response, β of PPO-max (arXiv 2307.04964, eq. 4); 0: no
    such term."""
    lora: Lora | None
    """Low-rank adapters for the reward models; null: full training."""

    @model_validator(mode="after")
    def _origin(self) -> Reward:
        check_source(self.source, self.revision, "reward.from")
        return self

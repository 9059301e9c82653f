"""Rotary positions that depend on the longest row of a batch, so that a row's log-probs depend on others."""

from __future__ import annotations

from transformers import PretrainedConfig

from rlhf_tasks.errors import UserError


class ModelFault(UserError):
    """A model that PPO cannot train, with what differs."""


def check_positions(config: PretrainedConfig, longest: int, subject: str) -> None:
    """Check that rows of `longest` tokens have the same positions alone and beside shorter or longer rows.

    Raises:
        ModelFault: if the model rescales its positions at a length below `longest`.
    """
    bound = rescaling_length(config)
    if bound is not None and longest > bound:
        raise ModelFault(
            f"{subject} rescales its rotary positions for a whole batch as soon as one row exceeds {bound} "
            f"tokens, and prompt plus response reach {longest}: a row's log-probs would depend on the other "
            f"rows; lower data.max_prompt_tokens or ppo.response_length so that they stay within {bound}"
        )


def rescaling_length(config: PretrainedConfig) -> int | None:
    """The length above which rotary positions depend on the longest row of the batch; None if they never do.

    These are the rope types `dynamic` and `longrope`.
    """
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in (given, *given.values()) if isinstance(part, dict)]
    bounds = [
        part.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for part in parts
        if part.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(map(int, bounds), default=None)

"""How long the rows of a model can be, by its config."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from rlhf_tasks.config import Model
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import packaged

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TABLES = ["biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt"]
"""Decoders with an entry for each position, learned or computed once. Others compute as many as they need."""
BATCH_SETTINGS = {
    "index_topk": "selects by a sparse index other tokens in a padded row",  # DeepSeek-V3.2, GLM-MoE-DSA
    "index_block_size": "divides a padded row into other blocks",  # MiniMax-M3
    "floor_scale": "scales its attention by the column of a token, padding included",  # Llama 4
}
"""Settings of families, above which a row's numbers depend on its padding, and why."""


def of_scratch(longest_prompt: int) -> int:
    """The positions of a model that is trained from scratch on prompts of at most so many tokens."""
    return 1 << (4 * longest_prompt - 1).bit_length()


def read_config(model: Model, longest_prompt: int) -> PretrainedConfig | None:
    """The config of the base model, or what is known of the one that is trained from scratch.

    None where it cannot be read, which stage base explains.
    """
    from transformers import AutoConfig

    if model.scratch is not None:
        positions = of_scratch(longest_prompt)
        return AutoConfig.for_model(model.scratch.family, max_position_embeddings=positions)
    folder, file = packaged.gguf(model.base)
    try:
        with packaged.reading(model.base) if file else nullcontext():
            config: PretrainedConfig = AutoConfig.from_pretrained(folder, revision=model.revision, **file)
    except (OSError, ValueError, ImportError):
        return None
    return config


def max_positions(config: PretrainedConfig) -> int | None:
    """The most tokens of a row that a model declares; None if it declares none (XLNet says -1)."""
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_seq_len" if text.model_type == "mpt" else "max_position_embeddings", None)
    return most if most is not None and most > 0 else None


def check(config: PretrainedConfig, rollout: int, subject: str, data: int = 0) -> str | None:
    """Check that a model has positions for rollouts and rows of the data, of at most so many tokens.

    And that it gives a rollout what it gives it alone. Returns a warning for a model that computes further
    positions, on which it was not trained.

    Raises:
        UserError: if it has no further positions, or its numbers depend on the other rows of a batch.
    """
    for bound, cause in batch_bounds(config).items():
        if rollout > bound:
            raise UserError(
                f"{subject} {cause} as soon as one row exceeds {bound} tokens, and prompt plus response "
                f"reach {rollout}: a row's log-probs would depend on the other rows; lower "
                f"data.max_prompt_tokens or ppo.response_length so that they stay within {bound}"
            )
    most, longest = max_positions(config), max(rollout, data)
    if most is None or longest <= most:
        return None
    family = config.get_text_config(decoder=True).model_type
    rows = (
        "the longest row, or prompt with data.max_completion_tokens and EOS,"
        if data > rollout
        else "the longest prompt and ppo.response_length together"
    )
    text = f"{subject} ({family}) has {most} positions, and {rows} reach {longest} tokens: it"
    remedy = "lower data.max_prompt_tokens, data.max_completion_tokens or ppo.response_length"
    if family in TABLES:
        instead = "use a model with more positions, or of a family that computes them, such as llama or qwen2"
        raise UserError(f"{text} has no row for a later position; {remedy}, or {instead}")
    return f"Warning: {text} was not trained on later positions, and may write nonsense there; {remedy}"


def batch_bounds(config: PretrainedConfig) -> dict[int, str]:
    """The lengths above which a row's numbers depend on the rest of its batch, and why.

    They are those of BATCH_SETTINGS, and of the rope types `dynamic` and `longrope`.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    bounds = dict[int, str]()
    for part in (rope, *rope.values()):  # one, or one for each type of layer
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
            name = "original_max_position_embeddings"
            bound = part.get(name) or getattr(text, name, None) or text.max_position_embeddings
            bounds[int(bound)] = "rescales its rotary positions for a whole batch"
    for setting, cause in BATCH_SETTINGS.items():
        if (bound := getattr(text, setting, None)) is not None:
            bounds[int(bound)] = cause
    return bounds

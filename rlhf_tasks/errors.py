"""Errors that are shown as one message, without a traceback."""

LESS_MEMORY = (
    "lower the lengths (data.max_prompt_tokens, data.max_completion_tokens, ppo.response_length) or the size "
    "of the model, or set launch.precision to bf16, lora, ppo.gradient_checkpointing or launch.parallelism"
)
"""What to do where smaller micro-batches do not help."""


PROMPTS_ALONE = (
    "The data has prompts alone, which are enough with model.base, a model that exists, sft.from, a ready "
    "SFT model (or that base model again), and reward.train: false, with ppo.scorers and judge.judges that "
    "need no pairs (a function, a verifier, http, an llm judge, or a reward model by its path); or "
    "preferences.function labels pairs of samples for a reward model"
)


class UserError(Exception):
    """A mistake that the user can fix. The message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """Every problem of a parameter file, in one message."""


class OutsideFault(Exception):
    """A fault of another program, which another try may not meet: one message, and exit status 1."""

"""What ends a response: the one place that decides it, for sampling, training, scoring, judging and export.

A response ends with any of these tokens: the tokenizer's EOS, all ids of the checkpoint's generation config,
the end of a turn in its chat template, and `ppo.stop_token`. Two models that are compared end with the
tokens of both. Training and scoring read a response in one form, whatever token ended it: `close_responses`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.data.chat import end_of_turn
from rlhf_tasks.data.tokenizer import Ids

StopTokens = tuple[int, ...]
"""Ids, each once; EOS is the first."""


def ends_of(
    checkpoint: PreTrainedModel | GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    others: Iterable[int | Literal["eos"]] = (),
) -> StopTokens:
    """The tokens that end a checkpoint's responses, and `others`, such as `ppo.stop_token`."""
    config = checkpoint if isinstance(checkpoint, GenerationConfig | None) else checkpoint.generation_config
    named = None if config is None else config.eos_token_id
    turn = end_of_turn(tokenizer)
    ids = [
        int(tokenizer.eos_token_id),
        *([named] if isinstance(named, int) else named or []),
        *([] if turn is None else [turn]),
        *(end for end in others if end != "eos"),
    ]
    return tuple(dict.fromkeys(ids))


def has_ended(response: Ids, ends: Collection[int]) -> bool:
    """Whether the response was sampled to its end."""
    return bool(response) and response[-1] in ends


def close_responses(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Ids], ends: Collection[int]
) -> list[Ids]:
    """Responses as demonstrations have them: their text, then EOS if they have ended.

    A special token that ended a response is no text; another one, such as a full stop, is.
    """
    eos, special = int(tokenizer.eos_token_id), tokenizer.added_tokens_decoder
    return [
        response
        if response[-1] == eos or not has_ended(response, ends)
        else [*(response[:-1] if response[-1] in special else response), eos]
        for response in responses
    ]

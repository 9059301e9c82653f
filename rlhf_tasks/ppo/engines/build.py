"""The engine of `ppo.engine`, for as long as a stage needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.engines.protocol import Engine
from rlhf_tasks.ppo.engines.vllm import Rollouts, VllmEngine
from rlhf_tasks.ppo.engines.wire import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def opened(
    settings: Ppo,
    home: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: int,
    longest_query: int,
    is_float32: bool,
) -> Iterator[Engine | None]:
    """The engine, which is closed at the end of the block; None if the stage samples by itself.

    Its logs, and by default its weights, are below `home`. `longest_query` is in tokens.
    """
    if settings.engine is None:
        yield None
        return
    length = settings.response_length
    sampling = Sampling(temperature=settings.temperature, max_tokens=length, stop=stop)
    rollouts = Rollouts(sampling=sampling, max_tokens=longest_query + length, is_float32=is_float32)
    engine = VllmEngine(settings.engine, home / "engine", tokenizer, rollouts)
    try:
        yield engine
    finally:
        engine.close()

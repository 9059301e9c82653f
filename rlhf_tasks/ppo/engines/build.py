"""The engine of `ppo.sampler`, for as long as a stage needs it. The first process has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlhf_tasks.config import Ppo
from rlhf_tasks.ppo.engines.protocol import Engine, Ids
from rlhf_tasks.ppo.engines.vllm import Rollouts, VllmEngine
from rlhf_tasks.ppo.engines.wire import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Elsewhere:
    """The engine of the first process, as the other processes have it: they do not call it."""

    name = "the engine of the first process"

    def load(self, weights: PreTrainedModel, version: int) -> NoReturn:
        raise AssertionError("the first process alone calls the engine")

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> NoReturn:
        raise AssertionError("the first process alone calls the engine")

    def close(self) -> None:
        pass


@contextmanager
def opened(
    settings: Ppo,
    home: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: int,
    longest_query: int,
    is_float32: bool,
    is_main: bool,
) -> Iterator[Engine | None]:
    """The engine, which is closed at the end of the block; None if the stage samples by itself.

    Its logs, and by default its weights, are below `home`. `longest_query` is in tokens. In a process that is
    not the first, `is_main` is False.
    """
    if settings.sampler.kind == "policy":
        yield None
        return
    if not is_main:
        yield Elsewhere()
        return
    length = settings.response_length
    sampling = Sampling(temperature=settings.temperature, max_tokens=length, stop=stop)
    rollouts = Rollouts(sampling=sampling, max_tokens=longest_query + length, is_float32=is_float32)
    engine = VllmEngine(settings.sampler, home / "engine", tokenizer, rollouts)
    try:
        yield engine
    finally:
        engine.close()

"""Pure sampling that keeps the log-probs; used by PPO, the judge and `rlhf generate`.

There is no top-k, top-p, minimum length or repetition penalty. With them the responses would not be
samples of the distribution that the log-probs describe, and the KL estimate would turn negative.

B batch · Q query · R response · V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlhf_tasks import console
from rlhf_tasks.console import Meter
from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.data.tokenizer import Ids, encode, load_tokenizer, read_plain, response_texts
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal, place
from rlhf_tasks.models.passes import attempts
from rlhf_tasks.models.stop_tokens import StopTokens, close_responses, ends_of
from rlhf_tasks.models.tensors import NonFiniteError

CPU_CHECK, GPU_CHECK = 1, 8
"""Tokens from one check of which rows have ended to the next: a check waits for the GPU."""
BATCH_SIZE = 256
"""Responses that are sampled together outside of PPO's rollouts."""


@dataclass(frozen=True)
class Samples:
    """Responses cut after the stop token, and the log-prob of each of their tokens under the sampler.

    With k samples to each of n queries, a response to each comes before the next response to each: row i is
    a response to query i mod n. Ranks that have every r-th query have every r-th row, where r divides n.
    """

    responses: list[Ids]
    logprobs: list[Tensor]
    """One (length,) float32 tensor per response."""


class Share(NamedTuple):
    """Which responses a rank samples: numbers first, first + step, … of all ranks' `total`."""

    first: int
    step: int
    total: int


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    *,
    max_new_tokens: int,
    temperature: float,
    ends: StopTokens,
    pad: int,
    generator: torch.Generator,
    batch_size: int | None = None,
    num_samples: int = 1,
    share: Share | None = None,
    meter: Meter | None = None,
    lower: Callable[[int], object] = int,
) -> Samples:
    """Sample responses to each query from softmax(logits / temperature), by default all at once.

    There are `num_samples` responses to each. A query whose responses share a batch is computed once for
    them, also where it is given several times. `meter` counts the responses, by default one of its own.

    A row ends when it draws one of `ends`, which is kept as its last token, or reaches `max_new_tokens`. Each
    token takes one uniform number, and all of them are drawn here: a response depends on no other row, and on
    `batch_size` by rounding only. With `share` the numbers of all ranks are drawn, from generators of the
    same state: a response does not depend on the rank that samples it either. Queries of similar length
    share a batch, so that little is padded. If the GPU is out of memory, half as many rows are sampled at a
    time from there on, of which `lower` is told.

    Raises:
        NonFiniteError: if the model's logits are NaN or infinite.
        torch.OutOfMemoryError: if the memory does not suffice for one row.
    """
    num_queries, num_rows = len(queries), len(queries) * num_samples
    first, step, total = share or Share(0, 1, num_rows)
    uniform = torch.rand((total, max_new_tokens), generator=generator, device=model.device)[first::step]
    by_length = sorted(range(num_queries), key=lambda i: (len(queries[i]), i))
    order = [row for i in by_length for row in range(i, num_rows, num_queries)]
    result = Samples([[] for _ in order], [torch.empty(0) for _ in order])
    start, size = 0, min(batch_size or len(order), len(order))

    def shrink() -> None:
        nonlocal size
        half, size = size // 2, min(size, len(order) - start) // 2
        if size == 0:
            raise torch.OutOfMemoryError("while it samples one row")
        console.say(f"out of memory: {size} responses are sampled at a time now")
        lower(half)  # the last rows of a rollout may be fewer

    with nullcontext(meter) if meter else console.part("sampling", len(order), "responses") as counted:
        for attempt in attempts(shrink):
            with attempt:
                while start < len(order):
                    rows = order[start : start + size]
                    texts = [tuple(queries[row % num_queries]) for row in rows]
                    number_of = {ids: i for i, ids in enumerate(dict.fromkeys(texts))}
                    batch = collate([*map(list, number_of)], [[] for _ in number_of], pad).to(model.device)
                    query_of = torch.tensor([number_of[ids] for ids in texts], device=model.device)
                    tokens, logprobs = _decode(
                        model, batch, query_of, uniform[rows], temperature, ends, counted
                    )
                    start += len(rows)
                    for i, ids, log_p in zip(rows, tokens.tolist(), logprobs.cpu(), strict=True):
                        length = next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))
                        result.responses[i] = ids[:length]
                        result.logprobs[i] = log_p[:length].clone()  # a view is sent with all of its storage
    return result


def _decode(
    model: PreTrainedModel,
    batch: Batch,
    query_of: Tensor,
    uniform: Tensor,
    temperature: float,
    ends: StopTokens,
    meter: Meter,
) -> tuple[Tensor, Tensor]:
    """(B, R) tokens and log-probs; what follows a row's first end means nothing.

    `batch` holds the queries, and `query_of` (B,) is the query of each row.
    Rows that have ended are computed with the others until a quarter of the rows has ended.
    """
    num_rows, limit = uniform.shape
    tokens = torch.full((num_rows, limit), ends[0], device=uniform.device)
    end_ids = torch.tensor(ends, device=uniform.device)
    logprobs = torch.zeros((num_rows, limit), device=uniform.device)
    width = batch.query_response.shape[1]
    cache = _make_cache(model, width + limit)
    # without attention, as in Mamba, the cache has another name, and only the query has a mask
    is_recurrent = "cache_params" in inspect.signature(model.forward).parameters
    cache_argument = {"cache_params" if is_recurrent else "past_key_values": cache}
    mask = F.pad(batch.attention_mask, (0, limit), value=1)  # (B, Q + R)
    ids, positions = batch.query_response, batch.position_ids
    rows = torch.arange(num_rows, device=uniform.device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    check = CPU_CHECK if uniform.device.type == "cpu" else GPU_CHECK
    for t in range(limit):
        # 1. The logits of the next token, (B, V). Only the first pass reads whole queries.
        logits = model(
            input_ids=ids,
            attention_mask=None if is_recurrent and t else mask[:, : width + t],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument,
        ).logits[:, -1]
        if t == 0 and len(query_of) > len(logits):  # several samples of a query
            logits, positions, mask = (x[query_of] for x in (logits, positions, mask))
            cache.reorder_cache(query_of)  # type: ignore[arg-type]
        # 2. One token for each row.
        ids, log_p = sample_token(logits.float() / temperature, uniform[rows, t])
        tokens[rows, t], logprobs[rows, t] = ids, log_p
        meter.advance(num_rows / limit)
        alive &= (ids[:, None] != end_ids).all(1)
        ids, positions = ids[:, None], positions[:, -1:] + 1
        # 3. Rows that have ended leave the batch, once they are enough.
        if (t + 1) % check and t + 1 < limit:
            continue
        left = alive.nonzero().squeeze(1)
        if bool(logprobs.isnan().any()):
            raise NonFiniteError("the model's logits are NaN or infinite")
        if len(left) == 0:
            meter.advance(num_rows * (limit - t - 1) / limit)
            break
        if len(left) <= 0.75 * len(rows):
            rows, alive, ids, positions, mask = (x[left] for x in (rows, alive, ids, positions, mask))
            cache.reorder_cache(left)  # type: ignore[arg-type]
    return tokens, logprobs


def sample_token(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the row's uniform number.

    (B, V) logits, (B,) numbers in [0, 1) → (B,) tokens and their log-probs. A token of probability 0 is never
    drawn. The log-prob is NaN where a row's logits are NaN or infinite.
    """
    p = logits.softmax(-1)
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1:]
    # rounding must not put the product at the total itself, which no cumulative probability exceeds
    below = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, below, right=True).clamp_max(logits.shape[-1] - 1)
    return tokens.squeeze(1), p.gather(1, tokens).squeeze(1).log()


class _PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, with room for all tokens from the start: nothing is copied to add one."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens, self._length = num_tokens, 0
        self._buffers: tuple[Tensor, ...] | None = None  # keys and values, (B, heads, num_tokens, width)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the new states; all so far, as views."""
        # under autocast, keys are rotated in float32, and attention takes them in the values' bfloat16
        new = (key_states.to(value_states.dtype), value_states)
        if self._buffers is None:
            self.lazy_initialization(*new)
            self._buffers = tuple(x.new_empty(*x.shape[:2], self._num_tokens, x.shape[3]) for x in new)
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, start : self._length] = states
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows. Of two methods for it, only this one keeps a linear-attention layer's states."""
        if self._buffers is not None:
            self._buffers = tuple(buffer[beam_idx] for buffer in self._buffers)
            # else the old buffers of all layers live until the next pass
            self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def _make_cache(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """The model's cache, with its attention layers preallocated; the mask alone enforces a sliding window."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[i] = _PreallocatedLayer(num_tokens)
    return cache


@contextmanager
def keep_casts(model: nn.Module) -> Iterator[None]:
    """Within the block autocast keeps its 16-bit copies of all weights.

    By default it keeps those of weights that train: of frozen ones, such as those below adapters, it would
    make copies for every token.
    """
    floats = filter(Tensor.is_floating_point, model.parameters())
    frozen = [weight for weight in floats if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    precision: str = "fp32",
    ends: StopTokens | None = None,
    batch_size: int = BATCH_SIZE,
    meter: Meter | None = None,
) -> list[Ids]:
    """Sample one response to each prompt, in the prompts' order; `seed` decides all draws.

    With the `precision` bf16 the passes compute as those of PPO do (`launch.precision`).

    A response ends with one of `ends`, by default those of the checkpoint, or at `max_new_tokens` without it.
    `meter` counts the responses. Errors as in `sample`.
    """
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16")
    with keep_casts(model), autocast:
        return sample(
            model,
            encode(tokenizer, prompts),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            ends=ends_of(model, tokenizer) if ends is None else ends,
            pad=tokenizer.pad_token_id,
            generator=torch.Generator(model.device).manual_seed(seed),
            batch_size=batch_size,
            meter=meter,
        ).responses


def sample_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    temperature: float,
    max_new_tokens: int,
    num_samples: int,
    seed: int,
) -> list[str]:
    """Sample texts of a model for a prompt; a plain one is a turn, as in its data."""
    prompts = read_plain(tokenizer, [prompt]) * num_samples
    responses = sample_responses(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    responses = close_responses(tokenizer, responses, ends_of(model, tokenizer))
    return response_texts(tokenizer, encode(tokenizer, prompts), responses)


def load_for_texts(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint's model, on the GPU if there is one, and its tokenizer, which must fit it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = place(load_causal(folder), device), load_tokenizer(folder)
    contracts.check_fits(model, tokenizer, str(folder))
    return model, tokenizer
